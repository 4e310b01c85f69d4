"""Yardsticks, learning curve and ablation on synthetic traces: what must be equal is equal, and a script prints it."""

import functools
import json
import runpy
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import distill
from pipeline.baselines import fit_baseline
from pipeline.bootstrap import Sums
from pipeline.dissection import (
    CALLED,
    CONSTANT,
    drop,
    feature_units,
    learning_curve,
    on_test,
    permute,
    permuted,
    present_groups,
    subset,
    trend,
)
from pipeline.distill_inputs import Inputs, read_inputs
from pipeline.headroom import fixed_by_kind, question_sums, turn_sums, yardsticks
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from pipeline.students import fit_one, labelled, one_thread
from tests.pipeline.test_distill import tables, write_traces
from treegraft.scheduling.features import feature_groups, feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.values.replay import best_fixed, oracle, plain, replay_fixed
from treegraft.values.states import offset
from treegraft.values.tables import OutcomeTables

ROOT = Path(__file__).parents[2]
PAIR = "smollm2-135m"
QUICK = ("linear", "decision_tree")  # of the baselines; gradient boosting takes longer than all else here
SETTINGS = [
    "decoding.depth=2",
    "decoding.verified_sizes=[0, 2, 4]",
    "distill={features: [text, tree], hidden: [8], learning_rate: 0.01, weight_decay: 0.0, epochs: 3, "
    "batch_size: 256, patience: 3, visit_exponent: 1.0, policy_iterations: 1, seeds: [0, 1]}",
    "evaluate.bootstrap=50",
]


def of_two_kinds(table: OutcomeTables) -> OutcomeTables:
    """The same with every other question of another kind."""
    kinds = [("maths", "code")[turn // 2 % 2] for turn in range(len(table.prompt_ids))]
    ids = [f"{kind}/{turn.split('/', 1)[1]}" for kind, turn in zip(kinds, table.prompt_ids, strict=True)]
    return replace(table, kinds=kinds, prompt_ids=ids)


@functools.cache
def two_kinds() -> dict[str, OutcomeTables]:
    return {split: of_two_kinds(table) for split, table in tables().items()}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    """A pair whose traces are synthetic, in a working directory of its own."""
    shutil.copy("params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    made = load_pair(PAIR, SETTINGS)
    write_traces(made, two_kinds())
    return made


@pytest.fixture
def inputs(config: PairConfig) -> Inputs:
    return read_inputs(config).with_features(config.distill.features)


def equal(one: Sums, other: Sums) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.taken, other.taken)


# --- yardsticks ------------------------------------------------------------------------------------------------------


def test_the_oracle_captures_all_of_the_headroom_and_the_better_single_drafter_none() -> None:
    test = two_kinds()["test"]
    found = yardsticks([test])
    assert found.captured(found.oracle) == 1
    assert found.captured(found.single) == 0
    assert found.speed(found.plain) == 1
    assert found.speed(found.oracle) == oracle(test).tokens_per_ms / plain(test).tokens_per_ms
    strong = [replay_fixed(test, (1,) * layers).tokens_per_ms for layers in (1, 2)]
    assert found.alone[0] == (0, 0)
    assert sum(found.alone[1]) == 1 + int(np.argmax(strong))
    assert found.single.rate == max(replay_fixed(test, ()).tokens_per_ms, *strong)
    assert found.best == best_fixed(test)


def test_without_headroom_no_share_of_it_is_named() -> None:
    found = yardsticks([two_kinds()["test"]])
    assert np.isnan(replace(found, oracle=found.single).captured(found.plain))


def test_several_tables_are_one_run() -> None:
    parts = list(two_kinds().values())
    found = yardsticks(parts)
    assert len(found.plain.tokens) == sum(len(part.prompt_ids) for part in parts)
    assert found.plain.rate == pytest.approx(
        sum(plain(part).tokens.sum() for part in parts) / sum(plain(part).ms.sum() for part in parts)
    )


def test_the_best_of_each_kind_is_that_of_its_prompts_alone() -> None:
    test = two_kinds()["test"]
    found = fixed_by_kind(test)
    for kind in ("maths", "code"):
        turns = np.flatnonzero(np.array(test.kinds) == kind)
        part = test.select(turns)
        assert equal(Sums(found.tokens[turns], found.taken[turns]), turn_sums([replay_fixed(part, best_fixed(part))]))


def test_turns_of_a_question_are_one_prompt_of_the_bootstrap() -> None:
    test = two_kinds()["test"]  # four turns of two questions
    run = Sums(np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0]))
    found = question_sums(test, run)
    assert sorted(zip(found.tokens.tolist(), found.taken.tolist(), strict=True)) == [(3, 30), (7, 70)]


