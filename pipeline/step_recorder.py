"""Records a few single steps of TreeGraft's decoding for the report to draw: draft trees and what came of them.

Nothing here is timed. After the measurements a few answers are generated once more, with an observer in the decoder and
a scheduler that notes its margins. What is kept is bounded: PROMPTS prompts, a step for each of RANKS, NODES nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.files import append_jsonl, read_jsonl
from pipeline.progress import progress
from pipeline.prompts import Prompt
from treegraft.api import learned_scheduler, make_decoder
from treegraft.decoder import Decoder
from treegraft.grafting import verification_order
from treegraft.pair import encode_turns
from treegraft.sampling import SamplingSettings, prompt_seed
from treegraft.scheduling.features import SchedulingState
from treegraft.scheduling.policy import FixedSchedule, LearnedScheduler
from treegraft.tree import DraftTree, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.methods import Bench

PROMPTS = 3  # each of another kind
TOKENS = 64  # of an answer at most
NODES = 64  # of a tree: the likeliest ones
CONTEXT = 12  # tokens of text shown before the draft, the root included
DIGITS = 4  # of recorded probabilities and margins


@dataclass(frozen=True)
class Decision:
    """What was decided in one layer; the frontier is the one before (int64 [<= k]).

    ``margins`` are empty where none decided: the request may call no drafter, or the scheduler could not tell and the
    fallback schedule acted.
    """

    action: int
    margins: list[float]
    frontier: IntArray


class WatchedScheduler:
    """Decides as a learned scheduler does, and notes why."""

    def __init__(self, scheduler: LearnedScheduler, fallback: FixedSchedule) -> None:
        self.scheduler = scheduler
        self.fallback = fallback
        self.decisions: list[Decision] = []

    def choose(self, state: SchedulingState) -> int:
        margins = self.scheduler.margins(state) if any(self.scheduler.admits(state.costs)) else []
        action = self.scheduler.choose(state)
        if action is None:
            action, margins = self.fallback.choose(state), []
        self.decisions.append(Decision(action, margins, state.tree.frontier))
        return action


@dataclass(frozen=True)
class ObservedStep:
    """One step as the decoder showed it; ``before`` are the last token ids up to the root."""

    number: int
    position: int
    before: list[int]
    tree: DraftTree
    verified: IntArray
    accepted: IntArray
    bonus: int | None
    decisions: list[Decision]

    @cached_property
    def kept(self) -> IntArray:
        """The nodes to record, ascending and closed under parents: the root, the likeliest and the accepted ones."""
        likeliest, _ = verification_order(self.tree, NODES)
        return np.unique(np.concatenate([[0], likeliest, self.accepted]))

    @cached_property
    def recovered(self) -> IntArray:
        """Kept nodes that a cheaper drafter had proposed and the frontier left behind, and that a call then expanded.

        Left behind means: no node of the frontier was the node or lay below it, so no skip would have gone on there.
        """
        tree = self.tree
        found = []
        for layer, decision in enumerate(self.decisions, 1):
            grown = np.unique(tree.parent[: tree.size][tree.layer[: tree.size] == layer])
            cheaper = (tree.source[grown] >= 0) & (tree.source[grown] < decision.action)
            ahead = tree.ancestors[np.ix_(decision.frontier, grown)].any(axis=0)
            found.append(grown[cheaper & ~ahead])
        return np.intersect1d(np.concatenate([np.zeros(0, np.int64), *found]), self.kept)


def _recovered(step: ObservedStep) -> float:
    """A call took up a branch that had been left behind; most of all where the accepted path runs through it."""
    if len(step.recovered) == 0:
        return 0
    return 1 + float(step.tree.ancestors[np.ix_(step.accepted, step.recovered)].any(axis=1).sum())


def _shared(step: ObservedStep) -> float:
    """Tokens of several drafters on the accepted path; most of all with many from the dearer ones."""
    sources = step.tree.source[step.accepted]
    return float((sources > sources.min()).sum()) if len(sources) else 0


def _longest(step: ObservedStep) -> float:
    """Most draft tokens accepted."""
    return len(step.accepted)


def _rejected(step: ObservedStep) -> float:
    """Nothing of what was verified accepted; most of all where much was expected."""
    return 0 if len(step.accepted) else float(np.exp(step.tree.score[step.verified]).sum())


def _skips(step: ObservedStep) -> float:
    """The light drafter alone built the tree."""
    alone = step.tree.size > 1 and not any(decision.action for decision in step.decisions)
    return 1 + len(step.accepted) if alone else 0


RANKS: dict[str, Callable[[ObservedStep], float]] = {
    "recovered": _recovered,
    "shared": _shared,
    "longest": _longest,
    "rejected": _rejected,
    "skips": _skips,
}
"""What steps are chosen for, and how well a step shows it; 0: not at all."""


def choose_steps(steps: list[ObservedStep]) -> list[tuple[str, ObservedStep]]:
    """For each of RANKS the step that shows it best (the earliest among equals) and is not taken, in text order."""
    chosen: dict[int, tuple[str, ObservedStep]] = {}
    for why, rank in RANKS.items():
        fit = [step for step in steps if step.number not in chosen and rank(step) > 0]
        if fit:
            best = max(fit, key=rank)
            chosen[best.number] = why, best
    return [chosen[number] for number in sorted(chosen)]


def choose_prompts(prompts: list[Prompt], runs: list[dict[str, Any]]) -> list[Prompt]:
    """PROMPTS prompts of different kinds, those first on whose first turn TreeGraft called most: there is most to see.

    Args:
        runs: rows of runs.jsonl.
    """
    calls = {run["prompt_id"]: run["strong_calls"] for run in runs if run["method"] == "treegraft" and not run["turn"]}
    best_of_kind: dict[str, Prompt] = {}
    for prompt in sorted(prompts, key=lambda prompt: -calls[prompt.id]):
        best_of_kind.setdefault(prompt.kind, prompt)
    return list(best_of_kind.values())[:PROMPTS]


def record_steps(bench: "Bench", prompts: list[Prompt], runs: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows of steps.jsonl; ``path`` gets one line a finished prompt, so that a killed run goes on there.

    Args:
        runs: rows of runs.jsonl, by which prompts are chosen.
    """
    config = bench.config
    fallback = FixedSchedule(bench.scheduler.best_fixed)
    watched = WatchedScheduler(learned_scheduler(bench.network, bench.scheduler), fallback)
    decoder = make_decoder(bench.models, bench.scheduler, watched, bench.scheduler.rate_tokens_per_ms)
    length = min(TOKENS, config.evaluate.max_new_tokens)
    done = {row["prompt_id"] for row in read_jsonl(path)}
    for prompt in progress(choose_prompts(prompts, runs), desc="evaluate, single steps", unit="prompt"):
        if prompt.id not in done:
            tokens = encode_turns(bench.models.target, prompt.turns[:1], [])
            sampling = SamplingSettings(config.evaluate.temperatures[0], seed=prompt_seed(config.seed, tokens))
            steps = observe(decoder, watched, tokens.tolist(), length, sampling)
            texts = TokenTexts(bench.models.target.tokenizer)
            row = {
                "prompt_id": prompt.id,
                "bench": prompt.kind,
                "drafters": [drafter.name for drafter in config.drafters],
                "total": len(steps),
                "steps": [recorded(step, why, texts) for why, step in choose_steps(steps)],
            }
            append_jsonl(path, row)
    return read_jsonl(path)


