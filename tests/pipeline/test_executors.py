"""Whoever labels, however many they are and whoever is killed: the outcomes are the same bytes.

The expected bytes are those of one undisturbed process. Workers are processes of their own, forked from one that has
torch imported already.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.claims import Claims
from pipeline.cli import main
from pipeline.executors import _connect, read_rank
from pipeline.label import make_job
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from tests.pipeline.tiny_pair import SLUG, contents, make_pair
from treegraft.errors import UserError

REPO = Path(__file__).resolve().parents[2]
OUTCOMES = Path("data/outcomes") / SLUG
SCRATCH = Path(".treegraft") / SLUG / "label"
TORCHRUN = ["--set", "label.executor=torchrun"]
DEADLINE = 600  # seconds; for machines that have much else to do


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fetched pair; ``expected`` in it holds the outcomes of one undisturbed process."""
    root = make_pair(tmp_path_factory.mktemp("pair"))
    before = Path.cwd()
    os.chdir(root)
    try:
        for stage in ("fetch", "draft", "label"):
            assert main([stage, SLUG]) == 0
        OUTCOMES.rename("expected")
    finally:
        os.chdir(before)
    return root


@pytest.mark.parametrize("module", ["label.py", "label_work.py", "lattice.py"])
def test_work_of_other_code_is_not_continued(root: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.chdir(root)
    before, read = make_job(load_pair(SLUG)).scratch, Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == module))
    assert make_job(load_pair(SLUG)).scratch != before


@pytest.fixture
def expected(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The bytes to come out; the test runs in the pair's folder, which holds no half-done work and no outcomes."""
    monkeypatch.chdir(root)
    for folder in (OUTCOMES, SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)
    yield contents(root / "expected")
    for worker in multiprocessing.active_children():
        worker.kill()  # a failed test may leave one stopped, for which the end of this process would wait


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["transformers.models.llama.modeling_llama", "treegraft.api", "treegraft.values.lattice"])


def run_worker(root: Path, variables: dict[str, str], arguments: list[str], errors: Path) -> None:
    """The body of a worker's process."""
    os.chdir(root)
    os.environ.update(variables)
    with errors.open("w", buffering=1) as sys.stderr:
        code = main(["label", SLUG, *arguments])
    sys.exit(code)


class Worker:
    """A process that labels in the working directory."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.errors = Path(f"errors-{uuid.uuid4().hex}").absolute()
        self.process = FORKS.Process(target=run_worker, args=(Path.cwd(), variables, list(arguments), self.errors))
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def kill(self) -> None:
        """kill -9 at work, and wait until it is gone."""
        self.end()
        assert self.process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        """kill -9 unless it has come to its end by itself, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(DEADLINE)
        assert self.process.exitcode in (0, -signal.SIGKILL), self.errors.read_text()

    def finish(self) -> None:
        self.process.join(DEADLINE)
        assert self.process.exitcode == 0, self.errors.read_text()


def start_worker(rank: int, world: int) -> Worker:
    return Worker(*TORCHRUN, RANK=str(rank), WORLD_SIZE=str(world))


def stop_at(worker: Worker, kind: str) -> None:
    """Return when ``worker`` stands still and holds a claim whose name begins with ``kind``.

    Stopped, so that however fast the machine is, the others come to work while it holds its claim.
    """
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if holds(worker.pid, kind):
            os.kill(worker.pid, signal.SIGSTOP)
            if holds(worker.pid, kind):
                return
            os.kill(worker.pid, signal.SIGCONT)  # released between the look and the signal
        time.sleep(0.001)
    pytest.fail(f"{worker.pid} never held {kind}")


def holds(pid: int, kind: str) -> bool:
    """Whether the process ``pid`` holds a claim whose name begins with ``kind``."""
    for path in SCRATCH.glob(f"*/claims/{kind}*"):
        with contextlib.suppress(OSError, ValueError):  # released, or being written
            if json.loads(path.read_text())["pid"] == pid:
                return True
    return False


def results() -> int:
    return len([path for path in SCRATCH.rglob("*") if path.suffix in (".json", ".npz")])


@pytest.mark.parametrize("world", [1, 3])
def test_workers_together_do_what_one_does(expected: dict[str, bytes], world: int) -> None:
    workers = [start_worker(rank, world) for rank in reversed(range(world))]
    for worker in workers:
        worker.finish()
    assert contents(OUTCOMES) == expected
    assert not [path for path in SCRATCH.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["answers-", "schedules-"])
