"""What a scheduler is held against in replay: plain decoding, each drafter alone, fixed schedules, the oracle.

Everything is summed by turn of the tables (``Sums``: tokens and milliseconds, prefill included), so that rates of any
subset of prompts, and their bootstrap, follow from the same figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipeline.bootstrap import Sums

if TYPE_CHECKING:
    from treegraft.values.replay import ReplayResult
    from treegraft.values.tables import OutcomeTables

Schedule = tuple[int, ...]


@dataclass(frozen=True)
class Yardsticks:
    """What needs no learner, on the same prompts."""

    plain: Sums
    fixed: dict[Schedule, Sums]
    """Every schedule, played at every step."""
    oracle: Sums
    """All outcomes known beforehand: a bound."""

    @cached_property
    def best(self) -> Schedule:
        """The fastest fixed schedule, known in hindsight."""
        return self._fastest(list(self.fixed))

    @cached_property
    def alone(self) -> list[Schedule]:
        """Each drafter by itself: n-grams in all layers; a model in as many as are best for it, n-grams in the rest."""
        depth = len(next(iter(self.fixed)))
        models = range(1, 1 + max(max(plan) for plan in self.fixed))
        tried = [[(j,) * layers + (0,) * (depth - layers) for layers in range(1, depth + 1)] for j in models]
        return [(0,) * depth, *(self._fastest(plans) for plans in tried)]

    @cached_property
    def single(self) -> Sums:
        """The better single drafter."""
        return self.fixed[self._fastest(self.alone)]

    def speed(self, run: Sums) -> float:
        """Over plain decoding."""
        return run.rate / self.plain.rate

    def captured(self, run: Sums) -> float:
        """Share of the way from the better single drafter (0) to the oracle (1); NaN where the oracle is no faster."""
        room = self.oracle.rate - self.single.rate
        return (run.rate - self.single.rate) / room if room > 0 else float("nan")

    def _fastest(self, plans: list[Schedule]) -> Schedule:
        return max(plans, key=lambda plan: self.fixed[plan].rate)


def yardsticks(parts: "Sequence[OutcomeTables]") -> Yardsticks:
    """Replay everything that needs no learner on tables of one pair; turns in order of ``parts``."""
    from treegraft.values.replay import oracle, plain, replay_fixed
    from treegraft.values.states import schedules

    every = [tuple(plan) for plan in schedules(parts[0].depth, parts[0].drafters).tolist()]
    return Yardsticks(
        turn_sums([plain(part) for part in parts]),
        {plan: turn_sums([replay_fixed(part, plan) for part in parts]) for plan in every},
        turn_sums([oracle(part) for part in parts]),
    )


def best_layers(tables: "OutcomeTables", drafter: int) -> Schedule:
    """``drafter`` alone in as many layers as are fastest on ``tables``, n-grams after them: its tuned baseline."""
    from treegraft.values.replay import replay_fixed

    plans = [(drafter,) * layers for layers in range(1, tables.depth + 1)]
    return max(plans, key=lambda plan: replay_fixed(tables, plan).tokens_per_ms)


def fixed_by_kind(tables: "OutcomeTables") -> Sums:
    """Every kind of prompt under the fixed schedule that is best for it, known in hindsight."""
    tokens, taken = np.zeros(len(tables.prompt_ids)), np.zeros(len(tables.prompt_ids))
    for kind in dict.fromkeys(tables.kinds):
        turns = np.flatnonzero(np.array(tables.kinds) == kind)
        found = yardsticks([tables.select(turns)])
        tokens[turns], taken[turns] = found.fixed[found.best].tokens, found.fixed[found.best].taken
    return Sums(tokens, taken)


def turn_sums(results: "Sequence[ReplayResult]") -> Sums:
    """Tokens and milliseconds of each turn, the tables' turns one after the other."""
    tokens = np.concatenate([result.tokens for result in results]).astype(np.float64)
    return Sums(tokens, np.concatenate([result.ms for result in results]))


def question_sums(tables: "OutcomeTables", run: Sums) -> Sums:
    """The sums of ``run`` by question, whose turns are no independent prompts."""
    _, number = np.unique(tables.questions, return_inverse=True)
    return Sums(np.bincount(number, run.tokens), np.bincount(number, run.taken))
