import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline import files
from pipeline.files import (
    append_jsonl,
    is_locked,
    locked,
    read_jsonl,
    replacing,
    replacing_folder,
    write_bytes,
    write_json,
    write_json_if_changed,
)


def test_write_makes_folders_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.bin"
    write_bytes(path, b"one")
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_until_its_holder_ends_however_that_is(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.lock"
    assert not is_locked(path)
    with locked(path):
        assert is_locked(path)
    assert not is_locked(path)
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from pipeline.files import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_locked(path)
    holder.kill()
    holder.communicate()
    assert not is_locked(path)
    with locked(path):
        pass


def test_a_kill_between_writing_and_renaming_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pipeline.files import write_text\n"
        "Path.replace = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_text(Path(sys.argv[1]), 'new')\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -9
    assert path.read_text() == "old"
    files.write_text(path, "newer")
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path], "the next run clears what the killed one left"


def test_data_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def spy_replace(self: Path, target: Path) -> Path:
        events.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_bytes(tmp_path / "x", b"1")
    assert events == ["fsync x.tmp", "replace", f"fsync {tmp_path.name}"]


def test_json_is_strict_and_byte_stable(tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    write_json(one, {"b": float("nan"), "a": (1, np.float32(0.5)), "c": np.array([1.0, np.inf]), "d": Path("x/y")})
    write_json(two, {"d": Path("x/y"), "c": [1.0, None], "a": [1, 0.5], "b": None})
    assert one.read_bytes() == two.read_bytes()
    assert json.loads(one.read_text()) == {"a": [1, 0.5], "b": None, "c": [1.0, None], "d": "x/y"}
    with pytest.raises(TypeError, match="object has no place in JSON"):
        write_json(one, object())
    assert json.loads(one.read_text())["b"] is None


def test_equal_json_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert write_json_if_changed(path, {"a": 1})
    before = path.stat().st_ino
    assert not write_json_if_changed(path, {"a": 1})
    assert path.stat().st_ino == before
    assert write_json_if_changed(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}


def test_rows_survive_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, {"n": 1, "text": "a\u2028b"})
    with path.open("a") as file:
        file.write('{"n": 2, "te')
    assert read_jsonl(path) == [{"n": 1, "text": "a\u2028b"}]
    append_jsonl(path, {"n": 3})
    assert [row["n"] for row in read_jsonl(path)] == [1, 3]
    assert path.read_text().count("\n") == 2


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with replacing_folder(path) as folder:
        write_bytes(folder / "old", b"1")
    with replacing_folder(path) as folder:
        write_bytes(folder / "new", b"2")
    assert [entry.name for entry in path.iterdir()] == ["new"], "nothing of the old result stays"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with replacing_folder(path) as folder:
        write_bytes(folder / "old", b"1")

    def write_half() -> None:
        with replacing_folder(path) as folder:
            write_bytes(folder / "new", b"2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_between_the_two_renames_of_a_folder_is_mended(tmp_path: Path) -> None:
    (tmp_path / "out.old").mkdir()
    (tmp_path / "out.old" / "old").touch()
    (tmp_path / "out.tmp").mkdir()
    with pytest.raises(KeyError), replacing_folder(tmp_path / "out"):
        raise KeyError
    assert [entry.name for entry in tmp_path.rglob("*")] == ["out", "old"]