def test_a_worker_killed_at_work_is_made_up_for(expected: dict[str, bytes], kind: str) -> None:
    leader = start_worker(0, 2)
    stop_at(leader, kind)
    other = start_worker(1, 2)
    stop_at(other, kind)
    other.kill()
    assert not OUTCOMES.exists()
    os.kill(leader.pid, signal.SIGCONT)
    leader.finish()
    assert contents(OUTCOMES) == expected


def test_without_its_leader_a_worker_ends_the_work_and_the_next_run_publishes_it(expected: dict[str, bytes]) -> None:
    leader = start_worker(0, 2)
    stop_at(leader, "answers-")
    other = start_worker(1, 2)
    stop_at(other, "answers-")
    leader.kill()
    os.kill(other.pid, signal.SIGCONT)
    other.finish()
    assert not OUTCOMES.exists()
    before = {path: path.stat().st_mtime_ns for path in SCRATCH.rglob("*.npz")}
    assert len(before) == len([name for name in expected if name.endswith(".npz")])
    job = make_job(load_pair(SLUG))
    job.begin()
    job.work(Claims(job.scratch / "claims"), "cpu", shown=False)
    assert {path: path.stat().st_mtime_ns for path in SCRATCH.rglob("*.npz")} == before, "nothing was done again"
    assert main(["label", SLUG]) == 0
    assert contents(OUTCOMES) == expected


def test_kills_at_random_moments_change_nothing(expected: dict[str, bytes]) -> None:
    """Five times two workers, both killed when so many results are there."""
    whole = 2 * len([name for name in expected if name.endswith(".npz")]) + 2
    for after in sorted(random.Random(0).sample(range(1, whole), 5)):
        workers = [start_worker(rank, 2) for rank in range(2)]
        deadline = time.monotonic() + DEADLINE
        while results() < after and time.monotonic() < deadline:
            time.sleep(0.002)
        for worker in workers:
            worker.end()  # a worker that finds nothing left to do ends early
        assert OUTCOMES.exists() == (workers[0].process.exitcode == 0)
    assert main(["label", SLUG]) == 0
    assert contents(OUTCOMES) == expected


