"""Hardware regimes: the same outcomes under other clocks, and what a scheduler of many machines may know of a clock.

What a schedule achieves depends on the models alone; only the cost features and the margins depend on the machine. So
a table can be given another cost model in no time, a measured or an imagined one.

Of a machine such a scheduler sees ratios only: milliseconds as such would name the machine they were measured on, and a
network that has seen two of them knows nothing about a third.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from treegraft.costs import CostModel, LatencyCurve
from treegraft.scheduling.features import feature_names
from treegraft.values.tables import OutcomeTables

GROWTH_NODES = (4, 32)
"""Verified nodes at which the growth of the target's forward is a feature: about what a CPU and a GPU verify."""


@dataclass(frozen=True)
class Regime:
    """Hardware that differs from the measured one in two ways; None leaves either as it was measured."""

    name: str
    ratio: float | None = None
    """One token of the dearest drafter, tree work included, over one token of the target, in a middling context."""
    slope: float | None = None
    """Rise of every model's forward with its tokens, as a multiple of the measured one; 0 is flat, as on a GPU."""


MEASURED = Regime("measured")
RATIOS, SLOPES = (0.1, 0.2, 0.35, 0.6), (0.1, 1.0, 2.0)
GRID = tuple(Regime(f"ratio-{ratio:g}-slope-{slope:g}", ratio, slope) for ratio in RATIOS for slope in SLOPES)
"""Regimes to train on beside the measured one."""
HELD_OUT = (Regime("between-0.27-slope-0.5", 0.27, 0.5), Regime("outside-0.07-slope-0", 0.07, 0.0))
"""Regimes for testing alone: one between the points of the grid and one outside."""


def regime_costs(costs: CostModel, regime: Regime) -> CostModel:
    """The cost model of a pair on the hardware of ``regime``.

    All drafters' forwards, prompt passes and tree work are scaled by one factor, so that several keep their ratios.
    What the host does besides (n-grams, decisions, bookkeeping) stays as measured.
    """
    slope = regime.slope
    if slope is not None:
        costs = dataclasses.replace(
            costs,
            target=_steeper(costs.target, slope),
            target_prefill=_steeper(costs.target_prefill, slope),
            **_of_drafters(costs, lambda curve: _steeper(curve, slope)),
        )
    if regime.ratio is not None:
        factor = regime.ratio / cost_ratio(costs)
        costs = dataclasses.replace(
            costs, graft_ms=costs.graft_ms * factor, **_of_drafters(costs, lambda curve: _scaled(curve, factor))
        )
    return costs


def _of_drafters(costs: CostModel, change: Callable[[LatencyCurve], LatencyCurve]) -> dict[str, Any]:
    """The curves of all drafters, each changed; n-gram drafters have none."""
    return {
        name: tuple(None if curve is None else change(curve) for curve in getattr(costs, name))
        for name in ("drafters", "drafter_prefill")
    }


def _scaled(curve: LatencyCurve, factor: float) -> LatencyCurve:
    return LatencyCurve(curve.new_tokens, curve.context_lengths, curve.grid * factor)


def _steeper(curve: LatencyCurve, slope: float) -> LatencyCurve:
    """The rise over the smallest measured forward times ``slope``."""
    least = curve.grid[:1]
    return LatencyCurve(curve.new_tokens, curve.context_lengths, least + slope * (curve.grid - least))


def recosted(tables: OutcomeTables, costs: CostModel) -> OutcomeTables:
    """The same outcomes on other hardware: cost features of ``costs``, labels zero. Arrays are shared where equal.

    Raises:
        ValueError: the tables lack a cost feature.
    """
    from treegraft.decoder import request_costs

    constant = np.array([request_costs(costs, int(n), 0).features for n in tables.prompt_tokens], np.float32)
    width = constant.shape[1]
    leading = feature_names(tables.depth, tables.drafters)[:width]
    if tables.feature_names[:width] != leading:
        raise ValueError(f"the tables do not begin with the cost features {leading}")
    features = tables.features.copy()
    features[..., :width] = constant[tables.prompt_of][:, None]
    return dataclasses.replace(
        tables,
        costs=costs,
        features=features,
        margins=np.zeros_like(tables.margins),
        visits=np.zeros_like(tables.visits),
    )


# --- what is known of a machine without its milliseconds -------------------------------------------------------------


def cost_ratio(costs: CostModel) -> float:
    """One token of the dearest drafter over one of the target, in a middling context."""
    return float(costs.layer_ms(len(costs.drafters) - 1, 1, _middle(costs))) / token_ms(costs)


def token_ms(costs: CostModel) -> float:
    """One token of the target in a middling context: the unit of a machine's time."""
    return float(costs.verify_ms(0, _middle(costs)))


def verify_growth(costs: CostModel) -> list[float]:
    """log(time to verify root and n nodes / the root alone) for every n of ``GROWTH_NODES``, in a middling context."""
    grown = costs.verify_ms(np.array(GROWTH_NODES), _middle(costs)) / token_ms(costs)
    return [math.log(value) for value in grown]


def scale_free(tables: OutcomeTables) -> OutcomeTables:
    """The tables as a scheduler of many machines sees them: no milliseconds; at the end the growth of verification.

    On one machine the growth never varies, so it is none of the library's features; between machines it decides how
    much a larger tree is worth.
    """
    absolute = {"target_ms", *(f"drafter{j}_ms" for j in range(1, tables.drafters))}
    kept = tables.with_features([name for name in tables.feature_names if name not in absolute])
    growth = np.array(verify_growth(tables.costs), np.float32)
    grown = np.broadcast_to(growth, (*kept.features.shape[:2], len(growth)))
    return dataclasses.replace(
        kept,
        feature_names=[*kept.feature_names, *(f"log_verify_growth{nodes}" for nodes in GROWTH_NODES)],
        features=np.concatenate([kept.features, grown], axis=-1),
    )


def _middle(costs: CostModel) -> float:
    """The middle of the context lengths on which the target was measured."""
    return float(np.median(costs.target.context_lengths))
