"""Policies that know part of what the oracle knows, against brute force and where the answer is plain."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.bootstrap import Sums
from pipeline.foresight import step_known, with_sizes_known
from tests.treegraft.values.toy import SIZES, random_tables
from treegraft.costs import LatencyCurve
from treegraft.values.replay import ReplayResult, plain, replay_fixed, replay_schedules, size_choice
from treegraft.values.states import code
from treegraft.values.tables import OutcomeTables

NEVER, CALL = code((0, 0), 2), code((1, 0), 2)


def one_good_schedule() -> OutcomeTables:
    """Calling first and then skipping proposes the whole rest of the answer; every other schedule proposes nothing."""
    tables = random_tables(0)
    accepted = np.zeros_like(tables.accepted)
    accepted[:, CALL] = np.minimum(SIZES, (tables.left - 1)[:, None])
    return replace(tables, accepted=accepted, mass=accepted.astype(np.float32))


def same(found: Sums, expected: ReplayResult) -> bool:
    return np.array_equal(found.tokens, expected.tokens) and np.array_equal(found.taken, expected.ms)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0, 3.0])
def test_a_known_size_is_the_one_that_pays_best(seed: int, rate: float) -> None:
    tables = random_tables(seed)
    # The whole rest of an answer may be accepted, and then there is no bonus token behind it.
    tables = replace(tables, accepted=np.minimum(2 * tables.accepted, tables.left[:, None, None]).astype(np.int16))
    chosen = size_choice(with_sizes_known(tables), rate)
    for row in range(len(tables)):
        ms = [float(tables.costs.verify_ms(size, tables.context[row])) for size in SIZES]
        for plan in range(chosen.shape[1]):
            emitted = [min(int(accepted) + 1, int(tables.left[row])) for accepted in tables.accepted[row, plan]]
            worth = [tokens - rate * taken for tokens, taken in zip(emitted, ms, strict=True)]
            assert worth[chosen[row, plan]] == pytest.approx(max(worth))


def test_where_one_schedule_is_best_in_every_step_it_is_played() -> None:
    tables = one_good_schedule()
    codes = np.where(tables.left > 1, CALL, NEVER)  # before the last token there is nothing to gain by a call
    expected = replay_schedules(tables, codes)
    assert expected.tokens_per_ms > 1.5 * max(replay_fixed(tables, ()).tokens_per_ms, plain(tables).tokens_per_ms)
    assert same(step_known(tables), expected)


def test_no_request_calls_that_is_faster_without() -> None:
    tables = one_good_schedule()
    dear = LatencyCurve([1, 64], [8, 64], [[0.2, 0.2], [1000.0, 1000.0]])  # the drafter's pass over a prompt
    tables = replace(tables, costs=replace(tables.costs, drafter_prefill=(None, dear)))
    assert same(step_known(tables), replay_fixed(tables, ()))
