"""How much of the oracle's speed is foresight: policies that know a part of what it knows, on the same tables.

The oracle knows every outcome. These tell apart what that knowledge is worth where: in how many nodes to verify, in
which schedule of one step to play, in how the steps of an answer fall.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pipeline.bootstrap import Sums

if TYPE_CHECKING:
    from treegraft.values.replay import ReplayResult
    from treegraft.values.tables import OutcomeTables


def with_sizes_known(tables: "OutcomeTables") -> "OutcomeTables":
    """Tables on which the rule for verified sizes, whatever the schedule, picks the size that will have been best."""
    emitted = np.minimum(tables.accepted + 1.0, tables.left[:, None, None])  # [P, U, G]
    return dataclasses.replace(tables, mass=emitted.astype(np.float32))


def step_known(tables: "OutcomeTables") -> Sums:
    """Every step by the schedule that will have been best in it, and whether a request may call decided in hindsight.

    Best is most tokens, less what the step's time is worth at the policy's own rate. It sees one step ahead, as the
    labels do, and pays for decisions and for drafters that catch up as everybody does; sizes go by the rule.
    """
    from treegraft.values.replay import RATE_ROUNDS, gains, plain, replay_fixed, replay_schedules, size_choice, step_ms

    rounds: list[ReplayResult] = []  # its rate depends on what it plays, and that on the rate
    for _ in range(RATE_ROUNDS):
        result = rounds[-1] if rounds else plain(tables)
        rate = result.decode_rate
        choice = size_choice(tables, rate)
        worth = gains(tables, choice) - rate * step_ms(tables, choice, result.lag)  # [P, U]
        rounds.append(replay_schedules(tables, worth.argmax(axis=1), rate))
    best = max(rounds, key=lambda found: found.tokens_per_ms)
    never = replay_fixed(tables, (), best.step_rate)
    return Sums(best.tokens.astype(np.float64), np.minimum(best.ms, never.ms))
