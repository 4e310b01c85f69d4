"""Values and margins: average-reward control over tabulated outcomes, and the policy iteration that labels traces.

A step is worth tokens - g x milliseconds, g being the rate (tokens per millisecond) of the policy that is followed
afterwards; a margin is what an action adds over the light drafter's, the policy deciding all later layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treegraft.values.replay import FloatArray, IntArray, ReplayResult, gains, replay, size_choice, step_ms
from treegraft.values.states import offset
from treegraft.values.tables import OutcomeTables

OFF_POLICY = 0.25  # chance with which training's visit weights leave the policy at each decision and position

Fit = Callable[[OutcomeTables, FloatArray, FloatArray], IntArray]


def leaf_values(tables: OutcomeTables, rate: float, lag: FloatArray) -> FloatArray:
    """tokens - rate x milliseconds of every schedule: float64 [P, U]."""
    choice = size_choice(tables, rate)
    return gains(tables, choice) - rate * step_ms(tables, choice, lag)


def margins(tables: OutcomeTables, actions: IntArray, rate: float, lag: FloatArray | None = None) -> FloatArray:
    """What each action adds over action 0 when the policy decides the later layers: float64 [P, S, m - 1], tokens.

    Args:
        actions: int64 [P, S], the policy; rate: tokens per millisecond, the policy's.
        lag: float64 [m], tokens a drafter catches up on in a step's first call; None: as replay finds it.
    """
    if lag is None:
        lag = replay(tables, actions, rate).lag
    depth, m = tables.depth, tables.drafters
    value = leaf_values(tables, rate, lag)
    out = np.zeros((len(tables), offset(depth, m), m - 1))
    for layer in range(depth - 1, -1, -1):
        states = slice(offset(layer, m), offset(layer + 1, m))
        by_action = value.reshape(len(tables), -1, m)  # [P, states, m]
        out[:, states] = by_action[..., 1:] - by_action[..., :1]
        value = np.take_along_axis(by_action, actions[:, states, None], axis=-1)[..., 0]
    return out


def visit_weights(tables: OutcomeTables, actions: IntArray, visited: NDArray[np.bool_] | None = None) -> FloatArray:
    """How much a state counts in training: float64 [P, S].

    The chance of reaching it when every decision follows the policy but for a share ``OFF_POLICY`` spread over the
    other actions, so that states which a slightly different policy would see are not forgotten.
    """
    depth, m = tables.depth, tables.drafters
    if visited is None:
        visited = replay(tables, actions).visited
    weights = np.zeros((len(tables), offset(depth, m)))
    level = np.where(visited, 1.0, OFF_POLICY)[:, None]  # [P, states of the layer]
    for layer in range(depth):
        states = slice(offset(layer, m), offset(layer + 1, m))
        weights[:, states] = level
        follows = np.arange(m) == actions[:, states, None]  # [P, states, m]
        chance = np.where(follows, 1 - OFF_POLICY, OFF_POLICY / max(m - 1, 1))
        level = (level[..., None] * chance).reshape(len(tables), -1)
    return weights


def greedy_actions(predicted: FloatArray) -> IntArray:
    """The action of the largest positive margin, else 0: predicted [..., m - 1] -> int64 [...]."""
    best = predicted.argmax(axis=-1)
    positive = np.take_along_axis(predicted, best[..., None], axis=-1)[..., 0] > 0
    return np.where(positive, best + 1, 0)


@dataclass(frozen=True)
class Labelling:
    """Where policy iteration ended."""

    actions: IntArray
    """[P, S]: the policy the labels follow."""
    margins: FloatArray
    """[P, S, m - 1]"""
    visits: FloatArray
    """[P, S]"""
    result: ReplayResult
    """Its replay."""
    learnt_from: tuple[FloatArray, FloatArray] | None
    """The margins and visits that ``actions`` were fitted to; None where they are still the start's."""
    rates: list[float]
    """warm_tokens_per_ms of the start and of each policy tried, in order; the last may be one that did not gain."""


def policy_iteration(tables: OutcomeTables, start: IntArray, fit: Fit, rounds: int) -> Labelling:
    """Label, fit, play, relabel, until the replayed speed falls or the policy stays as it is.

    Args:
        start: int64 [P, S], normally the best fixed schedule.
        fit: (tables, margins, visits) -> actions [P, S] of a policy that knows the state's features only; it should
            predict each prompt by a model fitted without it, else the policy is clairvoyant.
    """
    actions, result = start, replay(tables, start)
    rates = [result.warm_tokens_per_ms]
    learnt_from = None
    for _ in range(rounds):
        labels = margins(tables, actions, result.decode_rate, result.lag)
        visits = visit_weights(tables, actions, result.visited)
        again = fit(tables, labels, visits)
        played = replay(tables, again)
        rates.append(played.warm_tokens_per_ms)
        # An equal rate is no end: a decision may have changed that pays only once an earlier one has changed too.
        if played.warm_tokens_per_ms < result.warm_tokens_per_ms or np.array_equal(again, actions):
            break
        actions, result, learnt_from = again, played, (labels, visits)
    final = margins(tables, actions, result.decode_rate, result.lag)
    visits = visit_weights(tables, actions, result.visited)
    return Labelling(actions, final, visits, result, learnt_from, rates)
