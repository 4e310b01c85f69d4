"""Replay: the exact modelled speed of any policy on tabulated outcomes, in milliseconds instead of minutes."""

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treegraft.values.states import code, offset, played, schedules
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
    pass_ms: FloatArray
    """The part of ``decode_ms`` that went into the drafters' first passes over the prompt."""
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
    def warm_tokens_per_ms(self) -> float:
        """The same as if drafters knew the prompt: what single decisions are worth (see scheduling/admission.py)."""
        return float(self.tokens.sum() / (self.ms - self.pass_ms).sum())

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


def gains(tables: OutcomeTables, choice: IntArray) -> FloatArray:
    """Tokens that a step emits, bonus included, never beyond the answer's end: float64 [P, U].

    Where the text was sampled, their mean over what the target may draw from the position on.
    """
    if tables.sampled:
        return 1.0 + np.take_along_axis(tables.mean_accepted, choice[..., None], axis=-1)[..., 0].astype(np.float64)
    accepted = np.take_along_axis(tables.accepted, choice[..., None], axis=-1)[..., 0].astype(np.float64)
    return np.minimum(accepted + 1, tables.left[:, None])


def draftable(tables: OutcomeTables) -> NDArray[np.bool_]:
    """Whether anything may be drafted at a position ([P]): not where one token is left under the request's limit."""
    drafted = (tables.nodes > 0)[..., None] | (tables.layer_tokens > 0)  # [P, U, D]
    return np.asarray(drafted.any(axis=(1, 2)), np.bool_)


def step_ms(tables: OutcomeTables, choice: IntArray, lag: FloatArray, decides: bool = True) -> FloatArray:
    """Modelled time of a step, float64 [P, U], when drafter j catches up on ``lag[j]`` tokens in its first call.

    ``decides``: whether a scheduler is asked in every layer; a fixed schedule needs none.
    """
    costs, m = tables.costs, tables.drafters
    context = tables.context[:, None]
    plans = schedules(tables.depth, m)  # [U, D]
    total = costs.verify_ms(np.array(tables.sizes)[choice], context) + costs.step_ms
    called = np.zeros((m, len(plans)), np.bool_)
    for layer in range(tables.depth):
        total += costs.scheduler_ms * decides
        for j in range(m):
            plays = plans[:, layer] == j
            own = tables.layer_tokens[:, plays, layer]
            total[:, plays] += costs.layer_ms(j, own, context, np.where(called[j, plays], 0.0, lag[j]))
            called[j, plays] = True
    return np.where(draftable(tables)[:, None], total, costs.verify_ms(0, context) + costs.step_ms)


def replay(tables: OutcomeTables, actions: IntArray, rate: float | None = None) -> ReplayResult:
    """Play a policy through all prompts, all of them in lockstep; a decision is paid for in every layer.

    Args:
        actions: int64 [P, S].
        rate: tokens per millisecond for the verified sizes; None: the policy's own decode rate (a fixed point).
    """
    return replay_schedules(tables, played(actions, tables.depth, tables.drafters), rate)


def replay_fixed(tables: OutcomeTables, schedule: tuple[int, ...], rate: float | None = None) -> ReplayResult:
    """Play one schedule at every step (missing layers skip), which takes no decisions; ``rate`` as in ``replay``."""
    full = (*schedule, *(0,) * (tables.depth - len(schedule)))
    codes = np.full(len(tables), code(full, tables.drafters))
    return replay_schedules(tables, codes, rate, decides=False)


def replay_schedules(
    tables: OutcomeTables, codes: IntArray, rate: float | None = None, decides: bool = True
) -> ReplayResult:
    """Play one schedule at every position, by its code: int64 [P]; ``rate`` as in ``replay``.

    ``decides``: whether a decision is paid for in every layer.
    """
    if rate is not None:
        return _play(tables, codes, rate, decides)
    # Verified sizes come from a grid, so the rate may step between two values for ever: the best round counts.
    best = result = _play(tables, codes, plain(tables).decode_rate, decides)
    for _ in range(RATE_ROUNDS):
        again = _play(tables, codes, result.decode_rate, decides)
        if again.tokens_per_ms > best.tokens_per_ms:
            best = again
        if abs(again.decode_rate - result.decode_rate) < 1e-9:
            break
        result = again
    return best


def joint_rate(results: list[ReplayResult]) -> float:
    """Tokens per millisecond of steps over several tables: the rate at which a decoder should choose sizes."""
    return float(sum(r.tokens.sum() for r in results) / sum(r.decode_ms.sum() for r in results))


