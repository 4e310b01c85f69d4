"""Schedulers: one protocol; never, always, a fixed schedule, and one learned from traces."""

from typing import Protocol

import numpy as np

from treegraft.errors import UserError
from treegraft.scheduling.features import SchedulingState, features
from treegraft.scheduling.network import MarginNetwork


class Scheduler(Protocol):
    """Decides layer by layer which drafter acts."""

    def choose(self, state: SchedulingState) -> int:
        """The action for ``state.layer``: a drafter's index, 0 being the light one."""
        ...


class FixedSchedule:
    """The same action in a layer at every step; layers beyond the given ones skip (action 0)."""

    def __init__(self, actions: tuple[int, ...]) -> None:
        self.actions = actions

    def choose(self, state: SchedulingState) -> int:
        return self.actions[state.layer - 1] if state.layer <= len(self.actions) else 0


def never() -> FixedSchedule:
    """Only the light drafter acts."""
    return FixedSchedule(())


def always(depth: int, drafter: int = 1) -> FixedSchedule:
    """The given drafter acts in every layer."""
    return FixedSchedule((drafter,) * depth)


class LearnedScheduler:
    """Calls the drafter with the largest positive margin, else skips.

    ``names``: the network's inputs, some or all of ``known`` (what ``features`` computes) in the same order.
    """

    def __init__(self, network: MarginNetwork, names: list[str], known: list[str]) -> None:
        if names != [name for name in known if name in names]:
            different = sorted(set(names) - set(known)) or ["their order"]
            raise UserError(
                f"the scheduler was made for other features ({', '.join(different[:5])} differ); train one here."
            )
        self.network = network
        self._columns = None if names == known else np.array([known.index(name) for name in names])

    def choose(self, state: SchedulingState) -> int:
        values = features(state)
        margins = self.network.margins(values if self._columns is None else values[self._columns])
        best = int(np.argmax(margins))
        return best + 1 if margins[best] > 0 else 0