# --- learning curve --------------------------------------------------------------------------------------------------


def test_subsets_take_whole_questions_of_every_kind_alike_and_the_smaller_are_part_of_the_larger() -> None:
    train = two_kinds()["train"]
    many = replace(  # eight turns as two of four questions: here one of each of eight, four a kind
        train, prompt_ids=[f"{kind}/{turn}/0" for turn, kind in enumerate(train.kinds)]
    )
    for repeat in range(5):
        half, quarter = (subset(many, fraction, 0, repeat) for fraction in (0.5, 0.25))
        assert Counter(many.kinds[turn] for turn in half) == {"maths": 2, "code": 2}
        assert Counter(many.kinds[turn] for turn in quarter) == {"maths": 1, "code": 1}
        assert set(quarter) < set(half)
        turns = subset(train, 0.5, 0, repeat)
        assert all(count == 2 for count in Counter(train.select(turns).questions).values())
        np.testing.assert_array_equal(turns, subset(train, 0.5, 0, repeat))
    assert len({tuple(subset(many, 0.5, 0, repeat)) for repeat in range(5)}) > 1
    np.testing.assert_array_equal(subset(many, 1.0, 0, 0), np.arange(8))


def test_the_last_row_of_the_curve_is_the_full_fit(
    config: PairConfig, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", QUICK)
    with one_thread():
        half, whole = learning_curve(config, inputs, 2, seed=1, fractions=(0.5, 1.0))
        student = on_test(fit_one(config, inputs, 1, None).network, inputs)
        others = {name: on_test(fit_baseline(name, labelled(inputs.train, None)), inputs) for name in QUICK}
    assert list(whole.runs) == ["student", *QUICK]
    assert all(len(runs) == 1 for runs in whole.runs.values()), "there is one subset of everything"
    assert equal(whole.runs["student"][0], student)
    assert all(equal(whole.runs[name][0], run) for name, run in others.items())
    assert (half.questions, half.turns, whole.questions, whole.turns) == (2, (4, 4), 4, (8,))
    assert all(len(runs) == 2 for runs in half.runs.values())
    assert not all(equal(half.runs[name][0], whole.runs[name][0]) for name in whole.runs)


@pytest.mark.parametrize(
    ("halves", "whole", "noise", "said"),
    [
        ([1.0, 1.1], 1.2, 0.0, "still rises"),
        ([1.0, 1.1], 1.1, 0.0, "shows no change beyond its spread"),
        ([1.0, 1.1], 1.2, 0.2, "shows no change beyond its spread"),
        ([1.0, 1.1], 0.9, 0.0, "falls"),
        ([1.0], 1.0, 0.0, "shows no change beyond its spread"),
    ],
)
def test_the_curve_rises_only_beyond_its_spread(halves: list[float], whole: float, noise: float, said: str) -> None:
    assert trend(halves, whole, noise) == said


# --- ablation --------------------------------------------------------------------------------------------------------


def test_dropping_nothing_is_the_full_fit_and_dropping_what_decides_costs_speed(
    config: PairConfig, inputs: Inputs
) -> None:
    with one_thread():
        full = on_test(fit_one(config, inputs, 0, None).network, inputs)
        assert equal(drop(config, inputs, [], 0), full)
        assert drop(config, inputs, ["frontier_depth", "reselected_score"], 0).rate < full.rate


def test_permuting_what_the_network_ignores_changes_nothing(config: PairConfig, inputs: Inputs) -> None:
    with one_thread():
        network = fit_one(config, inputs, 0, None).network
    weights = [weight.copy() for weight in network.weights]
    column = inputs.train.feature_names.index("frontier_depth")
    weights[0][column] = 0
    deaf = MarginNetwork(weights, network.biases, network.means, network.scales)
    full = on_test(deaf, inputs)
    assert all(equal(run, full) for run in permute(deaf, inputs, ["frontier_depth"], 3, seed=0))
    assert not any(equal(run, full) for run in permute(deaf, inputs, ["reselected_score"], 3, seed=0))
    first, second = permute(network, inputs, ["frontier_depth"], 2, seed=0)
    assert not equal(first, second)


def test_features_are_permuted_together_and_within_a_layer() -> None:
    test, names = two_kinds()["test"], ["light_match", "tree_mass"]
    found = permuted(test, names, np.random.default_rng(0))
    columns = [test.feature_names.index(name) for name in names]
    rest = [column for column in range(len(test.feature_names)) if column not in columns]
    np.testing.assert_array_equal(found.features[..., rest], test.features[..., rest])
    for layer in range(2):
        states = slice(offset(layer, 2), offset(layer + 1, 2))
        before, after = (table.features[:, states, columns].reshape(-1, 2) for table in (test, found))
        assert (before != after).any()
        assert sorted(map(tuple, before.tolist())) == sorted(map(tuple, after.tolist()))


@pytest.mark.parametrize(("depth", "drafters"), [(2, 2), (4, 3)])
def test_units_and_groups_hold_every_feature_once(depth: int, drafters: int) -> None:
    names = feature_names(depth, drafters)
    some = replace(two_kinds()["test"], depth=depth, drafters=drafters, feature_names=names)
    units, groups = feature_units(some), present_groups(some)
    assert [name for part in units.values() for name in part] == names
    assert groups == feature_groups(depth, drafters)
    assert len(units[CALLED]) == depth * (drafters - 1)
    assert len(units[CONSTANT]) == 2 + 2 * (drafters - 1)
    assert all(len(part) == 1 for unit, part in units.items() if unit not in (CALLED, CONSTANT))
    fewer = replace(some, feature_names=groups["published"])
    assert list(present_groups(fewer)) == ["published"]


# --- the script ------------------------------------------------------------------------------------------------------


def run_script(*arguments: str) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "scheduler.py"))["main"](list(arguments))


