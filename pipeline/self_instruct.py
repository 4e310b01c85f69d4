"""Teacher data for distillation: chats that a target model writes with itself, and its hidden states on them.

Every row of a batch is one chat of exactly ``row_tokens`` tokens, so all rows stand at the same position in every step:
no padding, no attention mask, and one preallocated key-value cache. A row is a small machine (`ChatRow`): it first
copies given tokens (chat template, opening words), then samples the rest of the user's turn from the target itself,
then lets the target answer greedily, then begins a follow-up turn, until the row is full. Hidden states are kept as
they pass by, so the teacher never reads a token twice.

What this module does not know: the student, its loss, or any data set from outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

from pipeline.files import replacing
from treegraft.cpu_kernels import PackedLinear, can_pack

OPENINGS: dict[str, tuple[str, ...]] = {
    "chat": (
        "",
        "",
        "",
        "I want to",
        "Imagine you are",
        "Write a",
        "Can you help me",
        "How can I",
        "Compare",
        "Suppose",
    ),
    "maths": (
        "If a",
        "A farmer has",
        "A store sells",
        "Tom has",
        "Maria buys",
        "A train travels",
        "There are",
        "Every day, Anna",
        "Solve step by step: a",
        "A baker makes",
        "John is",
        "At a school,",
    ),
    "instruction": (
        "",
        "Write a short",
        "Give three",
        "Explain",
        "Describe",
        "List",
        "Rewrite the following sentence",
        "Create a",
        "Generate",
        "Suggest",
        "Translate",
        "Classify",
        "Edit",
        "Name",
    ),
    "code": (
        "Complete the following Python function:\n\ndef ",
        "Complete the following Python function.\n\nfrom typing import List\n\n\ndef ",
        "def ",
        "from typing import List\n\n\ndef ",
        "Write a Python function that",
        "Write a function",
        "import math\n\n\ndef ",
        "Finish this code:\n\n```python\ndef ",
    ),
    "question": (
        "What is",
        "Who",
        "When did",
        "Where is",
        "Why do",
        "How does",
        "Which",
        "What are",
        "How many",
        "What does",
        "who was",
        "when is",
    ),
    "summary": (
        "Summarize: ",
        "Summarize the following article:\n\n",
        "Please summarize this text in two sentences:\n\n",
        "Summarize the following news story:\n\n",
        "Give a short summary of this article.\n\n",
        "Article: ",
    ),
}
"""Opening words of self-written user turns, by kind; the empty opening lets the target write the whole turn."""


@dataclass(frozen=True)
class TeacherRecipe:
    """Sizes of the teacher data; every field counts in tokens or rows unless it says otherwise."""

    row_tokens: int = 256
    """Length of one chat, system prompt included."""
    batch_rows: int = 128
    """Chats decoded together; one shard file holds one batch. Its cache takes 1.5 GB of memory."""
    answer_tokens: int = 160
    """Longest greedy answer; a longer one is cut and the chat goes on with another turn."""
    user_tokens: int = 56
    """Longest self-written user turn."""
    article_tokens: int = 128
    """Longest self-written user turn of kind "summary"."""
    temperature: float = 0.9
    """Sampling temperature of user turns (answers are greedy)."""
    top_p: float = 0.95
    """Nucleus kept when user turns are sampled."""
    hidden_after: tuple[int, ...] = (5, 10, 15, 20, 25, 30)
    """Hidden states kept: after this many layers of the target; the last is taken before the final norm."""
    seed: int = 0


@dataclass
class ChatRow:
    """One chat under way: what its next token is, given the target's logits."""

    forced: list[int]  # tokens to copy before anything is decided by the target
    user_left: int  # tokens that the self-written user turn may still take; 0: the turn is complete
    answer_left: int = 0
    answering: bool = False
    kinds: list[int] = field(default_factory=list)  # 0 copied, 1 sampled user turn, 2 greedy answer, one per token


@dataclass(frozen=True)
class ChatTokens:
    """The pieces of a chat template in token ids (lists without tensors)."""

    before_user: list[int]
    after_user: list[int]  # from the end of a user turn (end token included) to the first answer token
    between: list[int]  # from an answer's end token (included) to the next user turn
    end: int


def chat_tokens(tokenizer: Any) -> ChatTokens:
    """Cut the tokenizer's chat template into the pieces around a user turn and an answer."""
    user, answer = "USERTURN", "ANSWERTURN"
    chat = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template([*chat, {"role": "user", "content": user}], tokenize=False)
    first = text.index(user)
    middle = text.index(answer)
    second = text.index(user, middle)

    def ids(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False).input_ids)

    return ChatTokens(
        before_user=ids(text[:first]),
        after_user=ids(text[first + len(user) : middle]),
        between=ids(text[middle + len(answer) : second]),
        end=int(tokenizer.eos_token_id),
    )


