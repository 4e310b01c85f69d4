"""Tunes the baseline of one drafter model alone: which of them, and in how many layers it pays to draft.

The method can stop calling; a baseline that always drafts to the method's depth would be easy to beat. So would one
that may not draft deeper, as n-grams do: they go beyond the layers in chains.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.progress import progress

if TYPE_CHECKING:
    import numpy as np

    from pipeline.methods import Bench

MOST_TOKENS = 32  # decoded of each prompt at each depth, twice: the first time finds the rate


@dataclass(frozen=True)
class StrongAlone:
    """What was fastest on validation prompts, and its rate for the verified-size rule."""

    drafter: int
    """Its index, from 1."""
    depth: int
    tokens_per_ms: float


def tune_strong(bench: "Bench", prompts: "list[np.ndarray]", temperature: float, guess: float) -> StrongAlone:
    """Measure every drafter model on ``prompts`` (token ids, int64 [n] each), at every depth up to the method's and at
    deeper ones as long as they are faster; guess: tokens per ms to begin with."""
    models, depths = range(1, len(bench.config.drafters)), range(1, bench.config.decoding.depth + 1)
    tried = _measure(bench, [(drafter, depth) for drafter in models for depth in depths], prompts, temperature, guess)
    best = max(tried, key=lambda one: one.tokens_per_ms)
    while best.depth == max(one.depth for one in tried) < _length(bench):
        deeper = [(best.drafter, best.depth), (best.drafter, best.depth + 1)]
        tried = _measure(bench, deeper, prompts, temperature, best.tokens_per_ms)
        best = max(tried, key=lambda one: one.tokens_per_ms)
    return best


def _length(bench: "Bench") -> int:
    return min(MOST_TOKENS, bench.config.evaluate.max_new_tokens)


def _measure(
    bench: "Bench", choices: list[tuple[int, int]], prompts: "list[np.ndarray]", temperature: float, guess: float
) -> list[StrongAlone]:
    """Each drafter at each depth in turn on every prompt, so that all see the same machine."""
    from treegraft.api import make_decoder
    from treegraft.metrics import DecodingMetrics
    from treegraft.sampling import SamplingSettings
    from treegraft.scheduling.policy import never

    rates = dict.fromkeys(choices, guess)
    for _ in range(2):
        spent = {choice: DecodingMetrics() for choice in choices}
        for seed, prompt in enumerate(progress(prompts, desc="evaluate, strong baseline", unit="prompt")):
            sampling = SamplingSettings(temperature=temperature, seed=seed)
            for drafter, depth in choices:
                rate = rates[drafter, depth]
                decoder = make_decoder(bench.models, bench.scheduler, never(), rate, [drafter], depth=depth)
                spent[drafter, depth].add(decoder.generate(prompt.tolist(), _length(bench), sampling).metrics)
        # Of the steps alone, as every other method has it: a time that verification cannot shorten is no price.
        rates = {choice: sums.tokens / (sums.seconds * 1000 - sums.prefill_ms) for choice, sums in spent.items()}
    return [StrongAlone(drafter, depth, rate) for (drafter, depth), rate in rates.items()]
