"""Replay, margins and the oracle on random tables, against brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.treegraft.tiny import cost_model
from treegraft.costs import LatencyCurve
from treegraft.scheduling.features import feature_names
from treegraft.values.lattice import Outcomes
from treegraft.values.replay import (
    best_fixed,
    fixed_actions,
    gains,
    oracle,
    plain,
    replay,
    replay_fixed,
    size_choice,
    step_ms,
)
from treegraft.values.states import code, offset, prefixes, state_index
from treegraft.values.tables import OutcomeTables, build_tables
from treegraft.values.traces import read_traces
from treegraft.values.values import greedy_actions, leaf_values, margins, policy_iteration, visit_weights

SIZES = (0, 1, 2, 4)


def random_tables(seed: int, m: int = 2, depth: int = 2, prompts: int = 3, length: int = 12) -> OutcomeTables:
    random = np.random.default_rng(seed)
    curve = LatencyCurve([1, 4, 16], [8, 64], [[1.0, 1.1], [1.3, 1.4], [3.0, 3.2]])
    catch_up = LatencyCurve([1, 64], [8, 64], [[0.2, 0.2], [0.9, 1.0]])
    cheap = LatencyCurve([1, 4, 16], [8, 64], [[0.2, 0.2], [0.3, 0.3], [0.6, 0.7]])
    costs = dataclasses.replace(
        cost_model(curve, (None, *[cheap] * (m - 1)), 0.02), drafter_prefill=(None, *[catch_up] * (m - 1))
    )
    names = feature_names(depth, m)
    rows = []
    for prompt in range(prompts):
        plans = m**depth
        left = np.arange(length, 0, -1)[:, None, None]
        growth = random.integers(0, 2, (length, plans, len(SIZES))).cumsum(-1)
        accepted = np.minimum(np.where(np.array(SIZES) == 0, 0, growth), np.maximum(left - 1, 0))
        outcomes = Outcomes(
            features=random.normal(size=(length, offset(depth, m), len(names))).astype(np.float32),
            accepted=accepted.astype(np.int16),
            mass=np.sort(random.uniform(0, 2, (length, plans, len(SIZES))), axis=-1).astype(np.float32),
            nodes=np.full((length, plans), 9, np.int16),
            layer_tokens=random.integers(1, 4, (length, plans, depth)).astype(np.int16),
            path_processed=random.integers(0, 2, (length, plans, m)).astype(np.int16),
        )
        rows.append((f"k/{prompt}/0", "k", 20 + prompt, outcomes))
    return build_tables(rows, names, m, depth, SIZES, costs)


@pytest.mark.parametrize("m", [2, 3])
def test_margins_equal_brute_force(m: int) -> None:
    tables = random_tables(1, m)
    random = np.random.default_rng(5)
    actions = random.integers(0, m, (len(tables), offset(2, m)))
    rate, lag = 0.7, np.array([0.0, 1.5, 2.5][:m])
    value = leaf_values(tables, rate, lag)
    found = margins(tables, actions, rate, lag)

    def worth(position: int, prefix: tuple[int, ...]) -> float:
        if len(prefix) == 2:
            return float(value[position, code(prefix, m)])
        return worth(position, (*prefix, int(actions[position, state_index(prefix, m)])))

    for position in range(len(tables)):
        for prefix in prefixes(2, m):
            base = worth(position, (*prefix, 0))
            for action in range(1, m):
                expected = worth(position, (*prefix, action)) - base
                assert found[position, state_index(prefix, m), action - 1] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_replay_adds_up_the_steps_it_takes(seed: int) -> None:
    """A plain loop over one prompt with its own catch-up bookkeeping."""
    tables = random_tables(seed)
    actions = np.random.default_rng(seed).integers(0, 2, (len(tables), 3))
    rate = 0.5
    result = replay(tables, actions, rate)
    for prompt in range(3):
        rows = np.flatnonzero(tables.prompt_of == prompt)
        at, ms, steps, calls = 0, 0.0, 0, 0
        behind = int(tables.prompt_tokens[prompt]) - 1
        while at < len(rows):
            row = rows[at]
            context = int(tables.prompt_tokens[prompt]) + at - 1
            plan = [int(actions[row, 0])]
            plan.append(int(actions[row, 1 + plan[0]]))
            u = 2 * plan[0] + plan[1]
            left = len(rows) - at
            ms += tables.costs.step_ms
            verify = [float(tables.costs.target.ms(size + 1, context)) for size in SIZES]
            choice = int(np.argmax(tables.mass[row, u] - rate * np.array(verify)))
            gain = min(int(tables.accepted[row, u, choice]) + 1, left)
            called = False
            if left > 0:
                ms += verify[choice]
                for layer, action in enumerate(plan):
                    ms += tables.costs.scheduler_ms
                    if action == 0:
                        ms += tables.costs.light_ms
                        continue
                    calls += 1
                    tokens = int(tables.layer_tokens[row, u, layer])
                    ms += float(tables.costs.layer_ms(1, tokens, context, 0 if called else behind))
                    called = True
            else:
                ms += verify[0]
            kept = min(int(tables.path_processed[row, u, 1]), int(tables.accepted[row, u, choice]) + 1)
            behind = gain - kept if called and kept else behind + gain
            at, steps = at + gain, steps + 1
        assert result.decode_ms[prompt] == pytest.approx(ms)
        assert (result.steps[prompt], result.calls[prompt]) == (steps, calls)


@pytest.mark.parametrize("seed", range(8))
def test_no_policy_beats_the_oracle(seed: int) -> None:
    tables = random_tables(seed)
    best = oracle(tables)
    random = np.random.default_rng(seed)
    for _ in range(20):
        actions = random.integers(0, 2, (len(tables), 3))
        for rate in (0.0, 0.3, 1.0):
            assert (best.decode_ms <= replay(tables, actions, rate).decode_ms + 1e-9).all()
    for plan in itertools.product((0, 1), repeat=2):
        assert (best.decode_ms <= replay_fixed(tables, plan).decode_ms + 1e-9).all()
    assert (best.decode_ms <= plain(tables).decode_ms).all()


def test_best_fixed_is_the_best_of_all() -> None:
    tables = random_tables(3)
    speeds = {plan: replay_fixed(tables, plan).tokens_per_ms for plan in itertools.product((0, 1), repeat=2)}
    assert best_fixed(tables) == max(speeds, key=lambda plan: speeds[plan])


def test_policy_iteration_never_ends_slower_than_it_started() -> None:

    def clairvoyant(tables: OutcomeTables, labels: np.ndarray, visits: np.ndarray) -> np.ndarray:
        return greedy_actions(labels)

    gained = 0
    for seed in range(6):
        tables = random_tables(seed, prompts=6)
        result = policy_iteration(tables, fixed_actions(tables, best_fixed(tables)), clairvoyant, 6)
        assert result.result.tokens_per_ms == max(result.rates)
        gained += result.result.tokens_per_ms > result.rates[0]
    assert gained >= 3


def test_step_values_are_gain_less_time() -> None:
    tables = random_tables(2)
    choice = size_choice(tables, 0.4)
    expected = gains(tables, choice) - 0.4 * step_ms(tables, choice, np.zeros(2))
    np.testing.assert_allclose(leaf_values(tables, 0.4, np.zeros(2)), expected)
    assert (gains(tables, choice) <= tables.left[:, None]).all()


def test_visits_follow_the_policy_and_forget_no_state() -> None:
    tables = random_tables(2)
    weights = visit_weights(tables, fixed_actions(tables, (1, 0)), np.ones(len(tables), np.bool_))
    np.testing.assert_allclose(weights[:, 0], 1.0)
    np.testing.assert_allclose(weights[:, 1:].sum(axis=1), 1.0)
    assert (weights > 0).all()
    assert (weights[:, 2] > weights[:, 1]).all()


def test_latency_curves_interpolate_and_never_fall() -> None:
    curve = LatencyCurve([1, 2, 4], [10, 20], [[1.0, 2.0], [0.5, 3.0], [3.0, 5.0]])
    assert curve.ms(1, 10) == pytest.approx(1.0)
    assert curve.ms(2, 10) == pytest.approx(1.0)  # measured 0.5: noise
    assert curve.ms(3, 15) == pytest.approx((2.0 + 4.0) / 2)
    assert curve.ms(6, 10) == pytest.approx(5.0)
    assert curve.ms(1, 99) == pytest.approx(2.0)
    assert curve.ms(0, 10) == 0


def test_traces_come_back_as_they_were(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    from treegraft.values.traces import SCHEMA_VERSION, write_split

    tables = random_tables(6, m=3)
    tables = tables.labelled(
        np.random.default_rng(0).normal(size=(len(tables), offset(2, 3), 2)), np.ones((len(tables), offset(2, 3)))
    )
    write_split(tmp_path, "train", tables)
    about = {
        "schema": SCHEMA_VERSION,
        "drafters": ["a", "b", "c"],
        "depth": 2,
        "feature_names": tables.feature_names,
        "verified_sizes": list(SIZES),
    }
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    (tmp_path / "profile.json").write_text(json.dumps({"cost_model": tables.costs.to_json()}))
    back = read_traces(tmp_path, "train")
    for name in (
        "features",
        "accepted",
        "mass",
        "nodes",
        "layer_tokens",
        "path_processed",
        "margins",
        "visits",
        "left",
    ):
        np.testing.assert_array_equal(getattr(back, name), getattr(tables, name), err_msg=name)
    assert back.prompt_ids == tables.prompt_ids