def parsed(text: str) -> list[dict[str, list[str]]]:
    """Every table as its rows by the first cell; the head is under ""."""
    found: list[dict[str, list[str]]] = []
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not before.startswith("|"):
                found.append({"": cells})
            else:
                found[-1][name] = cells
    return found


def test_the_script_prints_and_writes_tables_that_agree_with_distill(
    config: PairConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", QUICK)
    settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
    run_script(PAIR, "--output", "out.md", "--repeats", "2", "--draws", "2", *settings)
    text = (tmp_path / "out.md").read_text()
    assert capsys.readouterr().out == text
    speeds, shares, groups, units, policies, crossed, foresight = parsed(text)

    distill.run(config)
    measured: dict[str, Any] = json.loads(config.paths.distill_metrics.read_text())
    chosen = measured["chosen"]
    student = f"student as distill exports it (seed {chosen['seed']}, round {chosen['round']})"
    for name in ("plain", "student", "oracle", *QUICK):
        row = {"plain": "plain decoding", "student": student}.get(name, name)
        assert policies[row][0] == f"{measured['speedup']['test'][name]:.3f}"
    for name in QUICK:
        rate = measured["cross_validation"]["tokens_per_ms"][name] / measured["replay"]["train"]["plain"]
        assert crossed[f"{name}, out of fold"][0] == f"{rate:.3f}"

    assert foresight["nothing: the student above"] == policies[student]
    assert foresight["all of it: the oracle"] == policies["oracle"]
    for table in (policies, crossed):
        assert table["oracle"][1] == "100 %"
        single = max(
            (cells for name, cells in table.items() if " alone" in name or " layers" in name), key=lambda c: c[0]
        )
        assert single[1:] == ["0 %", "1.000", "1.000 - 1.000"]
    # The curve's end is the full fit, in both of its tables and in the ablation's first rows; so are the baselines.
    last = speeds["all: 4"]
    assert last[0:2] == ["8", "1"]
    assert groups["nothing"][1] == units["nothing"][1] == last[2]
    assert groups["nothing"][3] == units["nothing"][3] == shares["all: 4"][2]
    assert [policies[name][0] for name in QUICK] == last[3:]
    count = len(feature_names(2, 2))
    assert sum(int(cells[0]) for name, cells in units.items() if name) == count
    assert sum(int(cells[0]) for name, cells in groups.items() if name) == count
    changes = [float(cells[2]) for name, cells in units.items() if name not in ("", "nothing")]
    assert changes == sorted(changes)
    assert f"\n- {QUICK[0]} " in text.split("From half to all")[1]


def test_the_script_says_in_one_sentence_what_is_missing(
    config: PairConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(config.paths.traces)
    with pytest.raises(SystemExit) as ended:
        run_script(PAIR)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{config.paths.traces} does not exist; run `pipeline traces {PAIR}` first.\n"
