"""Builds a strong drafter for a target without a smaller sibling: a depth-pruned copy distilled on its own answers.

Four steps, each kept in the work folder so that a killed run goes on where it stood:

1. *Teach*: the target writes chats and answers them greedily (`pipeline.self_instruct`); its hidden states are kept.
2. *Fit*: the student takes some of the target's layers. Where a block of the target's layers ends, the down
   projection of the student's last layer for that block is refitted in closed form (ridge regression), so that its
   output comes close to what the target has after the whole block.
3. *Match*: gradient steps on the distance between the student's and the target's hidden states. No vocabulary is
   involved, so a step is cheap.
4. *Distil*: the same distance, plus divergence from the target's next-token distribution and cross-entropy on its
   greedy token, over the draft vocabulary: the tokens that the drafter's head keeps (see
   `treegraft.draft_vocabulary`).

The student itself - its making, measuring and storing - is in `pipeline.pruned_student`.

What this module does not know: trees, schedulers, or how the drafter is used.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from pipeline.files import digest, replacing, write_text
from pipeline.pruned_student import (
    HeldOut,
    agreement,
    answer_greedily,
    assemble_drafter,
    layer_states,
    make_student,
    save_layers,
)
from pipeline.self_instruct import TeacherRecipe, write_shard
from treegraft.errors import UserError
from treegraft.model_folder import digest_of

__all__ = ["DrafterRecipe", "Progress", "assemble_drafter", "train_drafter"]

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); stages are "teach", "fit" and "train"."""


@dataclass(frozen=True)
class DrafterRecipe:
    """Everything that decides what the drafter becomes; the defaults made the stored one."""

    layers: tuple[int, ...] = (0, 4, 9, 10, 14, 19, 24, 25, 29)
    """Layers of the target that the student starts from."""
    matched: tuple[int, ...] = (1, 2, 4, 5, 6, 8)
    """Student layers whose output shall be the target's state, one for each of `teacher.hidden_after`."""
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    self_shards: int = 9
    """Batches of self-written chats, beside the batches that hold the given prompts."""
    given_row_tokens: int = 384
    """Chat length of given prompts; one that leaves no 80 tokens for an answer is left out."""
    fit_rows: int = 48
    """Chats that the closed-form fit reads; 0 leaves the copied layers as they are."""
    fit_ridge: float = 1e-3
    """Pull towards the copied projection, as a share of the mean squared feature."""
    match_steps: int = 120
    """Steps on hidden states alone; the rest is on hidden states and next tokens."""
    total_steps: int = 1250
    batch_rows: int = 2
    """Chats in one step."""
    learning_rate: float = 6e-4
    """Peak; it falls linearly to zero after the warm-up. Twice as much does harm at this batch size."""
    warmup_steps: int = 50
    vocabulary: int = 8192
    """Tokens of the draft vocabulary."""
    kind_weights: tuple[float, float, float] = (0.1, 0.5, 1.0)
    """Loss weight of a position whose next token is copied, sampled in a user turn, greedy in an answer."""
    hidden_weight: float = 1.0
    """Weight of the hidden-state distance while distilling (1 while matching)."""
    greedy_weight: float = 0.5
    """Share of cross-entropy on the greedy token; the rest is divergence from the target's distribution."""
    checkpoint_steps: int = 100
    seed: int = 0


