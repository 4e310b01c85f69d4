"""Replay: the exact modelled speed of any policy on tabulated outcomes, in milliseconds instead of minutes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treegraft.values.states import offset, played, schedules
from treegraft.values.tables import OutcomeTables

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

RATE_ROUNDS = 8  # the verified size depends on the rate and the rate on the size; it settles in three or four rounds


@dataclass(frozen=True)
class ReplayResult:
    """What a policy did on the prompts of a table; all arrays have one entry a prompt."""

    tokens: IntArray
    steps: IntArray
    decode_ms: FloatArray
    """Drafting (a drafter's first pass over the prompt included), verification and the rest of all steps."""
    prefill_ms: FloatArray
    """The target's pass over the prompt, the same for every policy."""
    calls: IntArray
    """Layers in which a drafter other than the light one acted."""
    visited: NDArray[np.bool_]
    """[P]: positions at which a step began."""
    lag: FloatArray
    """[m]: mean tokens a drafter had to catch up on in its first call of a step, prompts left out."""
    step_rate: float
    """Tokens per millisecond under which the verified sizes were chosen."""

    @property
    def ms(self) -> FloatArray:
        """Modelled time of each prompt."""
        return self.decode_ms + self.prefill_ms

    @property
    def tokens_per_ms(self) -> float:
        """Speed over all prompts, prefill included."""
        return float(self.tokens.sum() / self.ms.sum())

    @property
    def decode_rate(self) -> float:
        """Tokens per millisecond of the steps alone: the rate g of the value system."""
        return float(self.tokens.sum() / self.decode_ms.sum())


def fixed_actions(tables: OutcomeTables, schedule: tuple[int, ...]) -> IntArray:
    """The policy that always plays ``schedule`` (missing layers skip): int64 [P, S]."""
    states = np.zeros(offset(tables.depth, tables.drafters), np.int64)
    for layer, action in enumerate(schedule):
        states[offset(layer, tables.drafters) : offset(layer + 1, tables.drafters)] = action
    return np.broadcast_to(states, (len(tables), len(states)))


def size_choice(tables: OutcomeTables, rate: float) -> IntArray:
    """Index of the verified size the hardware-aware rule picks at a rate, for every position and schedule: [P, U]."""
    verify_ms = tables.costs.verify_ms(np.array(tables.sizes), tables.context[:, None])  # [P, G]
    choice: IntArray = np.argmax(tables.mass - rate * verify_ms[:, None, :], axis=-1)
    return choice


def gains(tables: OutcomeTables, choice: IntArray) -> IntArray:
    """Tokens that a step emits, bonus included, never beyond the answer's end: int64 [P, U]."""
    accepted = np.take_along_axis(tables.accepted, choice[..., None], axis=-1)[..., 0].astype(np.int64)
    return np.minimum(accepted + 1, tables.left[:, None])


def draftable(tables: OutcomeTables) -> NDArray[np.bool_]:
    """Whether anything may be drafted at a position ([P]): not where one token is left under the request's limit."""
    drafted = (tables.nodes > 0)[..., None] | (tables.layer_tokens > 0)  # [P, U, D]
    return np.asarray(drafted.any(axis=(1, 2)), np.bool_)


def step_ms(tables: OutcomeTables, choice: IntArray, lag: FloatArray) -> FloatArray:
    """Modelled time of a step, float64 [P, U], when drafter j catches up on ``lag[j]`` tokens in its first call."""
    costs, m = tables.costs, tables.drafters
    context = tables.context[:, None]
    plans = schedules(tables.depth, m)  # [U, D]
    total = costs.verify_ms(np.array(tables.sizes)[choice], context) + costs.step_ms
    called = np.zeros((m, len(plans)), np.bool_)
    for layer in range(tables.depth):
        total += costs.scheduler_ms * (m > 1)
        for j in range(m):
            plays = plans[:, layer] == j
            own = tables.layer_tokens[:, plays, layer]
            new_tokens = own + np.where(called[j, plays] | (own == 0), 0.0, lag[j])
            total[:, plays] += costs.layer_ms(j, new_tokens, context)
            called[j, plays] = True
    return np.where(draftable(tables)[:, None], total, costs.verify_ms(0, context) + costs.step_ms)


def replay(tables: OutcomeTables, actions: IntArray, rate: float | None = None) -> ReplayResult:
    """Play a policy through all prompts, all of them in lockstep.

    Args:
        actions: int64 [P, S].
        rate: tokens per millisecond for the verified sizes; None: the policy's own decode rate (a fixed point).
    """
    codes = played(actions, tables.depth, tables.drafters)
    if rate is not None:
        return _play(tables, codes, rate)
    result = _play(tables, codes, plain(tables).decode_rate)
    for _ in range(RATE_ROUNDS):
        again = _play(tables, codes, result.decode_rate)
        if abs(again.decode_rate - result.decode_rate) < 1e-9:
            return again
        result = again
    return result


def _play(tables: OutcomeTables, codes: IntArray, rate: float) -> ReplayResult:
    costs, m = tables.costs, tables.drafters
    rows = np.arange(len(tables))
    plans = schedules(tables.depth, m)[codes]  # [P, D]
    verify_ms = costs.verify_ms(np.array(tables.sizes), tables.context[:, None])  # [P, G]
    choice = np.argmax(tables.mass[rows, codes] - rate * verify_ms, axis=-1)  # [P]
    accepted = tables.accepted[rows, codes, choice].astype(np.int64)
    gain = np.minimum(accepted + 1, tables.left)
    fixed_ms = verify_ms[rows, choice] + costs.step_ms
    may_draft = draftable(tables)

    starts = np.searchsorted(tables.prompt_of, np.arange(len(tables.prompt_ids)))
    ends = np.append(starts[1:], len(tables))
    at = starts.copy()
    prompts = len(starts)
    decode_ms, steps, calls = np.zeros(prompts), np.zeros(prompts, np.int64), np.zeros(prompts, np.int64)
    lag = np.tile((tables.prompt_tokens - 1)[:, None], (1, m))  # tokens before the root that a drafter lacks
    fresh = np.ones((prompts, m), np.bool_)  # a drafter's first call also processes the prompt
    lag_sum, lag_count = np.zeros(m), np.zeros(m)
    visited = np.zeros(len(tables), np.bool_)
    while (going := np.flatnonzero(at < ends)).size:
        here = at[going]
        visited[here] = True
        steps[going] += 1
        drafts = may_draft[here]
        ms = np.where(drafts, fixed_ms[here], costs.verify_ms(0, tables.context[here]) + costs.step_ms)
        called = np.zeros((len(going), m), np.bool_)
        for layer in range(tables.depth):
            ms += np.where(drafts, costs.scheduler_ms * (m > 1), 0.0)
            for j in range(m):
                acts = np.flatnonzero(drafts & (plans[here, layer] == j))
                if not len(acts):
                    continue
                tokens = tables.layer_tokens[here[acts], codes[here[acts]], layer]
                first = ~called[acts, j] & (tokens > 0)  # a call that finds nothing to expand runs no forward
                ms[acts] += costs.layer_ms(
                    j, tokens + np.where(first, lag[going[acts], j], 0), tables.context[here[acts]]
                )
                known = first & ~fresh[going[acts], j]
                lag_sum[j] += lag[going[acts[known]], j].sum()
                lag_count[j] += known.sum()
                called[acts, j] |= tokens > 0
                if j:
                    calls[going[acts]] += 1
        decode_ms[going] += ms
        step_gain = gain[here]
        kept = np.minimum(tables.path_processed[here, codes[here]], (accepted[here] + 1)[:, None])  # [n, m]
        lag[going] = np.where(called & (kept > 0), step_gain[:, None] - kept, lag[going] + step_gain[:, None])
        fresh[going] &= ~called
        at[going] = here + step_gain
    return ReplayResult(
        tokens=ends - starts,
        steps=steps,
        decode_ms=decode_ms,
        prefill_ms=np.asarray(costs.target.ms(tables.prompt_tokens - 1, 0)),
        calls=calls,
        visited=visited,
        lag=lag_sum / np.maximum(lag_count, 1),
        step_rate=rate,
    )


def plain(tables: OutcomeTables) -> ReplayResult:
    """Plain decoding: one token a step, nothing drafted."""
    ms = tables.costs.verify_ms(0, tables.context) + tables.costs.step_ms
    tokens = np.bincount(tables.prompt_of, minlength=len(tables.prompt_ids))
    return ReplayResult(
        tokens=tokens,
        steps=tokens,
        decode_ms=np.bincount(tables.prompt_of, ms, len(tables.prompt_ids)).astype(np.float64),
        prefill_ms=np.asarray(tables.costs.target.ms(tables.prompt_tokens - 1, 0)),
        calls=np.zeros(len(tokens), np.int64),
        visited=np.ones(len(tables), np.bool_),
        lag=np.zeros(tables.drafters),
        step_rate=0.0,
    )


def best_fixed(tables: OutcomeTables) -> tuple[int, ...]:
    """The schedule of highest replayed speed when played at every step; the cheapest first among equals."""
    plans = [tuple(int(a) for a in plan) for plan in schedules(tables.depth, tables.drafters)]
    speeds = [replay(tables, fixed_actions(tables, plan)).tokens_per_ms for plan in plans]
    return plans[int(np.argmax(speeds))]


def oracle(tables: OutcomeTables) -> ReplayResult:
    """The clairvoyant optimum: the best schedule and verified size at every step, all outcomes known.

    A shortest path over each prompt's positions. It is an upper bound: drafters never need to catch up, except for the
    prompt, which the first call of each costs once.
    """
    m = tables.drafters
    plans = schedules(tables.depth, m)
    light = np.flatnonzero((plans == 0).all(axis=1))
    zero = np.zeros(m)
    context = tables.context[:, None]
    draft_ms = step_ms(tables, np.zeros((len(tables), len(plans)), np.int64), zero) - tables.costs.verify_ms(
        tables.sizes[0], context
    )
    verify_ms = tables.costs.verify_ms(np.array(tables.sizes), context)  # [P, G]
    cost = draft_ms[:, :, None] + verify_ms[:, None, :]  # [P, U, G]
    gain = np.minimum(tables.accepted.astype(np.int64) + 1, tables.left[:, None, None])
    starts = np.searchsorted(tables.prompt_of, np.arange(len(tables.prompt_ids)))
    ends = np.append(starts[1:], len(tables))
    # The prompt is part of a first call of t tokens, f(t + prompt) in all; f(t) + f(prompt) - f(most t) is never more
    # than that, as f rises. And a policy may call the cheapest drafter alone.
    most = int(tables.layer_tokens.max(initial=1))
    extra = [tables.costs.layer_ms(j, tables.prompt_tokens, 0) - tables.costs.layer_ms(j, most, 0) for j in range(1, m)]
    strong_prefill = np.maximum(np.min(extra, axis=0), 0.0) if extra else np.zeros(len(starts))
    totals, steps = np.zeros(len(starts)), np.zeros(len(starts), np.int64)
    for prompt, (start, end) in enumerate(zip(starts, ends, strict=True)):
        without = _shortest(cost[start:end][:, light], gain[start:end][:, light])
        with_calls = _shortest(cost[start:end], gain[start:end])
        totals[prompt], steps[prompt] = min(without, (with_calls[0] + strong_prefill[prompt], with_calls[1]))
    base = plain(tables)
    return ReplayResult(
        base.tokens,
        steps,
        totals,
        base.prefill_ms,
        base.calls,
        base.visited,
        base.lag,
        float(base.tokens.sum() / totals.sum()),
    )


def _shortest(cost: FloatArray, gain: IntArray) -> tuple[float, int]:
    """Least total time and its number of steps from the first position to the end; both arrays [L, U, G]."""
    length = len(cost)
    best = np.zeros(length + 1)
    steps = np.zeros(length + 1, np.int64)
    for at in range(length - 1, -1, -1):
        total = cost[at] + best[at + gain[at]]
        choice = np.unravel_index(int(np.argmin(total)), total.shape)
        best[at] = total[choice]
        steps[at] = 1 + steps[at + gain[at][choice]]
    return float(best[0]), int(steps[0])
