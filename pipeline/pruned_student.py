"""The pruned student: made from a target's layers, measured against its answers, stored and put together again.

Only the layers, the final norm and the draft vocabulary are stored; embeddings and head are the target's own, which
halves the file.

What this module does not know: how the student is trained.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from pipeline.files import replacing, replacing_folder
from treegraft.draft_vocabulary import DRAFT_VOCABULARY
from treegraft.errors import UserError


@dataclass(frozen=True)
class HeldOut:
    """One prompt that training never sees, with the target's greedy answer."""

    kind: str
    tokens: Tensor  # [length] int64, prompt then answer
    answer_start: int


def make_student(target: LlamaForCausalLM, layers: Sequence[int]) -> LlamaForCausalLM:
    """A Llama with copies of the target's `layers` only; embeddings and head share the target's tensors."""
    config = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers = len(layers)
    with torch.device("meta"):
        student = LlamaForCausalLM(config)
    state = {
        f"model.layers.{new}.{name}": tensor.detach().clone()
        for new, old in enumerate(layers)
        for name, tensor in target.model.layers[old].state_dict().items()
    }
    state["model.norm.weight"] = target.model.norm.weight.detach().clone()
    state["model.embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
    state["lm_head.weight"] = target.lm_head.weight.detach()
    student.load_state_dict(state, assign=True)
    student.model.rotary_emb = target.model.rotary_emb
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(is_stored(name))
    return student.train()


def is_stored(name: str) -> bool:
    """Whether a parameter of that name is trained and stored: layers and final norm, not embeddings or head."""
    return name.startswith("model.layers.") or name == "model.norm.weight"


def layer_states(student: LlamaForCausalLM, tokens: Tensor) -> list[Tensor]:
    """Hidden states after each layer, before the final norm: [rows, length] -> layers x [rows, length, hidden]."""
    hidden = student.model.embed_tokens(tokens)
    turn = student.model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])
    states = []
    for layer in student.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=turn)
        states.append(hidden)
    return states


@torch.inference_mode()
def agreement(student: LlamaForCausalLM, held_out: Sequence[HeldOut], vocabulary: Tensor) -> dict[str, float]:
    """Share of answer positions where the student's argmax is the target's greedy token; by kind and "all".

    vocabulary: [V] int64, the tokens that the student can say.
    """
    head = student.lm_head.weight[vocabulary]
    counts: dict[str, list[int]] = {}
    for item in held_out:
        states = layer_states(student, item.tokens[None, :-1])
        logits = student.model.norm(states[-1][0, item.answer_start - 1 :]) @ head.T
        hits = int((vocabulary[logits.argmax(-1)] == item.tokens[item.answer_start :]).sum())
        for kind in (item.kind, "all"):
            sums = counts.setdefault(kind, [0, 0])
            sums[0] += hits
            sums[1] += len(logits)
    return {kind: hits / total for kind, (hits, total) in sorted(counts.items())}


@torch.inference_mode()
def answer_greedily(
    target: LlamaForCausalLM, tokenizer: Any, prompts: Sequence[tuple[str, str]], answer_tokens: int, batch: int = 16
) -> list[HeldOut]:
    """The target's greedy answers to (kind, prompt) pairs, in batches of similar length."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for _, p in prompts
    ]
    ids = [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    end = int(tokenizer.eos_token_id)
    made: dict[int, HeldOut] = {}
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        longest = max(len(ids[i]) for i in group)
        padded = torch.tensor([[end] * (longest - len(ids[i])) + ids[i] for i in group])
        mask = torch.tensor([[0] * (longest - len(ids[i])) + [1] * len(ids[i]) for i in group])
        whole = target.generate(padded, attention_mask=mask, max_new_tokens=answer_tokens, do_sample=False)
        for i, row in zip(group, whole[:, longest:].tolist(), strict=True):
            answer = row[: row.index(end) + 1] if end in row else row
            made[i] = HeldOut(prompts[i][0], torch.tensor(ids[i] + answer), len(ids[i]))
    return [made[i] for i in range(len(ids))]


def save_layers(student: LlamaForCausalLM, vocabulary: Tensor, path: Path) -> None:
    """Write layers, final norm and draft vocabulary (temporary name, then renamed); git holds this file.

    Matrices are stored as int8 [out, in] with one scale for each output (`<name>.scale`, float32 [out]): half the size
    of bf16, and a draft never changes the output.
    """
    kept = {"draft_vocabulary": vocabulary.to(torch.int32)}
    for name, parameter in student.named_parameters():
        if is_stored(name) and parameter.ndim == 2:
            scale = parameter.detach().abs().amax(dim=1).clamp_min(1e-8) / 127
            kept[name] = (parameter.detach() / scale[:, None]).round().to(torch.int8)
            kept[f"{name}.scale"] = scale
        elif is_stored(name):
            kept[name] = parameter.detach().to(torch.bfloat16)
    with replacing(path) as temporary:
        save_file(kept, str(temporary), metadata={"format": "pt"})


def load_layers(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """What `save_layers` wrote: bf16 tensors by name, and the draft vocabulary, [V] int64."""
    stored = load_file(str(path))
    vocabulary = stored.pop("draft_vocabulary", torch.zeros(0)).long()
    scales = {name: stored.pop(name) for name in sorted(stored) if name.endswith(".scale")}
    for name, scale in scales.items():
        whole = name.removesuffix(".scale")
        stored[whole] = stored[whole].float() * scale[:, None]
    return {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}, vocabulary


def assemble_drafter(target_folder: Path, layers_file: Path, out_folder: Path) -> None:
    """Write a complete transformers folder from stored layers and the target's embeddings, config and tokenizer.

    out_folder/: config.json, model.safetensors (bf16), draft_vocabulary.json, generation_config.json, tokenizer files.
    An existing folder is replaced. Raises UserError if the layers do not fit the target.
    """
    layers, vocabulary = load_layers(layers_file)
    target_file = target_folder / "model.safetensors"
    config = json.loads((target_folder / "config.json").read_text())
    numbers = {int(name.split(".")[2]) for name in layers if name.startswith("model.layers.")}
    with safe_open(str(target_file), framework="pt") as target:
        names = set(target.keys())
        model = {name: target.get_tensor(name) for name in names if not is_stored(name)}
        expected = {n: tuple(target.get_slice(n).get_shape()) for n in names if n.startswith("model.layers.0.")}
        norm = tuple(target.get_slice("model.norm.weight").get_shape())
    wanted = {n.replace("layers.0.", f"layers.{i}."): s for n, s in expected.items() for i in range(len(numbers))}
    wanted["model.norm.weight"] = norm
    found = {name: tuple(tensor.shape) for name, tensor in layers.items()}
    if found != wanted:
        wrong = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))[0]
        raise UserError(
            f"{layers_file} does not fit the target in {target_folder}: {wrong} is {found.get(wrong)} in the file "
            f"and should be {wanted.get(wrong)}."
        )
    model.update(layers)
    config["num_hidden_layers"] = len(numbers)
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
    with replacing_folder(out_folder) as temporary:
        save_file(stored, str(temporary / "model.safetensors"), metadata={"format": "pt"})
        (temporary / DRAFT_VOCABULARY).write_text(json.dumps(vocabulary.tolist()))
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for source in sorted(target_folder.iterdir()):
            if source.is_file() and source.suffix != ".safetensors" and source.name != "config.json":
                shutil.copyfile(source, temporary / source.name)