def fast_linear(parts: Sequence[torch.nn.Linear]) -> torch.nn.Module:
    """One layer that computes the outputs of several bias-free ones on the same input, side by side."""
    weight = torch.cat([part.weight for part in parts]).detach()
    if can_pack(weight):
        return PackedLinear(weight)
    fused = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    fused.weight = torch.nn.Parameter(weight, requires_grad=False)
    return fused


class BatchDecoder:
    """A Llama that decodes many rows in step, with fused projections and a preallocated key-value cache in fp32."""

    def __init__(self, model: LlamaForCausalLM, rows: int, row_tokens: int) -> None:
        config = model.config
        self.model = model
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = config.hidden_size // config.num_attention_heads
        # keys lie transposed, [layer][rows, kv_heads, head_dim, row_tokens], so that scores are one plain product
        self.keys = [torch.zeros(rows, self.kv_heads, self.head_dim, row_tokens) for _ in model.model.layers]
        self.values = [torch.zeros(rows, self.kv_heads, row_tokens, self.head_dim) for _ in model.model.layers]
        layers = [(layer.self_attn, layer.mlp) for layer in model.model.layers]
        self.qkv = [fast_linear([a.q_proj, a.k_proj, a.v_proj]) for a, _ in layers]
        self.out = [fast_linear([a.o_proj]) for a, _ in layers]
        self.gate_up = [fast_linear([m.gate_proj, m.up_proj]) for _, m in layers]
        self.down = [fast_linear([m.down_proj]) for _, m in layers]
        self.head = fast_linear([model.lm_head])
        self.cos, self.sin = model.model.rotary_emb(torch.zeros(1), torch.arange(row_tokens)[None])

    def step(self, tokens: Tensor, position: int, keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed one token per row at `position`.

        tokens: [rows]. Returns hidden states after the layers counted in `keep`, [len(keep), rows, hidden], and the
        final-normed hidden state, [rows, hidden].
        """
        rows = len(tokens)
        hidden = self.model.model.embed_tokens(tokens)
        cos, sin = self.cos[:, position], self.sin[:, position]
        kept: list[Tensor] = []
        query_size = self.heads * self.head_dim
        for index, layer in enumerate(self.model.model.layers):
            fused = self.qkv[index](layer.input_layernorm(hidden))
            fused = fused.view(rows, -1, self.head_dim)
            turned, _ = apply_rotary_pos_emb(fused[:, : self.heads + self.kv_heads], fused[:, :1], cos, sin)
            query = turned[:, : self.heads].reshape(rows, self.kv_heads, -1, self.head_dim)
            self.keys[index][..., position] = turned[:, self.heads :]
            self.values[index][:, :, position] = fused[:, self.heads + self.kv_heads :]
            scores = torch.matmul(query, self.keys[index][..., : position + 1]) * self.head_dim**-0.5
            mixed = torch.matmul(scores.softmax(-1), self.values[index][:, :, : position + 1])
            hidden = hidden + self.out[index](mixed.reshape(rows, query_size))
            gate, up = self.gate_up[index](layer.post_attention_layernorm(hidden)).chunk(2, dim=-1)
            hidden = hidden + self.down[index](torch.nn.functional.silu(gate) * up)
            if index + 1 in keep:
                kept.append(hidden)
        return torch.stack(kept), self.model.model.norm(hidden)


def sample_top_p(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample one token per row from the nucleus of the 200 likeliest: logits [rows, vocabulary] -> [rows]."""
    values, ids = (logits / temperature).topk(min(200, logits.shape[-1]))
    probs = values.softmax(-1)
    # a token stays if the mass before it is below top_p: the first one always stays
    probs = probs * ((probs.cumsum(-1) - probs) < top_p)
    return ids.gather(-1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def _advance(row: ChatRow, greedy: int, sampled: int, chat: ChatTokens, recipe: TeacherRecipe) -> int:
    """Choose the row's next token and move its state."""
    if row.forced:
        row.kinds.append(0)
        return row.forced.pop(0)
    if row.user_left:
        row.user_left -= 1
        if sampled == chat.end or row.user_left == 0:
            row.user_left = 0
            row.forced = chat.after_user[1:] if sampled == chat.end else list(chat.after_user)
            row.answering, row.answer_left = True, recipe.answer_tokens
        row.kinds.append(1)
        return sampled
    row.answer_left -= 1
    row.kinds.append(2)
    if greedy == chat.end or row.answer_left == 0:
        row.forced = chat.between[1:] if greedy == chat.end else list(chat.between)
        row.answering, row.user_left = False, recipe.user_tokens
    return greedy


def _first_rows(
    prompts: Sequence[str],
    whole: bool,
    tokenizer: Any,
    chat: ChatTokens,
    recipe: TeacherRecipe,
    generator: torch.Generator,
) -> list[ChatRow]:
    """One row for each prompt if `whole`; else `batch_rows` rows that begin with random openings.

    Every other opening is the beginning of a random prompt, cut at a random token, so that the target writes further
    questions of the kind that will be asked.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def draw(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    if whole:
        return [ChatRow(ids(prompt) + chat.after_user, 0, recipe.answer_tokens, True) for prompt in prompts]
    kinds = list(OPENINGS)
    made = []
    for row in range(recipe.batch_rows):
        if prompts and row % 2:
            prompt = ids(prompts[draw(len(prompts))])
            opening = prompt[: 1 + draw(min(len(prompt), recipe.user_tokens))]
            made.append(ChatRow(opening, recipe.user_tokens))
            continue
        kind = kinds[draw(len(kinds))]
        limit = recipe.article_tokens if kind == "summary" else recipe.user_tokens
        made.append(ChatRow(ids(OPENINGS[kind][draw(len(OPENINGS[kind]))]), limit))
    return made


def _read_shared_start(decoder: BatchDecoder, start: list[int], keep: Sequence[int]) -> Tensor:
    """Read the system prompt once and copy its keys and values to all rows; hidden states [states, start, hidden]."""
    one = BatchDecoder(decoder.model, 1, len(start))
    hidden = [one.step(torch.tensor([token]), position, keep)[0][:, 0] for position, token in enumerate(start)]
    for mine, theirs in zip(decoder.keys, one.keys, strict=True):
        mine[..., : len(start)] = theirs
    for mine, theirs in zip(decoder.values, one.values, strict=True):
        mine[:, :, : len(start)] = theirs
    return torch.stack(hidden, dim=1)


@torch.inference_mode()
def write_shard(
    model: LlamaForCausalLM,
    tokenizer: Any,
    prompts: Sequence[str],
    whole: bool,
    shard: int,
    recipe: TeacherRecipe,
    path: Path,
) -> None:
    """Decode one batch of chats and write it to `path`, whole or not at all.

    `prompts` are the first user turns of the rows if `whole`; else `recipe.batch_rows` rows begin with random openings,
    half of them taken from `prompts`.
    Tensors written: tokens [rows, row_tokens] int32; kinds [rows, row_tokens] uint8 (0 copied, 1 sampled user turn,
    2 greedy answer); hidden [states, rows, row_tokens, hidden] bf16; top [rows, row_tokens, 8] int32, the target's
    likeliest next tokens, best first (zeros where the next token is copied).
    """
    chat = chat_tokens(tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed * 100_003 + shard)
    machines = _first_rows(prompts, whole, tokenizer, chat, recipe, generator)
    rows, length = len(machines), recipe.row_tokens
    decoder = BatchDecoder(model, rows, length)
    tokens = torch.zeros(rows, length, dtype=torch.int32)
    width = model.config.hidden_size
    hidden = torch.zeros(len(recipe.hidden_after), rows, length, width, dtype=torch.bfloat16)
    top = torch.zeros(rows, length, 8, dtype=torch.int32)
    # the last token of the system prompt stays with the rows, so that each has a token to read before it must decide
    start = len(chat.before_user) - 1
    tokens[:, :start] = torch.tensor(chat.before_user[:start], dtype=torch.int32)
    hidden[:, :, :start] = _read_shared_start(decoder, chat.before_user[:start], recipe.hidden_after)[:, None]
    for row in machines:
        row.kinds = [0] * start
        row.forced = [chat.before_user[start], *row.forced]
    greedy = sampled = [0] * rows
    for position in range(start, length):
        chosen = [_advance(row, g, s, chat, recipe) for row, g, s in zip(machines, greedy, sampled, strict=True)]
        tokens[:, position] = torch.tensor(chosen, dtype=torch.int32)
        kept, final = decoder.step(tokens[:, position].long(), position, recipe.hidden_after)
        hidden[:, :, position] = kept.to(torch.bfloat16)
        decided = [i for i, row in enumerate(machines) if not row.forced]
        if not decided:  # every next token is copied: the vocabulary is not needed
            continue
        logits = decoder.head(final[decided])
        best = logits.topk(min(8, logits.shape[-1])).indices
        top[decided, position, : best.shape[1]] = best.to(torch.int32)
        draws = sample_top_p(logits, recipe.temperature, recipe.top_p, generator)
        greedy, sampled = list(greedy), list(sampled)
        for i, g, s in zip(decided, best[:, 0].tolist(), draws.tolist(), strict=True):
            greedy[i], sampled[i] = g, s
    kinds = torch.tensor([row.kinds for row in machines], dtype=torch.uint8)
    with replacing(path) as temporary:
        save_file({"tokens": tokens, "kinds": kinds, "hidden": hidden, "top": top}, str(temporary))
