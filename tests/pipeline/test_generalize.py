"""`pipeline generalize`: one student for many pairs and machines, and what it must not know."""

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import cli, generalize
from pipeline.distill_inputs import Inputs
from pipeline.files import write_json
from pipeline.generalize import Cell, check_alike, check_prompts, fit_saving_rule, in_regime, make_cells, train_general
from pipeline.generalize_report import GROUPS, METHODS, best_strong, cell_rates, kept_share, markdown
from pipeline.labelled import decide
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from pipeline.relabel import label_training
from pipeline.students import choose
from tests.pipeline.test_distill import ANSWER, CALIBRATION, costs, synthetic_tables
from tests.treegraft.values.toy import scaled_costs
from treegraft.costs import CostModel
from treegraft.errors import UserError
from treegraft.scheduling.network import MarginNetwork
from treegraft.values import regimes
from treegraft.values.regimes import MEASURED, Regime, recosted, regime_costs
from treegraft.values.replay import best_fixed, replay_fixed
from treegraft.values.tables import OutcomeTables
from treegraft.values.traces import trace_manifest, write_split

FIRST, SECOND, THIRD = "smollm2-135m", "qwen2.5-coder-1.5b", "qwen3-8b-0.6b"
SETTINGS = [
    "decoding.depth=2",
    "decoding.width=4",
    "decoding.verified_sizes=[0, 2, 4]",
    "traces.policy_iterations=1",
    "distill={features: [text, tree], hidden: [16], learning_rate: 0.01, weight_decay: 0.0, epochs: 20, "
    "batch_size: 64, patience: 20, visit_exponent: 1.0, policy_iterations: 1, seeds: [0]}",
]
FREE, DEAR = Regime("free", 0.001, 1.0), Regime("dear", 3.0, 1.0)
BETWEEN = Regime("between", 0.01, 0.8)


