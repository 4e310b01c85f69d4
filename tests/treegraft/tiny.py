"""Tiny random Llama-class models and a tiny tokenizer for tests: built in memory, without the hub, in milliseconds.

What they guarantee: the same arguments give the same weights; the next-token distributions are peaked (a greedy
continuation has a clear winner, a sampled one has several likely tokens); every id of the vocabulary decodes to its
own text. What they do not: the text means nothing.
"""

from pathlib import Path
from typing import cast

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treegraft.costs import CostModel, LatencyCurve
from treegraft.draft_vocabulary import restrict_head
from treegraft.models import LanguageModel
from treegraft.tree import IntArray

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"


def tiny_llama(
    vocab_size: int = 64,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    seed: int = 0,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A random Llama in evaluation mode on the CPU, without gradients; grouped-query attention where `heads` is even.

    Its weights come from a generator of their own, so the global random state is neither used nor changed;
    another dtype holds the same weights, rounded.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    # Built in its dtype, not cast: a cast would round the rotary frequencies too, which loading from a folder does not.
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # norms stay at one
        # With the usual 0.02 all tokens would be about equally likely and equally long drafts accepted by chance alone;
        # fan-in scaling keeps the residual stream at unit size, and a head of std 0.5 gives logits of std 0.5 *
        # sqrt(hidden).
        std = 1.0 if "embed_tokens" in name else 0.5 if "lm_head" in name else 1.5 * parameter.shape[1] ** -0.5
        parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    return cast(LlamaForCausalLM, model.eval().requires_grad_(False))


def tiny_tokenizer(vocab_size: int = 64) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of exactly `vocab_size` tokens: id 0 `<s>`, id 1 `</s>`, id i the word ` w<i>`.

    A word carries its space in front, as in byte-level BPE: the text of a sequence is the concatenation of its tokens'
    texts. Encoding adds no special token, ignores spaces beside words, and makes `</s>` of a word it does not know.
    """
    vocabulary = {BOS: 0, EOS: 1} | {f" w{index}": index for index in range(2, vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=EOS))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace("  ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\S+"), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_language_model(
    vocab_size: int = 64,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    seed: int = 0,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
    name: str = "tiny",
    draft_tokens: IntArray | None = None,
) -> LanguageModel:
    """`tiny_llama` and `tiny_tokenizer` as the LanguageModel that the library works on; nothing is written to disk."""
    module = tiny_llama(vocab_size, layers, hidden, heads, seed, max_position_embeddings, dtype)
    if draft_tokens is not None:
        restrict_head(module, draft_tokens)
    return LanguageModel(
        name=name,
        module=module,
        tokenizer=tiny_tokenizer(vocab_size),
        vocab_size=vocab_size,
        context_limit=max_position_embeddings,
        eos_token_ids=(1,),
        draft_tokens=draft_tokens,
        folder=Path(name),
    )


def cost_model(target: LatencyCurve, drafters: tuple[LatencyCurve | None, ...], other_ms: float = 0.0) -> CostModel:
    """A cost model whose tokens cost the same with and without logits, and ``other_ms`` for everything else."""
    return CostModel(target, drafters, target, drafters, other_ms, other_ms, other_ms, other_ms)


def save_tiny(folder: Path, vocab_size: int = 64, layers: int = 2, seed: int = 0) -> Path:
    """Write a tiny model and its tokenizer as a plain transformers folder; returns `folder`."""
    tiny_llama(vocab_size, layers, seed=seed).save_pretrained(folder)
    tiny_tokenizer(vocab_size).save_pretrained(folder)
    return folder
