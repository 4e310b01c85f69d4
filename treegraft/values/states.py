"""Numbers of scheduling states and schedules: prefixes and schedules are written in base m, first layer first."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def offset(layers: int, drafters: int) -> int:
    """States before those whose prefix has ``layers`` actions: (m^layers - 1) / (m - 1)."""
    return sum(drafters**j for j in range(layers))


def code(prefix: tuple[int, ...], drafters: int) -> int:
    """A prefix or schedule as a number."""
    value = 0
    for action in prefix:
        value = value * drafters + action
    return value


def state_index(prefix: tuple[int, ...], drafters: int) -> int:
    """The state in which ``prefix`` has been played, among all states of a position."""
    return offset(len(prefix), drafters) + code(prefix, drafters)


def prefixes(depth: int, drafters: int) -> list[tuple[int, ...]]:
    """The prefix of every state of a position, in index order: lengths 0 .. depth - 1."""
    found: list[tuple[int, ...]] = [()]
    level = found
    for _ in range(depth - 1):
        level = [(*prefix, action) for prefix in level for action in range(drafters)]
        found = found + level
    return found


def schedules(depth: int, drafters: int) -> IntArray:
    """All schedules in order of their code: int64 [m^D, D]."""
    grid = np.indices((drafters,) * depth).reshape(depth, -1)
    return np.ascontiguousarray(grid.T, dtype=np.int64)


def played(actions: IntArray, depth: int, drafters: int) -> IntArray:
    """The schedule that a policy plays at each position.

    Args:
        actions: int64 [P, S], the policy's action in every state.

    Returns:
        int64 [P]: schedule codes.
    """
    codes = np.zeros(len(actions), np.int64)
    rows = np.arange(len(actions))
    for layer in range(depth):
        codes = codes * drafters + actions[rows, offset(layer, drafters) + codes]
    return codes
