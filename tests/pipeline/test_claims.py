"""Claims of pieces of work: exclusive while their owner lives, free again when it is dead."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline import claims
from pipeline.claims import Claims, Piece, work_through

HERE = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    return tmp_path / "claims"


def leave(folder: Path, name: str, owner: object) -> Path:
    """A claim as somebody left it."""
    path = folder / name
    path.write_text(owner if isinstance(owner, str) else json.dumps(owner), encoding="utf-8")
    return path


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def got(share: Claims, name: str = "a") -> bool:
    with share.take(name) as mine:
        return mine


def test_a_piece_is_held_by_one_and_free_afterwards(folder: Path) -> None:
    one, other = Claims(folder), Claims(folder)
    with one.take("a") as mine:
        assert mine
        assert not got(other)
        assert got(other, "b")
    assert got(other)
    assert not list(folder.iterdir())


def test_a_failure_gives_the_piece_back(folder: Path) -> None:
    with pytest.raises(RuntimeError), Claims(folder).take("a"):
        raise RuntimeError
    assert got(Claims(folder))


def test_the_claim_of_a_process_that_is_gone_is_overtaken_at_once(folder: Path) -> None:
    leave(folder, "a.1", {"host": HERE, "pid": dead_process(), "process": "x"})
    one, other = Claims(folder), Claims(folder)
    with one.take("a") as mine:
        assert mine
        assert not got(other), "the heir's claim counts like any other"
    assert got(other), "an heir that fails has heirs, too"


def test_a_claim_of_this_process_id_from_before_a_restart_is_overtaken(folder: Path) -> None:
    leave(folder, "a.1", {"host": HERE, "pid": os.getpid(), "process": "an earlier life"})
    assert got(Claims(folder))


@pytest.mark.parametrize(
    "owner",
    [
        {"host": HERE, "pid": os.getppid(), "process": "x"},
        {"host": "another host", "pid": dead_process(), "process": "x"},
        "",
        '{"host": "torn',
    ],
)
def test_any_other_claim_is_overtaken_when_its_heartbeat_stands_still(folder: Path, owner: object) -> None:
    path = leave(folder, "a.1", owner)
    os.utime(path, (0, 0))  # an old time alone says nothing: that host's clock may be wrong
    share = Claims(folder, stale_seconds=0.2)
    assert not got(share)
    time.sleep(0.15)
    os.utime(path, (1, 1))
    assert not got(share), "a beat"
    time.sleep(0.15)
    assert not got(share), "not yet long enough"
    time.sleep(0.3)
    assert got(share)


def test_an_owner_that_works_keeps_its_heart_beating(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.01)
    with Claims(folder).take("a"):
        os.utime(folder / "a.1", (0, 0))
        deadline = time.monotonic() + 30
        while (folder / "a.1").stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (folder / "a.1").stat().st_mtime > 0


def test_a_late_owner_does_not_end_the_claim_of_its_heir(folder: Path) -> None:
    late, heir, third = Claims(folder), Claims(folder, stale_seconds=-1), Claims(folder)
    with late.take("a"):
        assert not got(heir)  # sees the heartbeat for the first time
        held = heir.take("a")
        assert held.__enter__()
    assert not got(third)
    held.__exit__(None, None, None)
    assert got(third)


def test_of_many_that_see_a_stale_claim_one_gets_it(folder: Path) -> None:
    pid = dead_process()
    start, end, winners = threading.Barrier(8), threading.Barrier(8), []

    def run(name: str) -> None:
        start.wait()
        with Claims(folder).take(name) as mine:
            winners.append(mine)
            end.wait()  # nobody gives back what it got before all have tried

    for number in range(20):
        leave(folder, f"p{number}.1", {"host": HERE, "pid": pid, "process": "x"})
        winners.clear()
        threads = [threading.Thread(target=run, args=(f"p{number}",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(winners) == 1


def test_work_through_does_each_piece_once_and_counts_what_others_did(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p0").touch()
    made: list[str] = []

    def piece(name: str, size: int) -> Piece:
        path = tmp_path / name

        def work() -> None:
            made.append(name)
            path.touch()

        return Piece(name, path.exists, work, lambda: size, 10)

    pieces = [piece(f"p{number}", 5) for number in range(4)]
    seen: list[tuple[int, int]] = []
    work_through(pieces, Claims(folder), lambda done, total: seen.append((done, total)))
    assert made == ["p1", "p2", "p3"]
    assert seen == [(5, 20), (10, 20), (15, 20), (20, 20)], "half as large as they might be, so all are taken to be"
    work_through(pieces, Claims(folder))
    assert made == ["p1", "p2", "p3"]


def test_work_through_waits_for_what_a_living_worker_holds(folder: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    holder = Claims(folder).take("a")
    assert holder.__enter__()

    class Waits(Claims):
        def wait(self) -> None:
            result.touch()
            holder.__exit__(None, None, None)

    work_through([Piece("a", result.exists, lambda: pytest.fail("was done twice"))], Waits(folder))


def test_a_folder_that_is_gone_ends_the_work(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        work_through([Piece("a", lambda: False, lambda: None)], Claims(tmp_path / "gone"))


def test_a_worker_killed_while_it_holds_a_claim_leaves_it_to_the_next(folder: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from pipeline.claims import Claims\n"
        "with Claims(Path(sys.argv[1])).take('a') as mine:\n"
        "    print(mine, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert not got(Claims(folder))
        process.send_signal(signal.SIGKILL)
    assert got(Claims(folder))
