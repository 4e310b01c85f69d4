"""Replay, margins and the oracle on random tables, against brute force."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.treegraft.values.toy import SIZES, random_tables
from treegraft.costs import LatencyCurve
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
from treegraft.values.tables import OutcomeTables
from treegraft.values.values import greedy_actions, leaf_values, margins, policy_iteration, visit_weights


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
    warm_ms = (result.decode_ms + result.prefill_ms - result.pass_ms).sum()
    assert result.warm_tokens_per_ms == pytest.approx(result.tokens.sum() / warm_ms)
    for prompt in range(3):
        rows = np.flatnonzero(tables.prompt_of == prompt)
        at, ms, pass_ms, steps, calls = 0, 0.0, 0.0, 0, 0
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
                    ms += (layer_ms := float(tables.costs.layer_ms(1, tokens, context, 0 if called else behind)))
                    called = True
                    if calls == 1:
                        pass_ms = layer_ms - float(tables.costs.layer_ms(1, tokens, context))
            else:
                ms += verify[0]
            kept = min(int(tables.path_processed[row, u, 1]), int(tables.accepted[row, u, choice]) + 1)
            behind = gain - kept if called and kept else behind + gain
            at, steps = at + gain, steps + 1
        assert result.decode_ms[prompt] == pytest.approx(ms)
        assert result.pass_ms[prompt] == pytest.approx(pass_ms)
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


@pytest.mark.parametrize("seed", range(8))
def test_no_policy_beats_the_oracle_whose_sizes_go_by_the_same_rule(seed: int) -> None:
    tables = random_tables(seed)
    random = np.random.default_rng(seed)
    for rate in (0.0, 0.3, 1.0):
        best = oracle(tables, rate)
        assert best.step_rate == rate
        assert (oracle(tables).decode_ms <= best.decode_ms + 1e-9).all()
        for _ in range(10):
            played = replay(tables, random.integers(0, 2, (len(tables), 3)), rate)
            assert (best.decode_ms <= played.decode_ms + 1e-9).all()


def test_with_one_size_to_choose_from_the_rule_costs_the_oracle_nothing() -> None:
    tables = random_tables(1)
    one = {name: getattr(tables, name)[..., -1:] for name in ("accepted", "mass")}
    single = dataclasses.replace(tables, sizes=tables.sizes[-1:], **one)
    np.testing.assert_array_equal(oracle(single, 0.5).decode_ms, oracle(single).decode_ms)
    assert not np.array_equal(oracle(tables, 0.5).decode_ms, oracle(tables).decode_ms)


def test_best_fixed_is_the_best_of_all() -> None:
    tables = random_tables(3)
    speeds = {plan: replay_fixed(tables, plan).tokens_per_ms for plan in itertools.product((0, 1), repeat=2)}
    assert best_fixed(tables) == max(speeds, key=lambda plan: speeds[plan])


def clairvoyant(tables: OutcomeTables, labels: np.ndarray, visits: np.ndarray) -> np.ndarray:
    return greedy_actions(labels)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), m=st.integers(2, 3), noise=st.sampled_from([0.0, 0.5, 5.0]))
def test_policy_iteration_never_lowers_the_replayed_rate(seed: int, m: int, noise: float) -> None:
    """Whatever the learner makes of the labels: no round that is taken is slower than the one before."""
    random = np.random.default_rng(seed)

    def noisy(tables: OutcomeTables, labels: np.ndarray, visits: np.ndarray) -> np.ndarray:
        return greedy_actions(labels + noise * random.normal(size=labels.shape))

    tables = random_tables(seed, m, prompts=4)
    start = random.integers(0, m, (len(tables), offset(2, m)))
    found = policy_iteration(tables, start, noisy, 5)
    taken = found.rates if found.rates[-1] >= found.rates[-2] else found.rates[:-1]
    assert taken == sorted(taken)
    assert found.result.warm_tokens_per_ms == taken[-1] == replay(tables, found.actions).warm_tokens_per_ms
    assert found.rates[0] == replay(tables, start).warm_tokens_per_ms


def test_policy_iteration_gains_on_most_tables() -> None:
    gained = 0
    for seed in range(6):
        tables = random_tables(seed, prompts=6)
        found = policy_iteration(tables, fixed_actions(tables, best_fixed(tables)), clairvoyant, 6)
        gained += found.result.warm_tokens_per_ms > found.rates[0]
    assert gained >= 3


def stationary_tables(seed: int) -> OutcomeTables:
    """Three states a position, the same outcomes everywhere, exact scores, and drafters that never lag."""
    random = np.random.default_rng(seed)
    tables = random_tables(seed, prompts=1, length=60)
    growth = random.integers(0, 3, (1, 4, len(SIZES))).cumsum(-1)
    accepted = np.broadcast_to(np.minimum(growth, SIZES), tables.accepted.shape).astype(np.int16)
    free = LatencyCurve([1, 64], [8, 64], [[0.2, 0.2], [0.2, 0.2]])
    flat = [LatencyCurve([1, 16], [8], [[low], [high]]) for low, high in ((1.0, 2.0), (0.2, 0.5))]
    return dataclasses.replace(
        tables,
        accepted=accepted,
        mass=accepted.astype(np.float32),
        layer_tokens=np.broadcast_to(random.integers(1, 4, (1, 4, 2)), tables.layer_tokens.shape).astype(np.int16),
        costs=dataclasses.replace(
            tables.costs, target=flat[0], drafters=(None, flat[1]), drafter_prefill=(None, free), target_prefill=free
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_its_fixed_point_is_the_best_of_all_policies_of_three_states(seed: int) -> None:
    """From every start: all eight policies that decide by the state alone are played, none is faster."""
    tables = stationary_tables(seed)
    every = [np.tile(np.array(policy), (len(tables), 1)) for policy in itertools.product((0, 1), repeat=3)]
    best = max(replay(tables, actions).tokens_per_ms for actions in every)

    def by_state(tables: OutcomeTables, labels: np.ndarray, visits: np.ndarray) -> np.ndarray:
        middle = labels[: len(labels) // 2].mean(axis=0)  # of positions where the text's end is not near
        return np.broadcast_to(greedy_actions(middle), labels.shape[:2])

    for start in every:
        found = policy_iteration(tables, start, by_state, 8)
        assert found.result.tokens_per_ms == pytest.approx(best, rel=1e-12)
        assert (found.actions == by_state(tables, found.margins, found.visits)).all(), "a fixed point"


@pytest.mark.parametrize("sampled", [False, True])
def test_step_values_are_gain_less_time(sampled: bool) -> None:
    tables = random_tables(2, sampled=sampled)
    choice = size_choice(tables, 0.4)
    expected = gains(tables, choice) - 0.4 * step_ms(tables, choice, np.zeros(2))
    np.testing.assert_allclose(leaf_values(tables, 0.4, np.zeros(2)), expected)
    if not sampled:
        assert (gains(tables, choice) <= tables.left[:, None]).all()


def test_labels_follow_the_mean_and_replay_the_text() -> None:
    """Sampled tables: what one text accepted moves no margin, what others would have accepted moves no replay."""
    tables = random_tables(4, sampled=True)
    actions = np.random.default_rng(0).integers(0, 2, (len(tables), 3))
    rate, lag = 0.5, np.array([0.0, 2.0])
    other_text = dataclasses.replace(tables, accepted=tables.accepted[::-1].copy())
    other_mean = dataclasses.replace(tables, mean_accepted=tables.mean_accepted[::-1].copy())
    same = margins(tables, actions, rate, lag)
    np.testing.assert_array_equal(margins(other_text, actions, rate, lag), same)
    assert (margins(other_mean, actions, rate, lag) != same).any()
    played = replay(tables, actions, rate).decode_ms
    np.testing.assert_array_equal(replay(other_mean, actions, rate).decode_ms, played)
    assert (replay(other_text, actions, rate).decode_ms != played).any()


def test_text_that_could_not_differ_is_labelled_as_greedy_text_is() -> None:
    """The mean of one certain outcome is that outcome."""
    tables = random_tables(4)
    certain = np.minimum(tables.accepted, tables.left[:, None, None] - 1).astype(np.float32)
    actions = np.random.default_rng(0).integers(0, 2, (len(tables), 3))
    sampled = dataclasses.replace(tables, mean_accepted=certain)
    assert sampled.sampled
    assert not tables.sampled
    np.testing.assert_array_equal(margins(sampled, actions, 0.5), margins(tables, actions, 0.5))


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