class ChatStore:
    """All teacher shards in memory: rows of tokens with the target's states.

    Rows of one batch come from one shard, so they have one length.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.shards: list[dict[str, Tensor]] = [load_file(str(path)) for path in paths]

    def batches(self, rows: int, epoch: int, seed: int) -> list[tuple[int, Tensor]]:
        """Shuffled (shard, row numbers [rows]) of one pass over the data."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        made = [
            (index, chunk)
            for index, shard in enumerate(self.shards)
            for chunk in torch.randperm(len(shard["tokens"]), generator=generator).split(rows)
        ]
        return [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]

    def batch(self, shard: int, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of some rows of a shard, shaped as in `pipeline.self_instruct.write_shard`."""
        return {name: t[:, rows] if name == "hidden" else t[rows] for name, t in self.shards[shard].items()}

    def frequent(self, count: int, size: int) -> Tensor:
        """The draft vocabulary: `count` tokens out of `size`, [count] int64, ascending.

        Answers and self-written turns count most, tokens that the target considered a little; among the rest, which
        the data hardly shows, a low id goes first, because tokenizers number their merges by frequency.
        """
        seen = torch.zeros(size)
        for shard in self.shards:
            seen += 4 * torch.bincount(shard["tokens"][shard["kinds"] > 0].long(), minlength=size)
            seen += 0.25 * torch.bincount(
                shard["top"][:, :-1][shard["kinds"][:, 1:] > 0].flatten().long(), minlength=size
            )
        seen += 4 * (1 - torch.arange(size) / size)
        return seen.argsort(descending=True, stable=True)[:count].sort().values


@torch.no_grad()
def fit_down_projections(
    student: LlamaForCausalLM, store: ChatStore, recipe: DrafterRecipe, progress: Progress
) -> list[float]:
    """Refit the matched layers' down projections in closed form, from the first to the last; their relative errors.

    The target state t after the block is matched by a + W u, where a is the state after the layer's attention and u
    its gated features; W minimises sum |t - a - W u|^2 / |t|^2 with a ridge towards the copied W.
    """
    shard = store.shards[-1]
    rows = min(recipe.fit_rows, len(shard["tokens"]))
    tokens = shard["tokens"][:rows].long()
    hidden = student.model.embed_tokens(tokens)
    turn = student.model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])
    errors = []
    for index, layer in enumerate(student.model.layers):
        if index not in recipe.matched:
            hidden = torch.cat([layer(part, position_embeddings=turn, attention_mask=None) for part in hidden.split(8)])
            continue
        states = shard["hidden"][recipe.matched.index(index), :rows]
        after: list[tuple[Tensor, Tensor]] = []
        old = layer.mlp.down_proj.weight  # [hidden, features]
        gram, cross = torch.zeros(old.shape[1], old.shape[1]), torch.zeros(old.shape[1], old.shape[0])
        for part, wanted in zip(hidden.split(8), states.split(8), strict=True):
            normed = layer.input_layernorm(part)
            state = part + layer.self_attn(normed, position_embeddings=turn, attention_mask=None)[0]
            inner = layer.post_attention_layernorm(state)
            features = layer.mlp.act_fn(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner)
            target = wanted.float()
            scale = target.norm(dim=-1, keepdim=True).reciprocal()
            scaled = (features * scale).flatten(0, 1)
            gram += scaled.T @ scaled
            cross += scaled.T @ ((target - state) * scale).flatten(0, 1)
            after.append((state, features))
        pull = recipe.fit_ridge * gram.diagonal().mean()
        gram.diagonal().add_(pull)
        layer.mlp.down_proj.weight.copy_(torch.linalg.solve(gram, cross + pull * old.T).T)
        hidden = torch.cat([state + layer.mlp.down_proj(features) for state, features in after])
        errors.append(float(relative_error(hidden, states.float()).mean()))
        progress("fit", index + 1, len(student.model.layers))
    return errors


def relative_error(state: Tensor, wanted: Tensor) -> Tensor:
    """Squared distance over squared length, by token: [.., hidden] twice -> [..]."""
    return (state - wanted).square().sum(-1) / wanted.square().sum(-1).clamp_min(1e-6)


@dataclass(frozen=True)
class DraftHead:
    """The part of the target's head that stands for the draft vocabulary (V tokens), and its final norm."""

    tokens: Tensor  # [V] int64, ascending
    column: Tensor  # [vocabulary] int64: where a token is in `tokens`, -1 if it is not
    weight: Tensor  # [V, hidden]
    norm: torch.nn.Module

    @classmethod
    def of(cls, target: LlamaForCausalLM, tokens: Tensor) -> "DraftHead":
        column = torch.full((target.config.vocab_size,), -1)
        column[tokens] = torch.arange(len(tokens))
        return cls(tokens, column, target.lm_head.weight[tokens].detach(), target.model.norm)


def chat_loss(
    student: LlamaForCausalLM, head: DraftHead, batch: dict[str, Tensor], recipe: DrafterRecipe, step: int
) -> Tensor:
    """The loss of one step (a scalar); batch as in a shard."""
    tokens = batch["tokens"].long()
    wanted = batch["hidden"].float()
    weights = torch.tensor(recipe.kind_weights)[batch["kinds"].long()]
    states = layer_states(student, tokens)
    matched = [states[index] for index in recipe.matched]
    distance = torch.stack([relative_error(s, w) for s, w in zip(matched, wanted, strict=True)]).mean(0)
    # a state matters for what comes next, so it has the weight of the next token
    weights = torch.cat([weights[:, 1:], weights[:, -1:]], dim=1)
    loss = (distance * weights).sum() / weights.sum()
    if step < recipe.match_steps:
        return loss
    chosen = batch["kinds"][:, 1:].long() > 0
    with torch.no_grad():
        teacher = (head.norm(wanted[-1, :, :-1][chosen]) @ head.weight.T).log_softmax(-1)
    mine = (student.model.norm(states[-1][:, :-1][chosen]) @ head.weight.T).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - mine)).sum(-1)
    label = head.column[tokens[:, 1:][chosen]]
    greedy = torch.nn.functional.nll_loss(mine, label.clamp_min(0), reduction="none")
    # neither a sampled user token nor one that the drafter cannot say is a label
    labelled = (batch["kinds"][:, 1:][chosen] == 2) & (label >= 0)
    mixed = torch.where(labelled, recipe.greedy_weight * greedy + (1 - recipe.greedy_weight) * divergence, divergence)
    token_weights = weights[:, :-1][chosen]
    return recipe.hidden_weight * loss + (mixed * token_weights).sum() / token_weights.sum()


