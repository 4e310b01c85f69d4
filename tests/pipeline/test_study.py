"""Exactly as many trials are finished as were asked for, whoever works at a study and whoever is killed."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import BaseTrial, Trial, TrialState

from pipeline.study import SharedStudy

ROOT = Path(__file__).parents[2]
FIRST = {"x": 0.25}

# Every third trial is pruned; each takes long enough to be killed in.
WORKER = """
import sys, time
import optuna
from pathlib import Path
from tests.pipeline.test_study import FIRST, opened

def objective(trial, settings):
    time.sleep(0.03)
    if trial.number % 3 == 1:
        raise optuna.TrialPruned
    return settings["x"]

opened(Path(sys.argv[1])).work(int(sys.argv[2]), FIRST, objective)
"""


def suggest(trial: BaseTrial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def parameters_of(settings: dict[str, Any]) -> dict[str, Any] | None:
    return settings if settings["x"] <= 1 else None


def opened(folder: Path) -> SharedStudy:
    return SharedStudy(folder, 0, suggest, parameters_of)


def start(folder: Path, wanted: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", WORKER, str(folder), str(wanted)]
    return subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)


def count(folder: Path) -> Counter[str]:
    return Counter(trial.state.name for trial in opened(folder).trials())


def await_trials(folder: Path, state: TrialState, number: int) -> None:
    study, deadline = opened(folder), time.monotonic() + 60
    while len(study.trials(state)) < number and time.monotonic() < deadline:
        time.sleep(0.01)


def test_two_processes_finish_exactly_what_was_asked_for(tmp_path: Path) -> None:
    workers = [start(tmp_path, 9) for _ in range(2)]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    found = count(tmp_path)
    assert found["COMPLETE"] == 9
    assert found["PRUNED"] >= 3  # pruned ones came on top
    assert set(found) == {"COMPLETE", "PRUNED"}
    owners = {trial.user_attrs["worker"] for trial in opened(tmp_path).trials()}
    assert len(owners) == 2, "both took part"
    assert list((tmp_path / "workers").iterdir()) == []


def test_killed_workers_change_nothing_in_the_count(tmp_path: Path) -> None:
    chance = random.Random(0)
    await_kill = 0
    for _ in range(2):
        workers = [start(tmp_path, 20) for _ in range(2)]
        await_kill += 4
        await_trials(tmp_path, TrialState.COMPLETE, await_kill)
        time.sleep(chance.random() * 0.06)
        for worker in workers:
            worker.kill()
            worker.wait()
    before = count(tmp_path)
    assert 8 <= before["COMPLETE"] < 20
    workers = [start(tmp_path, 20) for _ in range(2)]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    after = count(tmp_path)
    assert after["COMPLETE"] == 20
    assert after["RUNNING"] == after["WAITING"] == 0
    assert after["FAIL"] >= before["RUNNING"]


def test_a_dead_workers_trial_is_failed_and_a_living_ones_is_waited_for(tmp_path: Path) -> None:
    study = opened(tmp_path)
    dead = study.study.ask()
    dead.set_user_attr("worker", "nobody.lock")
    unsigned = study.study.ask()  # killed before it could note its worker
    study.work(1, FIRST, lambda trial, settings: 1.0)
    states = [trial.state for trial in study.trials()]
    assert (states[dead.number], states[unsigned.number]) == (TrialState.FAIL, TrialState.FAIL)
    assert states.count(TrialState.COMPLETE) == 1
    with pytest.raises(ValueError, match="FAIL"):
        study.study.tell(dead, 1.0)

    seen: list[str] = []

    def objective(trial: Trial, settings: dict[str, Any]) -> float:
        """While this trial runs there is no room for another."""
        other = opened(tmp_path)
        seen.append(type(other._take(2, FIRST, "other.lock")).__name__)
        return 2.0

    study.work(2, FIRST, objective)
    assert seen == ["_Wait"]
    assert count(tmp_path)["COMPLETE"] == 2


@pytest.mark.parametrize(("first", "has_parameters"), [({"x": 0.25}, True), ({"x": 7.0}, False)])
def test_the_first_settings_are_tried_first_and_once(
    tmp_path: Path, first: dict[str, Any], has_parameters: bool
) -> None:
    study = opened(tmp_path)
    study.work(3, first, lambda trial, settings: settings["x"])
    study.work(5, first, lambda trial, settings: settings["x"])
    trials = study.trials()
    assert [trial.user_attrs["settings"] == first for trial in trials] == [True, False, False, False, False]
    assert bool(trials[0].params) is has_parameters
    assert len({trial.value for trial in trials}) == 5, "no draw is repeated by the second run"


def test_first_settings_whose_worker_died_are_tried_again(tmp_path: Path) -> None:
    study = opened(tmp_path)
    with pytest.raises(RuntimeError, match="died"):
        study.work(2, FIRST, _dies)
    study.work(2, FIRST, lambda trial, settings: settings["x"])
    assert [trial.state.name for trial in study.trials()] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert study.trials()[1].user_attrs["settings"] == FIRST


def _dies(trial: Trial, settings: dict[str, Any]) -> float:
    raise RuntimeError("died")


def test_a_torn_line_of_the_journal_does_no_harm(tmp_path: Path) -> None:
    opened(tmp_path).work(1, FIRST, lambda trial, settings: 1.0)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    opened(tmp_path).work(3, FIRST, lambda trial, settings: 1.0)
    assert count(tmp_path) == {"COMPLETE": 3}


def test_fewer_than_there_are_is_no_work(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.work(2, FIRST, lambda trial, settings: 1.0)
    study.work(1, FIRST, lambda trial, settings: pytest.fail("a trial was begun"))
    assert count(tmp_path) == {"COMPLETE": 2}


def test_what_falls_behind_is_pruned(tmp_path: Path) -> None:
    study = opened(tmp_path)

    def objective(trial: Trial, settings: dict[str, Any]) -> float:
        for epoch in range(4):
            trial.report(0.0 if trial.number == 6 else settings["x"] + 1, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return settings["x"]

    study.work(8, FIRST, objective)
    assert study.trials()[6].state == TrialState.PRUNED
    assert study.trials()[6].last_step == 2
    assert count(tmp_path)["COMPLETE"] == 8
