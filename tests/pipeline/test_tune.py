"""The search as a command: what it counts, what it compares, what it writes."""

import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from optuna.trial import FixedTrial

from pipeline import search_space, tune
from pipeline.cli import main
from pipeline.params import DistillParams, PairConfig
from pipeline.params_edit import write_distill
from pipeline.params_file import load_pair
from pipeline.search_space import KEYS, LABELS, parameters_of, settings_of, suggest, with_settings
from pipeline.study import SharedStudy
from tests.pipeline.test_distill import tables, write_traces
from treegraft.errors import UserError
from treegraft.scheduling.features import feature_groups

ROOT = Path(__file__).parents[2]
PAIR = "smollm2-135m"
SHIPPED = (ROOT / "params.yaml").read_text(encoding="utf-8")
TINY = """\
  smollm2-135m:
    decoding: {depth: 2, verified_sizes: [0, 2, 4]}
    distill:          # everything small
      hidden: [8]     # one layer
      epochs: 3
      batch_size: 256
      seeds: [0]
      policy_iterations: 1
"""


TABLES = functools.cache(tables)  # making them takes longer than most tests here


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    """A pair with synthetic traces, whose settings stand in params.yaml itself."""
    (tmp_path / "params.yaml").write_text(SHIPPED.replace(f"  {PAIR}:\n", TINY, 1), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = load_pair(PAIR)
    write_traces(made, TABLES())
    return made


def found(config: PairConfig) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(config.paths.tune_report.read_text())
    return report


def by_width(config: PairConfig, inputs: Any, trial: Any) -> float:
    """A speed that is known beforehand."""
    return float(config.distill.hidden[0])


# --- the search space ------------------------------------------------------------------------------------------------


def test_the_search_speaks_of_keys_and_groups_that_exist() -> None:
    assert set(KEYS) < set(DistillParams.model_fields)
    groups = get_args(get_args(DistillParams.model_fields["features"].annotation)[0])
    assert list(feature_groups(3, 2)) == ["published", *groups] == ["published", *search_space.GROUPS]
    present = settings_of(load_pair(PAIR, (), ROOT / "params.yaml"))
    assert set(parameters_of(present) or {}) == set(LABELS)


def test_settings_and_parameters_are_each_others_inverse() -> None:
    settings = {
        "features": ["tree"],
        "hidden": [37, 18, 9],
        "learning_rate": 0.00123,
        "weight_decay": 0.05,
        "visit_exponent": 0.37,
        "policy_iterations": 3,
    }
    parameters = parameters_of(settings)
    assert parameters is not None
    assert suggest(FixedTrial(parameters)) == settings
    for key, value in (
        ("hidden", [37, 36]),
        ("hidden", []),
        ("hidden", [1024]),
        ("weight_decay", 0.0),
        ("learning_rate", 0.00123456),
    ):
        assert parameters_of(settings | {key: value}) is None


def test_a_trial_trains_with_its_settings(config: PairConfig) -> None:
    settings = settings_of(config) | {"hidden": [5, 2], "features": ["text"]}
    changed = with_settings(config, settings)
    assert settings_of(changed) == settings
    assert changed.distill.epochs == config.distill.epochs
    with pytest.raises(ValueError, match="features"):
        with_settings(config, settings | {"features": ["moon"]})


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_present_settings_come_first_and_the_search_goes_on_later(config: PairConfig) -> None:
    before = Path("params.yaml").read_bytes()
    assert main(["tune", PAIR, "--trials", "2"]) == 0
    report = found(config)
    assert report["trials"][0]["settings"] == settings_of(config)
    assert report["count"]["complete"] == 2
    assert report["importance"] is None
    values = [trial["value"] for trial in report["trials"]]
    assert report["best"]["value"] == max(values) > 0
    assert (Path("params.yaml").read_bytes() != before) == (values[1] > values[0])
    # The value of the present settings is what distill itself finds with them.
    assert main(["distill", PAIR, "--set", f"distill={json.dumps(config.distill.model_dump(mode='json'))}"]) == 0
    distilled = json.loads(config.paths.distill_metrics.read_text())
    assert values[0] == max(fit["validation"] for fit in distilled["fits"])
    assert main(["tune", PAIR, "--trials", "3"]) == 0
    assert found(config)["trials"][:2] == report["trials"]
    assert found(config)["count"]["complete"] == 3


def test_the_best_settings_land_in_params_with_all_comments(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "speed", by_width)
    before = Path("params.yaml").read_text()
    assert main(["tune", PAIR, "--trials", "21"]) == 0
    report = found(config)
    best = report["best"]["settings"]
    assert best["hidden"][0] > 8
    after = load_pair(PAIR)
    assert settings_of(after) == best
    assert with_settings(after, settings_of(config)) == config, "nothing else has changed"
    text = Path("params.yaml").read_text()
    start, end = text.index("  smollm2-135m:\n"), text.index("  qwen2.5-coder-1.5b:")
    assert text[:start] == before[: before.index("  smollm2-135m:\n")]
    assert text[end:] == before[before.index("  qwen2.5-coder-1.5b:") :]
    assert all(comment in text[start:end] for comment in ("# everything small", "# one layer"))
    said = capsys.readouterr().out
    assert f"hidden [8] -> {best['hidden']}" in said
    assert f"`dvc repro` or `pipeline distill {PAIR}`" in said
    # What the value follows is what matters most.
    assert max(report["importance"], key=report["importance"].__getitem__) == "width"
    assert sum(report["importance"].values()) == pytest.approx(1)
    assert "<svg" in config.paths.tune_report.with_suffix(".html").read_text()
    # Now the best are the present ones: the same command finds nothing to do or to change.
    assert main(["tune", PAIR, "--trials", "21"]) == 0
    assert "no trial was faster than the present settings" in capsys.readouterr().out
    assert Path("params.yaml").read_text() == text
    assert found(config)["trials"] == report["trials"]


def test_worse_settings_change_nothing(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present, before = settings_of(config), Path("params.yaml").read_bytes()
    monkeypatch.setattr(tune, "speed", lambda config, *_: 2.0 if settings_of(config) == present else 1.0)
    assert main(["tune", PAIR, "--trials", "3"]) == 0
    assert "no trial was faster than the present settings" in capsys.readouterr().out
    assert Path("params.yaml").read_bytes() == before


def test_present_settings_that_came_later_are_not_taken_for_worse(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "speed", by_width)
    override = ["--set", "distill.hidden=[9]"]
    assert main(["tune", PAIR, "--trials", "1"]) == 0
    before = Path("params.yaml").read_bytes()
    assert main(["tune", PAIR, "--trials", "1", *override]) == 0
    assert f"`pipeline tune {PAIR} --trials 2`" in capsys.readouterr().out
    assert Path("params.yaml").read_bytes() == before
    assert main(["tune", PAIR, "--trials", "2", *override]) == 0
    assert found(config)["trials"][1]["settings"]["hidden"] == [9]


def test_settings_that_diverge_are_pruned(config: PairConfig) -> None:
    """Present settings that do not train are replaced by any that do."""
    assert main(["tune", PAIR, "--trials", "1", "--set", "distill.learning_rate=1.0e+38"]) == 0
    trials = found(config)["trials"]
    assert [trial["state"] for trial in trials] == ["pruned", "complete"]
    assert trials[0]["settings"]["learning_rate"] == 1e38
    assert load_pair(PAIR).distill.learning_rate == trials[1]["settings"]["learning_rate"]


def test_a_slow_start_is_given_up_by_the_score_of_an_epoch(config: PairConfig) -> None:
    import optuna

    study = tune.open_study(config)
    inputs = tune.read_inputs(config)
    for _ in range(5):
        rival = study.study.ask()
        for epoch in range(3):
            rival.report(1e9, epoch)
        study.study.tell(rival, 1e9)
    trial = study.study.ask()
    with pytest.raises(optuna.TrialPruned):
        tune.speed(config, inputs, trial)
    assert len(study.trials()[5].intermediate_values) == 3
    assert tune.speed(config, inputs, None) > 0, "no trial, no pruning"


def test_other_traces_make_another_study(config: PairConfig) -> None:
    folder = tune.open_study(config).folder
    assert tune.open_study(with_settings(config, settings_of(config) | {"hidden": [9]})).folder == folder
    epochs = config.model_copy(update={"distill": config.distill.model_copy(update={"epochs": 4})})
    assert tune.open_study(epochs).folder != folder
    write_traces(config, {**TABLES(), "test": TABLES()["validation"]})
    assert tune.open_study(config).folder != folder


# Trials that last until the file `go` is there.
PATIENT = """
import sys, time
from pathlib import Path
from pipeline import cli, tune

def speed(config, inputs, trial):
    while not Path("go").exists():
        time.sleep(0.02)
    return float(config.distill.hidden[0])

tune.speed = speed
sys.exit(cli.main(sys.argv[1:]))
"""
# A command that leaves all trials to its helpers.
IDLE = """
import sys, time
from pipeline import cli, tune

tune.search = lambda *_: time.sleep(600)
sys.exit(cli.main(sys.argv[1:]))
"""


def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, "tune", PAIR, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def states(study: SharedStudy) -> Counter[str]:
    return Counter(trial.state.name for trial in study.trials())


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert happened()


def test_kill_9_and_two_processes_end_with_exactly_the_trials_asked_for(config: PairConfig) -> None:
    """Two commands at one study; one is killed in the middle of a trial, a third goes on with the other."""
    study = tune.open_study(config)
    killed, other = start(PATIENT, "--trials", "3"), start(PATIENT, "--trials", "3")
    until(lambda: states(study)["RUNNING"] == 2)
    killed.kill()
    killed.wait()
    Path("go").touch()
    third = start(PATIENT, "--trials", "3")
    assert (other.wait(240), third.wait(240)) == (0, 0)
    assert states(study) == {"COMPLETE": 3, "FAIL": 1}
    report = found(config)
    assert report["count"] == {"complete": 3, "fail": 1}
    assert report["best"]["value"] == report["best"]["settings"]["hidden"][0]
    assert [row["settings"] for row in report["trials"] if row["state"] == "complete"].count(settings_of(config)) == 1
    assert settings_of(load_pair(PAIR)) == report["best"]["settings"]


def test_a_helper_takes_part_and_ends_with_its_command(config: PairConfig) -> None:
    study = tune.open_study(config)
    command = start(IDLE, "--trials", "1000", "--workers", "2")
    until(lambda: states(study)["COMPLETE"] >= 1)
    command.kill()
    command.wait()
    until(lambda: not any((study.folder / "workers").iterdir()))  # it has gone in order
    assert states(study)["RUNNING"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tune", PAIR, "--trials", "0"], "'tune.trials' must be greater than or equal to 1, not 0"),
        (["tune", PAIR, "--workers", "0"], "'tune.workers' must be greater than or equal to 1, not 0"),
        (["tune", "smollm-135m"], "did you mean 'smollm2-135m'?"),
        (["tune", PAIR, "--set", "distill.feature=[]"], "did you mean 'features'?"),
        (["tune", PAIR, "--set", "decoding.depth=3"], "other depth (2, now 3)"),
    ],
)
def test_bad_input_is_one_sentence(
    config: PairConfig, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1


def test_a_pair_without_traces_is_one_sentence(config: PairConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "qwen2.5-coder-1.5b"]) == 2
    assert "run `pipeline traces qwen2.5-coder-1.5b` first" in capsys.readouterr().err


# --- params.yaml -----------------------------------------------------------------------------------------------------

CHANGE = {"hidden": [32, 16], "features": [], "learning_rate": 0.0001, "visit_exponent": 0.0}


@pytest.mark.parametrize("slug", yaml.safe_load(SHIPPED)["pairs"])
def test_every_shipped_pair_can_be_written(slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(SHIPPED, encoding="utf-8")
    others = {other: load_pair(other) for other in yaml.safe_load(SHIPPED)["pairs"] if other != slug}
    write_distill(slug, CHANGE)
    distill = load_pair(slug).distill.model_dump(mode="json")
    assert CHANGE.items() <= distill.items()
    assert others == {other: load_pair(other) for other in others}
    old, new = SHIPPED.splitlines(), Path("params.yaml").read_text().splitlines()
    added = ["    distill:", "      hidden: [32, 16]", "      features: []"]
    added += ["      learning_rate: 0.0001", "      visit_exponent: 0.0"]
    at = new.index("    distill:")
    assert new[at : at + 5] == added
    assert new[:at] + new[at + 5 :] == old, "not one other line has changed"
    assert write_distill(slug, CHANGE) == []


def test_a_section_shared_with_another_pair_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("  smollm2-135m:\n", "  qwen2.5-coder-1.5b:\n")
    text = SHIPPED.replace(names[0], names[0] + "    distill: &mine {epochs: 7}\n", 1)
    text = text.replace(names[1], names[1] + "    distill: *mine\n", 1)
    for slug, other in ((PAIR, "qwen2.5-coder-1.5b"), ("qwen2.5-coder-1.5b", PAIR)):
        Path("params.yaml").write_text(text, encoding="utf-8")
        changes = write_distill(slug, {"learning_rate": 0.002})
        assert changes == ["learning_rate 0.001 -> 0.002"]
        assert load_pair(slug).distill.learning_rate == 0.002
        assert load_pair(other).distill.learning_rate == 0.001
        assert load_pair(slug).distill.epochs == load_pair(other).distill.epochs == 7


def test_a_file_that_is_no_yaml_is_refused_before_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("run: [\n")
    with pytest.raises(UserError, match="not valid YAML"):
        write_distill(PAIR, CHANGE)
    assert Path("params.yaml").read_text() == "run: [\n"
