import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pipeline import cli
from pipeline.params import PairConfig
from pipeline.stages import STAGES
from treegraft.errors import UserError

ROOT = Path(__file__).parents[2]
PAIR = "smollm2-135m"

Install = Callable[[str, Callable[[PairConfig], None]], None]


@pytest.fixture(autouse=True)
def _in_a_folder_with_params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a function in the place of a stage."""

    def put(stage: str, function: Callable[[PairConfig], None]) -> None:
        module = ModuleType(f"pipeline.{stage}")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"pipeline.{stage}", module)

    return put


def test_help_lists_every_stage_and_says_what_it_reads_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*STAGES, "all"])
    for stage in STAGES.values():
        with pytest.raises(SystemExit):
            cli.main([stage.name, "--help"])
        text = capsys.readouterr().out
        assert all(path in text for path in (*stage.reads, *stage.writes))


def test_help_and_mistakes_import_nothing_heavy() -> None:
    """Not the time is tested, which varies, but its cause."""
    heavy = {
        "torch",
        "transformers",
        "lightning",
        "sklearn",
        "datasets",
        "optuna",
        "pyarrow",
        "jinja2",
        "numpy",
        "onnx",
    }
    program = (
        "import sys\n"
        "from pipeline.cli import main\n"
        f"main(['label', {PAIR!r}, '--set', 'distil.epochs=1'])\n"
        f"sys.exit(', '.join(sorted({heavy} & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | path_of_repo()
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("pipeline: --set: unknown key 'distil'")


def path_of_repo() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT)}


def test_the_stage_gets_the_pair_with_overrides(install: Install) -> None:
    seen: list[PairConfig] = []
    install("label", seen.append)
    assert cli.main(["label", PAIR, "--set", "label.max_new_tokens=9", "--set", "seed=4"]) == 0
    assert [(config.slug, config.label.max_new_tokens, config.seed) for config in seen] == [(PAIR, 9, 4)]
    assert '"max_new_tokens": 9' in seen[0].paths.config("label").read_text(), "dvc must see what the stage ran with"
    assert not seen[0].paths.config("distill").exists()


def test_threads_are_set_before_the_stage_is_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = []
    install("label", lambda config: seen.append(os.environ["OMP_NUM_THREADS"]))
    cli.main(["label", PAIR])
    cli.main(["label", PAIR, "--set", "threads=3"])
    assert seen == ["7", "3"]


def test_a_user_error_is_one_line_and_exit_code_2(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: PairConfig) -> None:
        raise UserError("The file x is\n  missing.")

    install("label", fail)
    assert cli.main(["label", PAIR]) == 2
    assert capsys.readouterr().err == "pipeline: The file x is missing.\n"
    assert not Path("models").exists(), "a failed stage writes nothing"
    assert cli.main(["label", "smollm-135m"]) == 2
    assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("[enforce] No space left on device (os error 28)")],
)
def test_a_full_disk_is_one_sentence(error: Exception, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: PairConfig) -> None:
        raise RuntimeError("could not save") from error

    install("label", fail)
    assert cli.main(["label", PAIR]) == 2
    message = capsys.readouterr().err
    assert "disk is full" in message
    assert message.count("\n") == 1


def test_what_may_not_be_written_is_named(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: PairConfig) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "data/profiles/x.json")

    install("profile", fail)
    assert cli.main(["profile", PAIR]) == 2
    assert capsys.readouterr().err.startswith("pipeline: data/profiles/x.json cannot be written or read (Permission")


def test_a_stage_of_a_pair_runs_once_at_a_time(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def again(config: PairConfig) -> None:
        codes.append(cli.main(["label", PAIR]))
        codes.append(cli.main(["label", PAIR, "--set", "label.test_per_kind=1"]))
        monkeypatch.setenv("RANK", "1")  # a worker that came with this one
        install("label", lambda config: None)
        codes.append(cli.main(["label", PAIR]))

    install("label", again)
    assert cli.main(["label", PAIR]) == 0
    assert codes == [2, 2, 0]
    assert capsys.readouterr().err.count("is running already") == 2
    monkeypatch.delenv("RANK")
    assert cli.main(["label", PAIR]) == 0


def test_a_fault_of_the_program_keeps_its_traceback(install: Install) -> None:
    def fail(config: PairConfig) -> None:
        raise OSError(errno.EIO, "broken")

    install("label", fail)
    with pytest.raises(OSError, match="broken"):
        cli.main(["label", PAIR])


def test_an_interrupt_is_quiet(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: PairConfig) -> None:
        raise KeyboardInterrupt

    install("label", fail)
    assert cli.main(["label", PAIR]) == 130
    assert capsys.readouterr().err == ""


def test_all_runs_every_stage_with_the_overrides_and_stops_at_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def call(command: list[str]) -> int:
        calls.append(command)
        return 3 if command[3] == "traces" else 0

    monkeypatch.setattr(cli, "_call", call)
    assert cli.main(["all", PAIR, "--set", "seed=4", "--set", "distill.epochs=1"]) == 3
    assert [command[3] for command in calls] == ["fetch", "draft", "profile", "label", "traces"]
    tail = [PAIR, "--set", "seed=4", "--set", "distill.epochs=1"]
    assert all(command == [sys.executable, "-m", "pipeline", command[3], *tail] for command in calls)


def test_all_checks_the_pair_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_call", lambda command: pytest.fail("a stage was started"))
    assert cli.main(["all", PAIR, "--set", "sed=4"]) == 2


def test_a_stage_that_dies_by_a_signal_gives_the_code_of_shells() -> None:
    assert cli._call([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + 9
    assert cli._call([sys.executable, "-c", "raise SystemExit(5)"]) == 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + 15)])
def test_a_signal_for_all_ends_its_stage_in_order(tmp_path: Path, number: int, code: int) -> None:
    """A terminal interrupts the whole process group; `kill` ends the one process, which passes it on."""
    (tmp_path / "child.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def ended(*_):\n"
        "    pathlib.Path('ended').touch()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "signal.signal(signal.SIGTERM, ended)\n"
        "pathlib.Path('started').touch()\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.2)\n"
        "    pathlib.Path('ended').touch()\n"
    )
    program = (
        "import signal, sys\n"
        # A background job of a shell inherits that the signal is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pipeline import cli\n"
        "call = cli._call\n"
        "cli._call = lambda command: call([sys.executable, 'child.py'])\n"
        f"sys.exit(cli.main(['all', {PAIR!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        env=os.environ | path_of_repo(),
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.wait(30) == code
    assert (tmp_path / "ended").exists()


def test_validate_lists_all_faults_or_says_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.treegraft.values.toy import labelled_tables, write_folder

    folder = tmp_path / "traces"
    write_folder(folder, {split: labelled_tables(0, kind=split) for split in ("train", "validation", "test")})
    assert cli.main(["validate", str(folder)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    (folder / "calibration.json").unlink()
    (folder / "states/test-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert cli.main(["validate", str(folder)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "calibration.json is missing" in lines[0]
    assert cli.main(["validate", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"pipeline: {tmp_path / 'nowhere'} is no folder.\n"


def test_draft_rebuild_reaches_the_training(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    import pipeline.draft

    rebuilt: list[str] = []
    monkeypatch.setattr(pipeline.draft, "rebuild", lambda config: rebuilt.append(config.slug))
    assert cli.main(["draft", "--rebuild", PAIR]) == 0
    assert rebuilt == [PAIR]