def _play(tables: OutcomeTables, codes: IntArray, rate: float, decides: bool) -> ReplayResult:
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
    pass_ms = np.zeros(prompts)
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
            ms += np.where(drafts, costs.scheduler_ms * decides, 0.0)
            for j in range(m):
                acts = np.flatnonzero(drafts & (plans[here, layer] == j))
                if not len(acts):
                    continue
                tokens = tables.layer_tokens[here[acts], codes[here[acts]], layer]
                first = ~called[acts, j] & (tokens > 0)  # a call that finds nothing to expand runs no forward
                behind = np.where(first, lag[going[acts], j], 0)
                layer_ms = costs.layer_ms(j, tokens, tables.context[here[acts]], behind)
                ms[acts] += layer_ms
                known = first & ~fresh[going[acts], j]
                new = np.flatnonzero(first & fresh[going[acts], j])
                if len(new):
                    at_once = costs.layer_ms(j, tokens[new], tables.context[here[acts[new]]])
                    pass_ms[going[acts[new]]] += layer_ms[new] - at_once
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
        pass_ms=pass_ms,
        prefill_ms=costs.prefill_ms(tables.prompt_tokens),
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
        pass_ms=np.zeros(len(tokens)),
        prefill_ms=tables.costs.prefill_ms(tables.prompt_tokens),
        calls=np.zeros(len(tokens), np.int64),
        visited=np.ones(len(tables), np.bool_),
        lag=np.zeros(tables.drafters),
        step_rate=0.0,
    )


def best_fixed(tables: OutcomeTables) -> tuple[int, ...]:
    """The schedule of highest replayed speed when played at every step; the cheapest first among equals."""
    plans = [tuple(int(a) for a in plan) for plan in schedules(tables.depth, tables.drafters)]
    speeds = [replay_fixed(tables, plan).tokens_per_ms for plan in plans]
    return plans[int(np.argmax(speeds))]


def oracle(tables: OutcomeTables, rate: float | None = None) -> ReplayResult:
    """The clairvoyant optimum: the best schedule and verified size at every step, all outcomes known.

    A shortest path over each prompt's positions, for every set of drafters that may be called. It is an upper bound on
    every policy: nobody pays for decisions, and drafters never catch up, except on the prompt, once.

    Args:
        rate: leave the verified sizes to the hardware-aware rule at so many tokens per millisecond, and be clairvoyant
            in the schedules alone.
    """
    m = tables.drafters
    plans = schedules(tables.depth, m)
    zero = np.zeros(m)
    context = tables.context[:, None]
    no_nodes = np.zeros((len(tables), len(plans)), np.int64)
    draft_ms = step_ms(tables, no_nodes, zero, decides=False) - tables.costs.verify_ms(tables.sizes[0], context)
    verify_ms = tables.costs.verify_ms(np.array(tables.sizes), context)  # [P, G]
    cost = draft_ms[:, :, None] + verify_ms[:, None, :]  # [P, U, G]
    gain = np.minimum(tables.accepted.astype(np.int64) + 1, tables.left[:, None, None])
    if rate is not None:
        choice = size_choice(tables, rate)[:, :, None]
        cost, gain = np.take_along_axis(cost, choice, axis=2), np.take_along_axis(gain, choice, axis=2)
    starts = np.searchsorted(tables.prompt_of, np.arange(len(tables.prompt_ids)))
    ends = np.append(starts[1:], len(tables))
    base = plain(tables)
    best, steps = base.decode_ms.copy(), base.steps.copy()
    strong = range(1, m)
    for chosen in (subset for size in range(m) for subset in itertools.combinations(strong, size)):
        rows = np.flatnonzero(np.isin(plans, (0, *chosen)).all(axis=1))
        prompt_ms = sum((tables.costs.prompt_ms(j, tables.prompt_tokens) for j in chosen), np.zeros(len(starts)))
        for prompt, (start, end) in enumerate(zip(starts, ends, strict=True)):
            total, count = _shortest(cost[start:end][:, rows], gain[start:end][:, rows])
            if total + prompt_ms[prompt] < best[prompt]:
                best[prompt], steps[prompt] = total + prompt_ms[prompt], count
    achieved = float(base.tokens.sum() / best.sum())
    return dataclasses.replace(base, steps=steps, decode_ms=best, step_rate=achieved if rate is None else rate)


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
