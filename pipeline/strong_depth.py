"""Tunes the baseline of one drafter model alone: which of them, and in how many layers it pays to draft.

The method can stop calling; a baseline that always drafts to the method's depth would be easy to beat.
"""

import itertools
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
    """Measure every drafter model at every depth on ``prompts`` (token ids, int64 [n] each); guess: tokens per ms to
    begin with."""
    from treegraft.api import make_decoder
    from treegraft.metrics import DecodingMetrics
    from treegraft.sampling import SamplingSettings
    from treegraft.scheduling.policy import never

    models, depths = range(1, len(bench.config.drafters)), range(1, bench.config.decoding.depth + 1)
    length = min(MOST_TOKENS, bench.config.evaluate.max_new_tokens)
    tried = []
    choices = list(itertools.product(models, depths))
    for drafter, depth in progress(choices, desc="evaluate, strong baseline", unit="depth"):
        rate = guess
        for _ in range(2):
            decoder = make_decoder(bench.models, bench.scheduler, never(), rate, [drafter], depth=depth)
            spent = DecodingMetrics()
            for seed, prompt in enumerate(prompts):
                sampling = SamplingSettings(temperature=temperature, seed=seed)
                spent.add(decoder.generate(prompt.tolist(), length, sampling).metrics)
            # Of the steps alone, as every other method has it: a time that verification cannot shorten is no price.
            rate = spent.tokens / (spent.seconds * 1000 - spent.prefill_ms)
        tried.append(StrongAlone(drafter, depth, rate))
    return max(tried, key=lambda one: one.tokens_per_ms)
