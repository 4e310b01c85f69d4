"""What is in traces and what there is to win in them, as plain numbers: sizes, balance of labels, headroom."""

from typing import Any

import numpy as np

from treegraft.values.replay import IntArray, oracle, plain, replay, replay_fixed
from treegraft.values.tables import OutcomeTables
from treegraft.values.traces import split_counts


def split_statistics(
    tables: OutcomeTables, drafters: list[str], schedule: tuple[int, ...], actions: IntArray
) -> dict[str, Any]:
    """The statistics of one labelled split.

    Args:
        drafters: names in order of cost, [m]; schedule: the best fixed one of the training prompts; actions: int64
            [P, S], the policy under which the margins hold.

    Returns:
        ``size``; ``labels``: share of states in which each dearer drafter is worth more than the light one, plain and
        weighted by visits; ``tokens_per_s``: replayed, of plain decoding, each drafter alone, the fixed schedule, the
        policy and the oracle; ``headroom``: oracle over the best single drafter and over the fixed schedule.
    """
    rates = {"plain": plain(tables).tokens_per_ms}
    alone = {
        f"always_{name}": replay_fixed(tables, (j,) * tables.depth).tokens_per_ms for j, name in enumerate(drafters)
    }
    rates |= alone | {
        "fixed": replay_fixed(tables, schedule).tokens_per_ms,
        "policy": replay(tables, actions).tokens_per_ms,
        "oracle": oracle(tables).tokens_per_ms,
    }
    return {
        "size": split_counts(tables),
        "labels": {name: _balance(tables, j) for j, name in enumerate(drafters[1:])},
        "tokens_per_s": {name: 1000 * rate for name, rate in rates.items()},
        "headroom": {
            "oracle_over_best_single": rates["oracle"] / max(alone.values()),
            "oracle_over_fixed": rates["oracle"] / rates["fixed"],
        },
    }


def _balance(tables: OutcomeTables, margin: int) -> dict[str, float]:
    pays = tables.margins[..., margin] > 0
    weights = tables.visits.astype(np.float64)
    return {"pays": float(pays.mean()), "pays_by_visits": float((pays * weights).sum() / weights.sum())}
