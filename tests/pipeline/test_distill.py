"""Stage distill: the student learns, the best is exported, a killed run ends as an undisturbed one does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest

from pipeline import distill
from pipeline.baselines import BASELINES, fit_baseline, grouped_folds
from pipeline.distill_inputs import read_inputs
from pipeline.files import write_json
from pipeline.headroom import best_layers
from pipeline.labelled import Admission, LabelledStates
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from pipeline.student import Student, fit_student
from pipeline.students import admission_of, follow, replayed_speed
from tests.treegraft.scheduling.test_network import random_network
from tests.treegraft.tiny import cost_model
from treegraft.api import learned_scheduler
from treegraft.costs import CostModel, LatencyCurve
from treegraft.errors import UserError
from treegraft.scheduling.admission import Saving
from treegraft.scheduling.checkpoint import load_scheduler
from treegraft.scheduling.features import feature_groups, feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.values.lattice import Outcomes
from treegraft.values.replay import best_fixed, fixed_actions, replay, replay_fixed
from treegraft.values.states import offset, schedules
from treegraft.values.tables import OutcomeTables, build_tables
from treegraft.values.traces import read_traces, trace_manifest, write_split
from treegraft.values.values import margins, visit_weights

FIT: dict[str, Any] = {
    "hidden": (16,),
    "learning_rate": 1e-2,
    "weight_decay": 1e-4,
    "epochs": 12,
    "batch_size": 256,
    "patience": 20,
}


CALIBRATION = {"ngram_table": [[0.5]], "temperatures": [1.0, 1.1]}


# --- a small world in which calling pays exactly where two features say so -------------------------------------------


def costs() -> CostModel:
    target = LatencyCurve([1, 2, 8], [64, 256], [[30, 31], [32, 33], [40, 42]])
    return cost_model(target, (None, LatencyCurve([1, 8], [64, 256], [[6, 6], [8, 8]])), 0.1)


def synthetic_tables(turns: int, length: int, seed: int, depth: int = 2) -> OutcomeTables:
    """Labelled tables: each call adds ``quality`` accepted tokens, and two features add up to the quality."""
    random = np.random.default_rng(seed)
    names, sizes, plans = feature_names(depth, 2), (0, 2, 4), schedules(depth, 2)
    prompts = []
    for turn in range(turns):
        features = random.normal(size=(length, offset(depth, 2), len(names))).astype(np.float32)
        shared = random.normal(size=(length, 2)).astype(np.float32)
        features[:, :, names.index("frontier_depth")] = shared[:, :1]
        features[:, :, names.index("reselected_score")] = shared[:, 1:]
        quality = shared.sum(axis=1) > 0.3
        calls = plans.sum(axis=1)
        wanted = np.minimum(random.integers(0, 2, (length, 1)) + 2 * quality[:, None] * calls, 4)  # [P, U]
        accepted = np.minimum(wanted[..., None], sizes).astype(np.int16)
        outcomes = Outcomes(
            features=features,
            accepted=accepted,
            mass=accepted * np.float32(0.9),
            nodes=np.full(wanted.shape, 4, np.int16),
            layer_tokens=np.broadcast_to(4 * plans, (length, *plans.shape)).astype(np.int16),
            path_processed=np.stack([np.zeros_like(wanted), np.broadcast_to(2 * (calls > 0), wanted.shape)], -1).astype(
                np.int16
            ),
            mean_accepted=np.zeros((*wanted.shape, 0), np.float32),
        )
        prompts.append((f"maths/{seed}-{turn // 2}/{turn % 2}", "maths", 40 + turn, outcomes))
    tables = build_tables(prompts, names, 2, depth, sizes, costs())
    actions = fixed_actions(tables, best_fixed(tables))
    result = replay(tables, actions)
    labels = margins(tables, actions, result.decode_rate, result.lag)
    return tables.labelled(labels, visit_weights(tables, actions, result.visited))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    """A pair whose traces are synthetic, in a working directory of its own."""
    shutil.copy("params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    made = load_pair(
        "smollm2-135m",
        [
            "decoding.depth=2",
            "decoding.verified_sizes=[0, 2, 4]",
            "distill={features: [text, tree], hidden: [8], learning_rate: 0.01, weight_decay: 0.0, epochs: 6, "
            "batch_size: 128, patience: 3, visit_exponent: 1.0, policy_iterations: 1, seeds: [0, 1]}",
        ],
    )
    write_traces(made, tables())
    return made


ANSWER = 30  # tokens
SPLITS = (("train", 8, 0), ("validation", 4, 1), ("test", 4, 2))


def tables() -> dict[str, OutcomeTables]:
    return {split: synthetic_tables(turns, ANSWER, seed) for split, turns, seed in SPLITS}


def write_traces(config: PairConfig, tables: dict[str, OutcomeTables]) -> None:
    """A traces folder as stage traces leaves it."""
    folder = config.paths.traces
    for split, table in tables.items():
        write_split(folder, split, table)
    manifest = trace_manifest(folder, tables, [drafter.name for drafter in config.drafters], 0.0, ANSWER)
    profile = {"cost_model": costs().to_json(), "tokenizer_hashes": {config.target.name: "abc"}}
    for name, value in (("profile", profile), ("calibration", CALIBRATION), ("manifest", manifest)):
        write_json(folder / f"{name}.json", value)


def outputs(config: PairConfig) -> dict[str, bytes]:
    files = [*config.paths.scheduler.iterdir(), config.paths.distill_metrics]
    return {path.name: path.read_bytes() for path in files}


# --- the student -----------------------------------------------------------------------------------------------------


def linear_rule(rows: int, seed: int, noise: float = 0.0) -> LabelledStates:
    """margin = 3 x feature 1 - 2 x feature 4 + 1, on features of very different sizes."""
    random = np.random.default_rng(seed)
    features = random.normal([5, 0, 100, 0, -3], [1, 0.1, 30, 2, 0.2], size=(rows, 5))
    rule = 3 * features[:, 1] / 0.1 - 2 * (features[:, 4] + 3) / 0.2 + 1
    return LabelledStates(
        features.astype(np.float32), (rule + random.normal(size=rows) * noise)[:, None], random.integers(0, 3, rows)
    )


def agreement(network: MarginNetwork, states: LabelledStates) -> float:
    return float(((network.margins(states.features) > 0) == (states.margins > 0)).mean())


def test_the_student_learns_a_linear_rule_from_noisy_labels() -> None:
    unseen = linear_rule(2000, seed=1)
    fitted = fit_student(
        linear_rule(4000, seed=0, noise=1.0), lambda network: agreement(network, unseen), seed=0, **FIT
    )
    assert fitted.score > 0.95
    assert agreement(fitted.network, unseen) == fitted.score == max(fitted.scores)
    np.testing.assert_allclose(fitted.network.margins(unseen.features), unseen.margins, atol=3)


def test_the_choice_follows_the_mean_margin_not_the_usual_sign() -> None:
    """Calling loses a little four times of five and wins much once: on average it pays, and so it is called."""
    random = np.random.default_rng(0)
    features = random.integers(0, 2, (4000, 1)).astype(np.float32)
    wins = random.random((4000, 1)) < 0.2
    labels = np.where(wins, np.where(features > 0, 4.0, 1.0), -0.6)  # means 0.32 and -0.28
    fitted = fit_student(LabelledStates(features, labels, np.ones(4000)), lambda network: 0.0, seed=0, **FIT)
    rising = iter(range(99))
    last = fit_student(LabelledStates(features, labels, np.ones(4000)), lambda _: next(rising), seed=0, **FIT).network
    assert fitted.epoch == 0  # nothing better came
    assert last.margins(np.array([1.0], np.float32)) > 0.1
    assert last.margins(np.array([0.0], np.float32)) < -0.1


def test_three_drafters() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(1500, 4)).astype(np.float32)
    labels = np.stack([features[:, 0], features[:, 1] * 2], axis=1)
    states = LabelledStates(features, labels, np.ones(1500))
    fitted = fit_student(states, lambda network: agreement(network, states), seed=0, **FIT)
    assert fitted.network.outputs == 2
    assert fitted.score > 0.95


def test_equal_seeds_give_equal_networks() -> None:
    states = linear_rule(500, seed=0)
    settings = FIT | {"epochs": 2}
    first, again, other = (fit_student(states, lambda _: 0.0, seed=seed, **settings).network for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.weights[0], again.weights[0])
    assert (first.weights[0] != other.weights[0]).any()


def test_the_best_epoch_is_kept_and_patience_ends_the_training() -> None:
    scores = iter([1.0, 3.0, 2.0, 3.0, 9.0])
    seen: list[MarginNetwork] = []

    def score(network: MarginNetwork) -> float:
        seen.append(network)
        return next(scores)

    fitted = fit_student(linear_rule(500, seed=0), score, seed=0, **(FIT | {"patience": 2}))
    assert (fitted.score, fitted.epoch, fitted.scores) == (3.0, 1, (1.0, 3.0, 2.0, 3.0))
    assert fitted.network is seen[1]


@pytest.mark.parametrize("name", ["features", "margins", "weights"])
def test_refuses_training_data_that_is_not_finite(name: str) -> None:
    states = linear_rule(20, seed=0)
    spoiled = np.array(getattr(states, name), dtype=np.float64)
    spoiled[7] = np.nan
    columns = 1 if spoiled.ndim == 1 else spoiled.shape[1]
    with pytest.raises(UserError, match=rf"{columns} of {20 * columns} training {name} are NaN or infinite, .* \[7"):
        replace(states, **{name: spoiled})


def test_refuses_weights_that_leave_nothing() -> None:
    with pytest.raises(UserError, match="weights"):
        replace(linear_rule(20, seed=0), weights=np.zeros(20))


def test_says_that_training_diverged() -> None:
    with pytest.raises(UserError, match=r"diverged in epoch \d+; lower distill\.learning_rate"):
        fit_student(linear_rule(500, seed=0), lambda _: 0.0, seed=0, **(FIT | {"learning_rate": 1e38}))


def test_a_feature_that_never_varies_does_no_harm() -> None:
    states = linear_rule(1000, seed=0)
    features = states.features.copy()
    features[:, 3] = 7.3
    fitted = fit_student(replace(states, features=features), lambda _: 0.0, seed=0, **(FIT | {"epochs": 1}))
    assert fitted.network.scales[3] == 1
    assert np.isfinite(fitted.network.margins(features)).all()


def test_a_lightning_checkpoint_of_the_student_reloads(tmp_path: Path) -> None:
    student = Student(5, 1, (4,))
    student.standardise(linear_rule(50, seed=0))
    trainer = lightning.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    trainer.strategy.connect(student)
    trainer.save_checkpoint(tmp_path / "student.ckpt", weights_only=True)
    again = Student.load_from_checkpoint(tmp_path / "student.ckpt")
    np.testing.assert_array_equal(again.to_network().weights[0], student.to_network().weights[0])
    np.testing.assert_array_equal(again.to_network().means, student.to_network().means)


# --- the baselines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_learn_the_rule(name: str) -> None:
    unseen = linear_rule(1000, seed=1)
    predict = fit_baseline(name, linear_rule(2000, seed=0))
    agreed = ((predict(unseen.features) > 0) == (unseen.margins > 0)).mean()
    assert predict(unseen.features).shape == (1000, 1)
    assert agreed > (0.85 if name == "decision_tree" else 0.95)


@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_the_logistic_baseline_takes_labels_of_one_sign(sign: int) -> None:
    states = LabelledStates(np.ones((5, 2), np.float32), np.full((5, 1), float(sign)), np.ones(5))
    assert ((fit_baseline("logistic", states)(states.features) > 0) == (sign > 0)).all()


def test_folds_never_split_a_prompt() -> None:
    groups = np.repeat(["a", "b", "c"], [4, 2, 3])
    folds = list(grouped_folds(groups, 5))
    assert len(folds) == 3
    for fitted, held_out in folds:
        assert not set(groups[fitted]) & set(groups[held_out])
    assert sorted(np.concatenate([held_out for _, held_out in folds])) == list(range(9))
    assert list(grouped_folds(np.array(["a", "a"]), 5)) == []


# --- the stage -------------------------------------------------------------------------------------------------------


def test_the_stage_exports_a_scheduler_that_beats_fixed_policies(config: PairConfig) -> None:
    distill.run(config)
    network, stored = load_scheduler(config.paths.scheduler)
    metrics = json.loads(config.paths.distill_metrics.read_text())
    rates = metrics["replay"]["test"]
    assert rates["student"] > max(rates[name] for name in ("plain", "ngram", "strong", "fixed"))
    assert rates["oracle"] >= max(rates.values())
    assert 0 < metrics["captured"]["test"]["student"] <= 1
    assert set(BASELINES) < set(rates)
    assert metrics["cross_validation"]["folds"] == 4  # four prompts of two turns each
    assert all(rate > 0 for rate in metrics["cross_validation"]["tokens_per_ms"].values())
    # What is exported is what was measured.
    tables = read_traces(config.paths.traces, "test")
    admission = Admission(stored.saving, ANSWER)
    followed = distill.follow(network, tables, admission)
    assert followed.tokens_per_ms == rates["student"] == stored.replay["test"]["student"]
    assert stored.saving == Saving(**{name: tuple(values) for name, values in metrics["saving"]["student"].items()})
    assert min(stored.saving.ms) > 0
    best = max(fit["validation"] for fit in metrics["fits"])
    validation = read_traces(config.paths.traces, "validation")
    assert distill.follow(network, validation).warm_tokens_per_ms == best
    assert stored.cost_model_digest == costs().digest()
    assert stored.calibration == CALIBRATION
    assert CostModel.from_json(stored.cost_model).digest() == stored.cost_model_digest
    assert not list(Path().glob("lightning_logs")) + list(Path().glob("checkpoints"))


@pytest.mark.parametrize(("call_ms", "layers"), [(0.5, 2), (40.0, 1)])
def test_the_strong_drafter_alone_drafts_in_as_many_layers_as_pay(call_ms: float, layers: int) -> None:
    curve = LatencyCurve([1, 8], [64, 256], [[call_ms, call_ms], [call_ms, call_ms]])
    priced = replace(costs(), drafters=(None, curve))
    assert best_layers(replace(synthetic_tables(4, ANSWER, 1), costs=priced), 1) == (1,) * layers


def test_validation_prompts_say_how_deep_the_strong_drafter_alone_drafts(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def best(tables: OutcomeTables, drafter: int) -> tuple[int, ...]:
        asked.append((tables.prompt_ids, drafter))
        return (1, 0)

    monkeypatch.setattr("pipeline.headroom.best_layers", best)
    monkeypatch.setattr("pipeline.baselines.BASELINES", ("linear",))
    distill.run(config)
    assert asked == [(read_traces(config.paths.traces, "validation").prompt_ids, 1)]
    for split, rates in json.loads(config.paths.distill_metrics.read_text())["replay"].items():
        assert rates["strong"] == replay_fixed(read_traces(config.paths.traces, split), (1, 0)).tokens_per_ms


def test_a_dearer_pass_over_the_prompt_changes_neither_scores_nor_savings(config: PairConfig) -> None:
    """It is paid once a request, whatever is decided in it; only admission weighs it."""
    inputs = replace(read_inputs(config), best_fixed=(0, 0))  # whose rate, under which scores are taken, has no pass
    features = len(inputs.train.feature_names)
    always = MarginNetwork([np.zeros((features, 1))], [np.ones(1)], np.zeros(features), np.ones(features))
    found = []
    for pass_ms in (1.0, 3.0):
        # Prompts have 40 tokens and more; a drafter that is called in every step lacks few.
        curve = LatencyCurve([1, 20, 39], [64], [[0.1], [0.2], [pass_ms]])
        dear = replace(costs(), drafter_prefill=(None, curve))
        parts = [replace(part, costs=dear) for part in (inputs.train, inputs.validation, inputs.test)]
        there = replace(inputs, train=parts[0], validation=parts[1], test=parts[2])
        passes = follow(always, there.train).pass_ms
        assert passes.min() > 0.9 * pass_ms - 0.2
        found.append((replayed_speed(there, None)(always), *admission_of(always, there).saving.ms))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("lengths", [[40, 60, 90, 400], [40]])
def test_savings_are_those_of_the_turns_in_the_mean_and_along_their_lengths(
    config: PairConfig, lengths: list[int]
) -> None:
    """Least squares: what the line misses, weighted by tokens, adds up to nothing, nor does it lean on the length."""
    inputs = read_inputs(config)
    train, validation = (
        replace(part, prompt_tokens=np.resize(lengths, len(part.prompt_ids)))
        for part in (inputs.train, synthetic_tables(3, 3 * ANSWER, 7))  # answers of two lengths
    )
    inputs = replace(inputs, train=train, validation=validation)
    features = len(inputs.train.feature_names)
    sometimes = random_network((features, 4, 1), 3)
    saving = admission_of(sometimes, inputs).saving
    assert saving.prompt_tokens == tuple(dict.fromkeys((min(lengths), max(lengths))))
    total = lean = size = 0.0
    for part in (inputs.train, inputs.validation):
        calling, never = follow(sometimes, part), replay_fixed(part, ())
        missed = (
            never.decode_ms - (calling.decode_ms - calling.pass_ms) - saving.at(part.prompt_tokens) * calling.tokens
        )
        total += missed.sum()
        lean += (missed * np.log(part.prompt_tokens)).sum()
        size += np.abs(missed).sum()
    assert size > 1.0  # turns differ, so there is something to miss
    assert abs(total) < 1e-6 * size
    assert abs(lean) < 1e-5 * size


def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", ("linear",))  # the others are not resumed, only slow
    distill.run(config)
    undisturbed = outputs(config)
    shutil.rmtree(config.paths.scheduler)
    shutil.rmtree(config.paths.scratch("distill"))
    real = distill.fit_one
    fits: list[Any] = []

    def killed(*arguments: Any) -> Any:
        if len(fits) == 2:
            raise KeyboardInterrupt
        fits.append(arguments)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(distill, "fit_one", killed)
        with pytest.raises(KeyboardInterrupt):
            distill.run(config)
    assert not config.paths.scheduler.exists()
    again: list[Any] = []

    def counted(*arguments: Any) -> Any:
        again.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(distill, "fit_one", counted)
    distill.run(config)
    assert len(again) == 2  # of four: no fit is lost, none is done twice
    assert outputs(config) == undisturbed


def test_another_scheduler_takes_the_onnx_file_with_it_and_says_so(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", ("linear",))
    config = config.model_copy(update={"distill": config.distill.model_copy(update={"epochs": 1})})
    distill.run(config)
    onnx = config.paths.scheduler / "model.onnx"
    onnx.write_bytes(b"of the first")
    capsys.readouterr()
    chosen = distill.choose
    distill.run(config)  # the same again
    assert onnx.exists()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(distill, "choose", lambda fits: next(fit for fit in fits if fit is not chosen(fits)))
    distill.run(config)
    assert not onnx.exists()
    assert "was of the earlier scheduler" in capsys.readouterr().out


def test_groups_of_features_that_are_left_out_are_in_neither_student_nor_checkpoint(config: PairConfig) -> None:
    some = config.model_copy(update={"distill": config.distill.model_copy(update={"features": ("tree",)})})
    distill.run(some)
    network, stored = load_scheduler(config.paths.scheduler)
    groups = feature_groups(2, 2)
    assert list(stored.feature_names) == groups["published"] + groups["tree"]
    tables = read_traces(config.paths.traces, "test")
    seen = tables.with_features(list(stored.feature_names))
    admission = Admission(stored.saving, ANSWER)
    assert distill.follow(network, seen, admission).tokens_per_ms == stored.replay["test"]["student"]
    # A decoder gives its scheduler all features, whatever the network takes.
    scheduler = learned_scheduler(network, stored)
    for state in range(3):
        full = tables.features[7, state]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("treegraft.scheduling.policy.features", lambda _, full=full: full)
            margins = scheduler.margins(None)  # type: ignore[arg-type]
        assert margins == pytest.approx(network.margins(seen.features[7, state]).tolist(), rel=1e-5)


def test_the_exponent_of_visits_weighs_rows(config: PairConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []

    def note(states: LabelledStates, *_: Any, **__: Any) -> None:
        seen.append(states.weights)

    monkeypatch.setattr("pipeline.student.fit_student", note)
    inputs = distill.read_inputs(config)
    for exponent in (1.0, 0.5, 0.0):
        changed = config.distill.model_copy(update={"visit_exponent": exponent})
        distill.fit_one(config.model_copy(update={"distill": changed}), inputs, 0, None)
    visits = inputs.train.visits.reshape(-1)
    np.testing.assert_array_equal(seen[0], visits)
    np.testing.assert_allclose(seen[1] ** 2, visits, rtol=1e-6)
    np.testing.assert_array_equal(seen[2], (visits > 0).astype(np.float32))


def test_fits_of_other_inputs_are_not_taken(config: PairConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", ("linear",))
    distill.run(config)
    old = {path.name for path in config.paths.scratch("distill").iterdir()}
    write_json(config.paths.traces / "calibration.json", CALIBRATION | {"temperatures": [1.0, 1.2]})
    distill.run(config)
    new = {path.name for path in config.paths.scratch("distill").iterdir()}
    assert len(new) == 1
    assert not new & old


def test_the_earliest_of_equal_fits_is_chosen() -> None:
    student = fit_student(linear_rule(50, seed=0), lambda _: 0.0, seed=0, **(FIT | {"epochs": 1}))
    rates = ((0, 0, 1.0), (0, 1, 2.0), (1, 0, 2.0), (2, 0, 2.0))
    fits = [distill.Fit(seed, round_, student, 0.0, rate) for seed, round_, rate in rates]
    assert distill.choose(fits) is fits[2]


@pytest.mark.parametrize(("name", "column"), [("features", "f_log_prompt_tokens"), ("margins", "margin_1")])
def test_refuses_traces_that_are_not_finite(config: PairConfig, name: str, column: str) -> None:
    spoiled = tables()
    getattr(spoiled["train"], name)[3, 1, 0] = np.nan
    write_traces(config, spoiled)
    sentence = rf"{column}: 1 row has a number that is NaN or infinite, the first is row 10 \(prompt maths/0-0/0\)"
    with pytest.raises(UserError, match=sentence):
        distill.run(config)
    assert not config.paths.scheduler.exists()


def test_refuses_traces_of_other_settings(config: PairConfig) -> None:
    decoding = config.decoding.model_copy(update={"verified_sizes": (0, 2)})
    with pytest.raises(
        UserError, match=r"train: .* other verified sizes \(\[0, 2, 4\], now \[0, 2\]\); run `pipeline traces"
    ):
        distill.run(config.model_copy(update={"decoding": decoding}))
    decoding = config.decoding.model_copy(update={"depth": 3})
    with pytest.raises(UserError, match=r"other depth \(2, now 3\)"):
        distill.run(config.model_copy(update={"decoding": decoding}))


def test_refuses_missing_parts(config: PairConfig) -> None:
    profile = config.paths.traces / "profile.json"
    write_json(profile, {"cost_model": costs().to_json()})
    with pytest.raises(UserError, match="has no tokenizer_hashes"):
        distill.run(config)
    (config.paths.traces / "calibration.json").unlink()
    with pytest.raises(UserError, match=r"calibration\.json is missing"):
        distill.run(config)
    shutil.rmtree(config.paths.traces)
    with pytest.raises(UserError, match="run `pipeline traces smollm2-135m` first"):
        distill.run(config)