def learning_rate(recipe: DrafterRecipe, step: int) -> float:
    """Linear warm-up to the peak, then a linear fall to zero."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    return recipe.learning_rate * (recipe.total_steps - step) / (recipe.total_steps - recipe.warmup_steps)


def teach(
    target: LlamaForCausalLM,
    tokenizer: Any,
    prompts: Sequence[str],
    recipe: DrafterRecipe,
    work: Path,
    progress: Progress,
) -> list[Path]:
    """Write the teacher shards that `work` lacks; paths of all, given prompts last."""
    given_recipe = replace(recipe.teacher, row_tokens=recipe.given_row_tokens)
    room = recipe.given_row_tokens - 128  # system prompt, template and 80 tokens of answer
    fitting = [p for p in prompts if len(tokenizer(p).input_ids) <= room]
    size = recipe.teacher.batch_rows
    jobs: list[tuple[Path, Sequence[str], TeacherRecipe]] = [
        (work / f"self-{shard:04d}.safetensors", prompts, recipe.teacher) for shard in range(recipe.self_shards)
    ]
    jobs += [
        (work / f"given-{start // size:04d}.safetensors", fitting[start : start + size], given_recipe)
        for start in range(0, len(fitting), size)
    ]
    for done, (path, some, teacher) in enumerate(jobs):
        progress("teach", done, len(jobs))
        if not path.exists():
            write_shard(target, tokenizer, some, done >= recipe.self_shards, done, teacher, path)
    progress("teach", len(jobs), len(jobs))
    return [path for path, _, _ in jobs]


def train_drafter(
    target_folder: Path,
    prompts: list[str],
    recipe: DrafterRecipe,
    work: Path,
    out: Path,
    progress: Progress,
    held_out: Sequence[tuple[str, str]] = (),
    held_out_tokens: int = 128,
) -> dict[str, float]:
    """Train a drafter for the Llama in `target_folder` and write its layers (bf16) to `out`.

    `prompts` are taught beside the self-written ones; `held_out` are (kind, prompt) pairs, never trained on, for the
    agreement curve in `work`/curve.jsonl. Returns agreement by kind and "all" (empty without held-out prompts).

    work/: recipe.json, self-*.safetensors, given-*.safetensors (teacher data), held_out.pt, checkpoint.pt, curve.jsonl.
    A killed run goes on from there; a folder that another recipe began is refused.
    """
    work.mkdir(parents=True, exist_ok=True)
    _claim(work, recipe, target_folder, prompts, held_out)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval().requires_grad_(False)
    if not isinstance(target, LlamaForCausalLM):
        raise UserError(f"{target_folder} holds a {type(target).__name__}; only Llama targets can be pruned this way.")
    last = target.config.num_hidden_layers
    after = recipe.teacher.hidden_after
    if after[-1] != last or len(after) != len(recipe.matched) or recipe.matched[-1] != len(recipe.layers) - 1:
        raise UserError(
            f"The recipe keeps the states after layers {after} for student layers {recipe.matched} of "
            f"{len(recipe.layers)}: give one state for each of them, the last of both after the last layer ({last})."
        )
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    paths = teach(target, tokenizer, prompts, recipe, work, progress)
    tests = _held_out(target, tokenizer, held_out, held_out_tokens, work / "held_out.pt")
    store = ChatStore(paths)
    head = DraftHead.of(target, store.frequent(recipe.vocabulary, target.config.vocab_size))
    student = make_student(target, recipe.layers)
    _optimise(student, head, store, recipe, work, tests, progress)
    save_layers(student, head.tokens, out)
    return agreement(student.eval(), tests, head.tokens)


def _claim(
    work: Path, recipe: DrafterRecipe, target: Path, prompts: Sequence[str], held_out: Sequence[tuple[str, str]]
) -> None:
    path = work / "recipe.json"
    taught = {"target": digest_of(target), "prompts": digest([list(prompts), [list(pair) for pair in held_out]])}
    text = json.dumps(asdict(recipe) | taught, indent=1, sort_keys=True)
    if path.exists() and path.read_text() != text:
        raise UserError(
            f"{work} was begun with another recipe, target or prompts: choose a new work folder or delete this one."
        )
    write_text(path, text)


def _save_torch(value: object, path: Path) -> None:
    with replacing(path) as temporary:
        torch.save(value, temporary)


def _held_out(
    target: LlamaForCausalLM, tokenizer: Any, prompts: Sequence[tuple[str, str]], answer_tokens: int, path: Path
) -> list[HeldOut]:
    if not path.exists():
        made = answer_greedily(target, tokenizer, prompts, answer_tokens)
        _save_torch([(item.kind, item.tokens, item.answer_start) for item in made], path)
    return [HeldOut(*item) for item in torch.load(path, weights_only=True)]


def _optimise(
    student: LlamaForCausalLM,
    head: DraftHead,
    store: ChatStore,
    recipe: DrafterRecipe,
    work: Path,
    tests: Sequence[HeldOut],
    progress: Progress,
) -> None:
    """Fit, match and distil, from the checkpoint if there is one."""
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    matrices = [p for p in trained.values() if p.ndim > 1]
    vectors = [p for p in trained.values() if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    checkpoint, curve = work / "checkpoint.pt", work / "curve.jsonl"
    step, seconds, total = 0, 0.0, recipe.total_steps
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step, seconds = saved["step"], saved["seconds"]
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved["layers"][name])
        optimiser.load_state_dict(saved["optimiser"])
        lines = saved["curve"]
    else:
        if recipe.fit_rows:
            fit_down_projections(student, store, recipe, progress)
        lines = []
        if tests:
            lines.append(
                {"step": 0, "tokens": 0, "minutes": 0.0, "loss": None, **agreement(student, tests, head.tokens)}
            )
    tokens_seen = lines[-1]["tokens"] if lines else 0
    losses: list[float] = []
    order: list[tuple[int, Tensor]] = []
    per_epoch = len(store.batches(recipe.batch_rows, 0, recipe.seed))
    began = time.monotonic()
    while step < total:
        if not order or step % per_epoch == 0:
            order = store.batches(recipe.batch_rows, step // per_epoch, recipe.seed)
        shard, rows = order[step % per_epoch]
        batch = store.batch(shard, rows)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(recipe, step)
        loss = chat_loss(student, head, batch, recipe, step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimiser.step()
        step += 1
        tokens_seen += batch["tokens"].numel()
        losses.append(float(loss.detach()))
        progress("train", step, total)
        if step % recipe.checkpoint_steps == 0 or step == total:
            now = seconds + time.monotonic() - began
            point = {"step": step, "tokens": tokens_seen, "minutes": round(now / 60, 2)}
            lines.append(
                {
                    **point,
                    "loss": sum(losses) / len(losses),
                    **(agreement(student, tests, head.tokens) if tests else {}),
                }
            )
            losses = []
            layers = {name: p.detach() for name, p in trained.items()}
            made = {"step": step, "seconds": now, "layers": layers, "optimiser": optimiser.state_dict(), "curve": lines}
            _save_torch(made, checkpoint)
            write_text(curve, "".join(json.dumps(line) + "\n" for line in lines))
