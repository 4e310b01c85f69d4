"""Hardware regimes: what changes with the clock, and what does not."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tests.treegraft.values.toy import random_tables, scaled_costs
from treegraft.costs import CostModel
from treegraft.decoder import request_costs
from treegraft.scheduling.features import feature_names
from treegraft.values.regimes import (
    GRID,
    GROWTH_NODES,
    HELD_OUT,
    MEASURED,
    Regime,
    cost_ratio,
    recosted,
    regime_costs,
    scale_free,
    token_ms,
    verify_growth,
)
from treegraft.values.replay import fixed_actions, plain, replay, replay_fixed
from treegraft.values.tables import OutcomeTables
from treegraft.values.values import greedy_actions, margins, visit_weights


def own_costs(seed: int, m: int = 2) -> OutcomeTables:
    """Random tables whose cost features are those of their cost model."""
    tables = random_tables(seed, m)
    return recosted(tables, tables.costs)


def relabelled(tables: OutcomeTables) -> OutcomeTables:
    actions = fixed_actions(tables, (1, 0))
    result = replay(tables, actions)
    return tables.labelled(
        margins(tables, actions, result.decode_rate, result.lag), visit_weights(tables, actions, result.visited)
    )


@pytest.mark.parametrize("m", [2, 3])
def test_the_same_costs_change_nothing(m: int) -> None:
    tables = relabelled(own_costs(0, m))
    again = recosted(tables, tables.costs)
    assert not again.margins.any()
    assert not again.visits.any()
    again = relabelled(again)
    for field in dataclasses.fields(OutcomeTables):
        before, after = getattr(tables, field.name), getattr(again, field.name)
        if isinstance(before, np.ndarray):
            np.testing.assert_array_equal(before, after, err_msg=field.name)
    actions = np.random.default_rng(0).integers(0, m, tables.visits.shape)
    assert replay(again, actions).tokens_per_ms == replay(tables, actions).tokens_per_ms


@pytest.mark.parametrize("m", [2, 3])
def test_other_costs_change_the_cost_features_alone(m: int) -> None:
    tables = random_tables(0, m)
    costs = regime_costs(tables.costs, GRID[4])
    new = recosted(tables, costs)
    width = 2 * m
    np.testing.assert_array_equal(new.features[..., width:], tables.features[..., width:])
    for row in range(len(tables)):
        prompt = int(tables.prompt_tokens[tables.prompt_of[row]])
        told = request_costs(costs, prompt, 9)
        strong = [float(costs.layer_ms(j, 1, prompt)) for j in range(1, m)]
        target = float(costs.verify_ms(0, prompt))
        expected = [math.log1p(prompt), target, *strong, *(math.log(ms / target) for ms in strong)]
        assert told.features == pytest.approx(expected)
        np.testing.assert_allclose(new.features[row, :, :width], np.tile(expected, (3 if m == 2 else 4, 1)), rtol=1e-6)
    assert new.accepted is tables.accepted
    with pytest.raises(ValueError, match="do not begin with the cost features"):
        recosted(scale_free(tables), costs)


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_is_slower_in_everything_decides_alike(seed: int) -> None:
    tables = relabelled(own_costs(seed))
    slow = relabelled(recosted(tables, scaled_costs(tables.costs, 8.0)))
    np.testing.assert_array_equal(slow.margins, tables.margins)
    np.testing.assert_array_equal(slow.visits, tables.visits)
    np.testing.assert_array_equal(scale_free(slow).features, scale_free(tables).features)
    assert scale_free(slow).feature_names == scale_free(tables).feature_names
    for policy in (
        plain,
        lambda part: replay_fixed(part, (1,)),
        lambda part: replay(part, greedy_actions(part.margins)),
    ):
        assert 8 * policy(slow).tokens_per_ms == pytest.approx(policy(tables).tokens_per_ms, rel=1e-12)
    assert (cost_ratio(slow.costs), verify_growth(slow.costs)) == (
        cost_ratio(tables.costs),
        verify_growth(tables.costs),
    )
    assert token_ms(slow.costs) == 8 * token_ms(tables.costs)


def test_a_scale_free_table_has_no_milliseconds() -> None:
    tables = own_costs(0, 3)
    free = scale_free(tables)
    left_out = {"target_ms", "drafter1_ms", "drafter2_ms"}
    growth = [f"log_verify_growth{nodes}" for nodes in GROWTH_NODES]
    assert free.feature_names == [name for name in feature_names(2, 3) if name not in left_out] + growth
    verify_ms = tables.costs.verify_ms([0, *GROWTH_NODES], 36)  # contexts 8 and 64 were measured
    np.testing.assert_allclose(np.exp(free.features[5, 2, -2:]), verify_ms[1:] / verify_ms[0], rtol=1e-6)
    index = tables.feature_names.index("root_chance")
    np.testing.assert_array_equal(
        free.features[..., free.feature_names.index("root_chance")], tables.features[..., index]
    )


@pytest.mark.parametrize("regime", [*GRID, *HELD_OUT], ids=lambda regime: regime.name)
def test_regimes_have_their_ratio_and_slope(regime: Regime) -> None:
    assert regime.ratio is not None
    assert regime.slope is not None
    before = random_tables(0, 3).costs
    after = regime_costs(before, regime)
    assert cost_ratio(after) == pytest.approx(regime.ratio)
    # The target's first token costs what it did; every further one rises by the slope's share.
    tokens = np.array([1, 2, 5, 16, 40])
    for curve, other in ((after.target, before.target), (after.target_prefill, before.target_prefill)):
        rise = other.ms(tokens, 30) - other.ms(1, 30)
        np.testing.assert_allclose(curve.ms(tokens, 30), other.ms(1, 30) + regime.slope * rise)
    # All of a drafter's times are scaled by one factor, prompt passes and tree work too.
    factor = after.graft_ms / before.graft_ms
    for curves, others in ((after.drafters, before.drafters), (after.drafter_prefill, before.drafter_prefill)):
        assert curves[0] is None
        for j in (1, 2):
            scaled, own = curves[j], others[j]
            assert scaled is not None
            assert own is not None
            rise = own.ms(tokens, 30) - own.ms(1, 30)
            np.testing.assert_allclose(scaled.ms(tokens, 30), factor * (own.ms(1, 30) + regime.slope * rise))
    for name in ("light_ms", "scheduler_ms", "step_ms"):
        assert getattr(after, name) == getattr(before, name)


def test_the_measured_regime_is_the_measured_costs() -> None:
    costs = random_tables(0).costs
    assert regime_costs(costs, MEASURED) is costs
    same = regime_costs(costs, Regime("same", cost_ratio(costs), 1.0))
    assert CostModel.from_json(same.to_json()).digest() == costs.digest()


def test_held_out_regimes_are_not_on_the_grid() -> None:
    assert len({regime.name for regime in (MEASURED, *GRID, *HELD_OUT)}) == 1 + len(GRID) + len(HELD_OUT)
    for grid, held in itertools.product(GRID, HELD_OUT):
        assert grid.ratio != held.ratio
        assert grid.slope != held.slope


def test_margins_fall_as_calls_get_dearer() -> None:
    """At a fixed rate and sizes of zero slope, only the calls' price differs between two regimes."""
    tables = own_costs(1)
    actions, lag = fixed_actions(tables, (0, 0)), np.zeros(2)
    free, dear = (
        margins(recosted(tables, regime_costs(tables.costs, Regime("", ratio, 0.0))), actions, 0.5, lag)
        for ratio in (1e-6, 100.0)
    )
    assert (dear < 0).all()
    assert (free > dear).all()
