"""Schedulers: one protocol; never, always, a fixed schedule, and one learned from traces."""

from typing import Protocol

from treegraft.errors import UserError
from treegraft.scheduling.admission import Saving, admitted
from treegraft.scheduling.features import RequestCosts, SchedulingState, features
from treegraft.scheduling.network import MarginNetwork

DEAREST = 10  # no call costs the time in which ten times as many tokens come as are verified at most


class Scheduler(Protocol):
    """Decides layer by layer which drafter acts."""

    def choose(self, state: SchedulingState) -> int | None:
        """The action for ``state.layer``: a drafter's index, 0 being the light one; None if it cannot tell."""
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
    """Calls the drafter with the largest positive margin, else skips; cannot tell if a margin is not possible.

    Args:
        names: the network's inputs, some or all of ``known`` (what ``features`` computes) in the same order.
        saving: what calls save on each token; a drafter whose pass over the prompt costs more than they can save in
            the request is not called in it. None: every request may call.
    """

    def __init__(
        self, network: MarginNetwork, names: list[str], known: list[str], saving: Saving | None = None
    ) -> None:
        if names != [name for name in known if name in names]:
            different = sorted(set(names) - set(known)) or ["their order"]
            raise UserError(
                f"the scheduler was made for other features ({', '.join(different[:5])} differ); train one here."
            )
        self.network = network
        self.saving = saving
        self._request: RequestCosts | None = None
        self._may_call: list[bool] = []
        self._columns = None if names == known else [known.index(name) for name in names]

    def margins(self, state: SchedulingState) -> list[float]:
        """What each drafter but the light one is worth over it here, in tokens: [m - 1]."""
        values = features(state)
        if self._columns is not None:
            values = [values[column] for column in self._columns]
        return self.network.of_state(values)

    def choose(self, state: SchedulingState) -> int | None:
        if state.costs is not self._request:  # weighed once a request
            self._request, self._may_call = state.costs, self.admits(state.costs)
        may_call = self._may_call
        if not any(may_call):
            return 0
        margins = self.margins(state)
        # A call adds no more tokens than are verified at most; NaN fails the comparison too.
        most = state.settings.verified_sizes[-1]
        if not all(-DEAREST * most <= margin <= most for margin in margins):
            return None
        if not all(may_call):
            margins = [margin if may else 0.0 for margin, may in zip(margins, may_call, strict=True)]
        largest = max(margins)
        return margins.index(largest) + 1 if largest > 0 else 0

    def admits(self, request: RequestCosts) -> list[bool]:
        """Which drafters the request may call, [m - 1]."""
        if self.saving is None:
            return [True] * self.network.outputs
        may: list[bool] = admitted(
            self.saving.at(request.prompt_tokens), request.new_tokens, request.prompt_ms
        ).tolist()
        return may