def test_outcomes_that_are_there_already_are_not_made_again(
    expected: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SCRATCH.with_name("labelled.json")

    def stands() -> bool:
        """Whether a job finds nothing to do."""
        return make_job(load_pair(SLUG)).is_published()

    assert not stands(), "there are no outcomes"
    job = make_job(load_pair(SLUG))
    job.begin()
    job.work(Claims(job.scratch / "claims"), "cpu", shown=False)
    job.publish()
    assert not stands(), "the leader may wait for a worker, who must not turn back"
    assert main(["label", SLUG]) == 0
    capsys.readouterr()
    for arguments in ([], TORCHRUN, ["--set", "label.executor=ray"]):  # whoever would do the work
        monkeypatch.setattr("pipeline.label.execute", lambda job: pytest.fail("the work is done again"))
        assert main(["label", SLUG, *arguments]) == 0
        assert f"{OUTCOMES} holds the outcomes of this work already" in capsys.readouterr().err
    assert contents(OUTCOMES) == expected
    assert main(["label", SLUG, "--plan"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["cost:", "nothing"]
    assert not make_job(load_pair(SLUG, ["label.max_new_tokens=11"])).is_published()
    assert not make_job(load_pair(SLUG, ["decoding.width=2"])).is_published()
    whole = record.read_text()
    record.write_text(whole.replace('"cpu"', '"cuda"', 1))
    assert not stands(), "another machine made them"
    record.write_text(whole)
    assert stands()
    manifest = OUTCOMES / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    assert not stands(), "they are others by now"


def test_half_done_work_of_another_machine_is_not_continued(
    expected: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(load_pair(SLUG))
    job.begin()
    (job.scratch / "machine.json").write_text('{"device": "cpu", "name": "another processor"}')
    assert main(["label", SLUG]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "another processor" in message
    assert "remove that folder" in message
    assert not OUTCOMES.exists()


@pytest.mark.parametrize(
    ("rank", "world", "sentence"),
    [
        (None, "2", "RANK is not set: start the workers with torchrun"),
        ("0", None, "WORLD_SIZE is not set"),
        ("2", "2", "RANK is 2, but WORLD_SIZE is 2"),
        ("0", "0", "RANK is 0, but WORLD_SIZE is 0"),
        ("-1", "2", 'RANK must be a whole number of at least 0, not "-1"'),
        ("0", "two", 'WORLD_SIZE must be a whole number of at least 0, not "two"'),
    ],
)
def test_ranks_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world: str | None, sentence: str
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_rank()


def test_torchrun_without_its_variables_is_one_sentence(
    expected: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["label", SLUG, *TORCHRUN]) == 2
    assert capsys.readouterr().err.startswith("pipeline: label.executor is torchrun, but RANK is not set")
    assert not SCRATCH.exists()


def test_ray_without_the_package_is_one_sentence(
    expected: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["label", SLUG, "--set", "label.executor=ray"]) == 2
    assert "pip install 'treegraft[ray]'" in capsys.readouterr().err
    assert not SCRATCH.exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:port"])
def test_a_ray_cluster_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"RAY_ADDRESS {address} cannot be reached"):
        _connect(None, 1)


def test_ray_with_an_actor_killed_at_work_does_what_one_process_does(expected: dict[str, bytes]) -> None:
    pytest.importorskip("ray")
    driver = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "label", SLUG, "--set", "label.executor=ray", "--set", "label.workers=2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + DEADLINE
    victim = None
    while victim is None and driver.poll() is None and time.monotonic() < deadline:
        for path in SCRATCH.glob("*/claims/schedules-*"):
            try:
                victim = int(json.loads(path.read_text())["pid"])
            except (OSError, ValueError):  # released, or being written
                continue
        time.sleep(0.001)
    assert victim is not None, driver.communicate()
    assert victim != driver.pid
    os.kill(victim, signal.SIGKILL)
    _, errors = driver.communicate(timeout=DEADLINE)
    assert driver.returncode == 0, errors
    assert "a Ray actor has died; 1 left" in errors
    assert contents(OUTCOMES) == expected


def test_the_plan_says_what_is_left_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is fetched; of each kind, in file order, 3 of 4 train, 1 validates and 2 of 4 test."""
    make_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert main(["label", SLUG, "--plan"]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    prompts = [json.loads(line) for path in Path("data/prompts").iterdir() for line in path.read_text().splitlines()]
    chosen = [prompt for prompt in prompts if prompt["question_id"] in (0, 1, 2, 3, 4, 5)]
    turns = sum(len(prompt["turns"]) for prompt in chosen)
    assert lines["prompts"].split() == [f"{len(chosen)},", "with", f"{turns}", "turns"]
    assert f"at most {turns * 12} of" in lines["new tokens"]
    assert lines["schedules"].split()[0] == "8"
    assert lines["claims"].split()[0] == str(2 * len(chosen) + 1)
    assert "0 turns answered, 0 evaluated" in lines["done before"]
    assert lines["cost"].split()[:3] == ["unknown:", f"data/profiles/{SLUG}.json", "is"]
    assert contents(tmp_path) == before
    assert not Path(".treegraft").exists()


def test_the_plan_counts_what_an_earlier_run_has_done(
    expected: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.label_plan import drafters_ms, left_of, target_ms
    from tests.treegraft.tiny import cost_model
    from treegraft.costs import LatencyCurve

    def cost(config: PairConfig) -> tuple[float, float]:
        turns = left_of(make_job(config))
        return target_ms(config, costs, turns), drafters_ms(config, costs, turns)

    config = load_pair(SLUG)
    curve = LatencyCurve([1, 2], [16], [[1.0], [2.0]])
    costs = cost_model(curve, (None, curve))
    whole = cost(config)
    sampled = cost(load_pair(SLUG, ["label.temperature=0.7"]))
    assert sampled[0] > whole[0], "the target also looks at all paths"
    assert sampled[1] == whole[1]
    worker = Worker()
    stop_at(worker, "schedules-")
    worker.kill()
    capsys.readouterr()
    before = results()
    assert main(["label", SLUG, "--plan"]) == 0
    turns = len([name for name in expected if name.endswith(".npz")])
    assert f"{turns} turns answered" in capsys.readouterr().out
    assert results() == before
    half = cost(config)
    assert half[0] == 0 < whole[0]
    assert 0 < half[1] <= whole[1]