def observe(
    decoder: Decoder, watched: WatchedScheduler, prompt: list[int], max_new_tokens: int, sampling: SamplingSettings
) -> list[ObservedStep]:
    """All steps of one answer; ``watched`` is the decoder's scheduler."""
    steps: list[ObservedStep] = []
    text = list(prompt)

    def note(tree: DraftTree, verified: IntArray, accepted: IntArray, emitted: IntArray) -> None:
        bonus = int(emitted[-1]) if len(emitted) > len(accepted) else None
        position, before = len(text) - len(prompt), text[-CONTEXT:]
        decisions, watched.decisions = watched.decisions, []
        steps.append(ObservedStep(len(steps) + 1, position, before, tree, verified, accepted, bonus, decisions))
        text.extend(emitted.tolist())

    decoder.generate(prompt, max_new_tokens, sampling, on_step=note)
    return steps


class TokenTexts:
    """The texts of single tokens as they stand inside a text; parts of a character are replacement characters."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        # Twice, less once: some decoders drop the space that a text begins with.
        once, twice = (
            str(self.tokenizer.decode([token] * count, clean_up_tokenization_spaces=False)) for count in (1, 2)
        )
        return twice[len(once) :]


def recorded(step: ObservedStep, why: str, text_of: Callable[[int], str]) -> dict[str, Any]:
    """A step as `pipeline.recorded_steps.RecordedStep` describes it; ``text_of``: the text of a token id."""
    tree, kept = step.tree, step.kept

    def numbers(nodes: IntArray) -> list[int]:
        """The numbers that nodes have among the kept ones, without those that are not kept."""
        found: list[int] = np.searchsorted(kept, nodes[np.isin(nodes, kept)]).tolist()
        return found

    return {
        "step": step.number,
        "position": step.position,
        "why": why,
        "before": [text_of(token) for token in step.before],
        "layers": [
            {
                "action": decision.action,
                "margins": [round(margin, DIGITS) for margin in decision.margins],
                "added": int((tree.layer[: tree.size] == layer).sum()),
            }
            for layer, decision in enumerate(step.decisions, 1)
        ],
        "text": [text_of(token) for token in tree.token[kept].tolist()],
        "parent": numbers(tree.parent[kept]),
        "layer": tree.layer[kept].tolist(),
        "drafter": tree.source[kept].tolist(),
        "scorer": tree.scorer[kept].tolist(),
        "probability": np.minimum(np.exp(tree.score[kept]), 1.0).round(DIGITS).tolist(),
        "verified": numbers(step.verified),
        "accepted": numbers(step.accepted),
        "recovered": numbers(step.recovered),
        "bonus": None if step.bonus is None else text_of(step.bonus),
        "drafted": tree.size - 1,
        "checked": len(step.verified),
    }