@pytest.fixture(autouse=True)
def _few_regimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy("params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(regimes, "GRID", (FREE, DEAR))
    monkeypatch.setattr(regimes, "HELD_OUT", (BETWEEN,))


def pair(slug: str, *more: str) -> PairConfig:
    return load_pair(slug, [*SETTINGS, *more])


def pair_tables(length: int, model: CostModel | None = None) -> dict[str, OutcomeTables]:
    """Synthetic tables with cost features and labels; the questions of all such pairs are split alike."""
    model = costs() if model is None else model
    made = {}
    for split, turns, seed in (("train", 8, 0), ("validation", 4, 1), ("test", 4, 2)):
        tables = recosted(synthetic_tables(turns, length, seed), model)
        made[split] = label_training(tables, 1).labelled(tables) if split == "train" else tables
    return made


def inputs_of(tables: dict[str, OutcomeTables]) -> Inputs:
    return Inputs(
        **tables,
        calibration=CALIBRATION,
        temperature=0.0,
        new_tokens=ANSWER,
        tokenizer_hashes={"target": "abc"},
        best_fixed=best_fixed(tables["validation"]),
    )


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return inputs_of(pair_tables(20))


def cells_of(inputs: dict[str, Inputs], trained: list[str], folder: Path) -> list[Cell]:
    folder.mkdir(exist_ok=True)
    return make_cells(pair(FIRST), inputs, trained, folder)


def write_pair(config: PairConfig, tables: dict[str, OutcomeTables]) -> None:
    """A traces folder as stage traces leaves it."""
    folder = config.paths.traces
    for split, table in tables.items():
        write_split(folder, split, table)
    names = [drafter.name for drafter in config.drafters]
    profile = {"cost_model": tables["train"].costs.to_json(), "tokenizer_hashes": {config.target.name: "abc"}}
    write_json(folder / "profile.json", profile)
    write_json(folder / "calibration.json", CALIBRATION)
    write_json(folder / "manifest.json", trace_manifest(folder, tables, names, 0.0, ANSWER))


# --- labels under other costs ----------------------------------------------------------------------------------------


def test_relabelling_at_the_measured_costs_gives_the_labels_of_the_traces(inputs: Inputs, tmp_path: Path) -> None:
    regime = Regime("as-measured")  # another name, so that it is labelled anew
    again = in_regime(inputs, regime, 1, tmp_path / "labels.npz")
    for field in dataclasses.fields(OutcomeTables):
        before, after = getattr(inputs.train, field.name), getattr(again.train, field.name)
        if isinstance(before, np.ndarray):
            np.testing.assert_array_equal(after, before, err_msg=field.name)
    assert again.best_fixed == inputs.best_fixed
    assert replay_fixed(again.test, (1,)).tokens_per_ms == replay_fixed(inputs.test, (1,)).tokens_per_ms


def test_labels_are_made_once(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = in_regime(inputs, FREE, 1, tmp_path / "labels.npz")
    monkeypatch.setattr("pipeline.relabel.label_training", None)
    again = in_regime(inputs, FREE, 1, tmp_path / "labels.npz")
    np.testing.assert_array_equal(again.train.margins, first.train.margins)
    np.testing.assert_array_equal(again.train.visits, first.train.visits)
    assert (first.train.margins != inputs.train.margins).any()


# --- the general student ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Cell], MarginNetwork]:
    """Trained on one pair, with a second one held out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regimes, "GRID", (FREE, DEAR))
        patch.setattr(regimes, "HELD_OUT", (BETWEEN,))
        folder = tmp_path_factory.mktemp("trained")
        cells = cells_of({FIRST: inputs, SECOND: inputs_of(pair_tables(16))}, [FIRST], folder)
        return cells, choose(train_general(pair(FIRST), cells, folder)).student.network


def test_it_calls_where_calls_are_free_and_never_where_they_bring_less_than_they_cost(
    trained: tuple[list[Cell], MarginNetwork],
) -> None:
    """The same test prompts, the same network: only the features that tell of the machine differ."""
    cells, network = trained
    rule = fit_saving_rule(network, [cell.general for cell in cells if cell.seen])
    for cell in cells:
        tables = cell.general.test
        actions = decide(network, tables, rule.admission(tables.costs, ANSWER))
        rates = cell_rates(cell, network_of_size(cell.inputs.test), network, rule)
        if cell.regime == DEAR:
            assert not actions.any()
            assert decide(network, tables)[:, 0].mean() < 0.05  # nor would it if the request were admitted
            assert rates["general"] == pytest.approx(rates["ngram"], rel=0.02)  # decisions are paid for
        elif cell.regime in (FREE, BETWEEN):
            # A first call brings two tokens at every second or third position.
            assert actions[:, 0].mean() > 0.3
            assert rates["general"] > 1.1 * rates["ngram"]


def network_of_size(tables: OutcomeTables) -> MarginNetwork:
    """A student that never calls."""
    width = tables.features.shape[-1]
    return MarginNetwork([np.zeros((width, 1))], [np.array([-1.0])], np.zeros(width), np.ones(width))


def test_rows_that_were_held_out_never_enter_training(
    trained: tuple[list[Cell], MarginNetwork], tmp_path: Path
) -> None:
    """Training refuses NaN, so it would notice; and it comes to the same network without those cells."""
    cells, network = trained
    for fate in ("poisoned", "absent", "test poisoned"):
        if fate == "absent":
            given = [cell for cell in cells if cell.seen]
        elif fate == "poisoned":
            given = [cell if cell.seen else replace(cell, inputs=poisoned(cell.inputs)) for cell in cells]
        else:
            given = [replace(cell, inputs=replace(cell.inputs, test=spoiled(cell.inputs.test))) for cell in cells]
        folder = tmp_path / fate
        folder.mkdir()
        again = choose(train_general(pair(FIRST), given, folder)).student.network
        for before, after in zip(network.weights, again.weights, strict=True):
            np.testing.assert_array_equal(after, before)
    seen = next(cell for cell in cells if cell.seen)
    (tmp_path / "seen").mkdir()
    with pytest.raises(UserError, match="NaN"):  # that the poison works
        train_general(pair(FIRST), [replace(seen, inputs=poisoned(seen.inputs))], tmp_path / "seen")


def spoiled(tables: OutcomeTables) -> OutcomeTables:
    nan = {name: np.full_like(getattr(tables, name), np.nan) for name in ("features", "margins", "visits", "mass")}
    return replace(tables, **nan)


def poisoned(inputs: Inputs) -> Inputs:
    train, validation, test = (spoiled(part) for part in (inputs.train, inputs.validation, inputs.test))
    return replace(inputs, train=train, validation=validation, test=test)


def test_a_pair_on_a_machine_that_is_slower_in_everything_gives_the_same_student(
    trained: tuple[list[Cell], MarginNetwork], tmp_path: Path
) -> None:
    cells, network = trained
    slow = cells_of({FIRST: inputs_of(pair_tables(20, scaled_costs(costs(), 8.0)))}, [FIRST], tmp_path / "slow")
    again = choose(train_general(pair(FIRST), slow, tmp_path / "slow")).student.network
    for before, after in zip(network.weights, again.weights, strict=True):
        np.testing.assert_array_equal(after, before)
    rule, slow_rule = (fit_saving_rule(network, [cell.general for cell in some if cell.seen]) for some in (cells, slow))
    for cell, other in zip(cells, slow, strict=False):
        unused = network_of_size(cell.inputs.test)
        fast, late = cell_rates(cell, unused, network, rule), cell_rates(other, unused, network, slow_rule)
        assert {name: 8 * rate for name, rate in late.items()} == pytest.approx(fast, rel=1e-9)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_reports_every_cell_and_goes_on_after_a_kill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for slug, length in ((FIRST, 20), (SECOND, 16)):
        write_pair(pair(slug), pair_tables(length))
    arguments = ["generalize", "both", "--pairs", FIRST, "--held-out", SECOND]
    arguments += [part for setting in SETTINGS for part in ("--set", setting)]
    arguments += ["--set", "distill.epochs=3"]
    real = generalize.fit_one
    fits: list[Any] = []

    def killed(*given: Any) -> Any:
        if len(fits) == 3:
            raise KeyboardInterrupt
        fits.append(given)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(generalize, "fit_one", killed)
        assert cli.main(arguments) == cli.EXIT_INTERRUPTED
    path = Path("reports/both/generalize.json")
    assert not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(generalize, "fit_general", None)  # finished before the kill
        assert cli.main(arguments) == 0
    first = path.read_bytes()
    shutil.rmtree(".treegraft")
    capsys.readouterr()
    assert cli.main(arguments) == 0
    assert path.read_bytes() == first
    report = json.loads(first)
    assert (report["pairs"], report["held_out"]) == ([FIRST], [SECOND])
    found = {(cell["pair"], cell["regime"]): cell["group"] for cell in report["cells"]}
    assert found == {
        **{(FIRST, regime): "trained" for regime in ("measured", "free", "dear")},
        (FIRST, "between"): "held_out_regime",
        **{(SECOND, regime): "held_out_pair" for regime in ("measured", "free", "dear")},
        (SECOND, "between"): "held_out_both",
    }
    assert list(report["groups"]) == sorted(GROUPS)
    for cell in report["cells"]:
        rates, speed = cell["tokens_per_ms"], cell["speed"]
        assert set(rates) == set(METHODS)
        assert speed["plain"] == 1
        assert rates["oracle"] >= max(rates.values())
        assert cell["general_over_single"] == rates["general"] / max(rates["ngram"], rates["strong"])
    text = capsys.readouterr().out
    assert markdown(report) in text
    assert all(f"| {slug} | {regime}" in text for slug, regime in found)


def test_pairs_that_do_not_fit_are_refused() -> None:
    first = pair(FIRST)
    check_alike([first], [pair(SECOND)])
    deeper = pair(SECOND, "decoding.depth=3")
    for groups in (([first, deeper], []), ([first], [deeper])):
        with pytest.raises(UserError, match=f"{SECOND} has decoding.depth 3 and smollm2-135m has 2"):
            check_alike(*groups)
    alone = pair(SECOND).model_copy(update={"drafters": pair(SECOND).drafters[:1]})
    with pytest.raises(UserError, match="number of drafters 1 and smollm2-135m has 2"):
        check_alike([first], [alone])
    with pytest.raises(UserError, match=f"The pair {FIRST} is named twice"):
        check_alike([first], [pair(FIRST)])
    with pytest.raises(UserError, match="cannot be the name of a report"):
        generalize.run("../elsewhere", [first])
    with pytest.raises(UserError, match="run `pipeline traces smollm2-135m` first"):
        generalize.run("some", [first])


def test_a_question_that_trains_one_pair_and_tests_another_is_refused(inputs: Inputs) -> None:
    check_prompts({FIRST: inputs}, {FIRST: inputs, SECOND: inputs})
    swapped = replace(inputs, validation=inputs.test, test=inputs.validation)
    with pytest.raises(UserError, match=rf"maths/1-0 is a training prompt of {FIRST} and a test prompt of {SECOND}"):
        check_prompts({FIRST: inputs}, {FIRST: inputs, SECOND: swapped})


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_share_of_the_gain() -> None:
    rates = {"ngram": 2.0, "strong": 1.0, "own": 3.0}
    for general, share in ((3.0, 1.0), (2.0, 0.0), (2.5, 0.5), (1.0, -1.0), (4.0, 2.0)):
        assert kept_share([rates | {"general": general}]) == pytest.approx(share)
    assert kept_share([rates | {"own": 2.0, "general": 2.0}]) is None
    assert kept_share([rates | {"own": 1.5, "general": 2.0}]) is None
    # Gains of several cells are added up: one without a gain takes nothing away.
    none = {"ngram": 2.0, "strong": 1.0, "own": 2.0, "general": 2.0}
    assert kept_share([rates | {"general": 2.5}, none]) == pytest.approx(0.5)


def test_the_strong_drafter_gets_its_best_depth(inputs: Inputs) -> None:
    plans: tuple[tuple[int, ...], ...] = ((1,), (1, 1))
    speeds = {plan: replay_fixed(inputs.validation, plan).tokens_per_ms for plan in plans}
    assert best_strong(inputs) == max(plans, key=lambda plan: speeds[plan])


def test_savings_that_are_linear_are_found(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule gives back a law that holds in every training cell, on a machine that was none of them."""
    law, by_length = np.array([0.2, -0.3, 0.1, 0.05]), -0.02
    lengths = np.array([30, 500, 90])

    def machines(*given: Regime) -> list[Inputs]:
        return [replace(inputs, train=recosted(inputs.train, regime_costs(costs(), one))) for one in given]

    def savings(_: Any, part: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        model = part.train.costs
        shares = law @ generalize.machine(model) + by_length * np.log(lengths)
        return lengths, shares * regimes.token_ms(model), np.array([7, 4, 9])

    monkeypatch.setattr(generalize, "savings", savings)
    grid = [Regime("", ratio, slope) for ratio in (0.1, 0.3, 0.6) for slope in (0.1, 1.0, 2.0)]
    rule = fit_saving_rule(network_of_size(inputs.train), machines(MEASURED, *grid))
    (new,) = machines(Regime("", 0.2, 0.5))
    model = scaled_costs(new.train.costs, 3.0)
    assert rule.admission(model, 7).saving.at(lengths) == pytest.approx(3 * savings(None, new)[1])
    assert rule.admission(model, 7).new_tokens == 7
