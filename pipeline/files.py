"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed into it."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treegraft.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; on a clean exit it becomes ``path`` in one step.

    For writers that want a path (pyarrow, safetensors). After an exception the temporary file is gone and ``path`` is
    as it was. The temporary name is fixed (``<name>.tmp``), so the rest of a killed run is overwritten by the next
    one instead of piling up; ``.dvcignore`` hides it meanwhile. One writer per file is assumed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing_by(path, path.with_name(path.name + ".tmp")) as temporary:
        yield temporary


@contextlib.contextmanager
def _replacing_by(path: Path, temporary: Path) -> Iterator[Path]:
    """Yield ``temporary``; on a clean exit it becomes ``path``, otherwise it is gone."""
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush(path.parent)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``path``; on a clean exit it takes the place of ``path``.

    After an exception or a kill the folder ``path`` is as it was; only a kill between two renames leaves it under
    ``<name>.old``, from where the next call puts it back.
    """
    temporary, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for written in temporary.rglob("*"):
        _flush(written)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for it. The kernel gives it back however its holder ends.

    Between machines this takes a network file system that honours flock, as NFS 4 does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``; UserError where somebody does already. ``what``: a command, for the message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"`{what}` is running already: wait for it, or end it.") from None
        yield


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock file ``path``, this process included."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def digest(value: Any) -> str:
    """SHA-256 of ``value`` (anything JSON can hold) as JSON, in hex."""
    return hashlib.sha256(json_text(value).encode()).hexdigest()


def library_code() -> list[Path]:
    """The source files of the library, sorted: what half-done work depends on besides the code of its stage."""
    import treegraft

    return sorted(Path(treegraft.__path__[0]).rglob("*.py"))


def scratch_name(work: Any) -> str:
    """The name of the scratch folder for ``work`` (anything JSON can hold)."""
    return digest(work)[:16]


def scratch_folder(root: Path, work: Any) -> Path:
    """The folder below ``root`` for half-done ``work`` (anything JSON can hold); what other work left there is removed.

    Equal work, whenever it is started, finds its own pieces again and never another's.
    """
    folder = root / scratch_name(work)
    if root.is_dir():
        for other in root.iterdir():
            if other != folder:
                shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_shared(path: Path, data: bytes) -> None:
    """``write_bytes`` for a file that several processes may write at once, all of them with the same content.

    Each has a temporary name of its own. The folder must be there: where others have removed it, this fails.
    """
    with _replacing_by(path, path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 with Unix line ends, whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as strict JSON, keys sorted, so that equal values give equal bytes.

    Numbers that are not finite become null; numpy scalars and arrays, tuples and paths become what JSON has for them.
    """
    write_text(path, json_text(value))


def read_json(path: Path, mend: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    ``mend`` says what to do where it is missing or damaged: the end of the UserError.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {mend}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): {mend}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold an object: {mend}.")
    return value


def write_json_if_changed(path: Path, value: Any) -> bool:
    """``write_json``, but a file that holds these bytes already is not touched. Returns whether it was written.

    All workers of a stage may do so at once.
    """
    data = json_text(value).encode()
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shared(path, data)
    return True


def json_text(value: Any) -> str:
    """The text that ``write_json`` writes."""
    return json.dumps(_plain(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append ``row`` as one line and flush it to the disk, so that a finished piece of work survives a kill.

    The torn last line of a killed writer is cut off first: ``row`` never continues it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(_plain(row), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        file.seek(_whole_length(file.read()))
        file.truncate()
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def cut_torn_line(path: Path) -> None:
    """Cut off what a killed writer left behind the last line end of ``path``."""
    with path.open("r+b") as file:
        data = file.read()
        if (whole := _whole_length(data)) < len(data):
            file.truncate(whole)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows that ``append_jsonl`` wrote; a torn last line is left out; no file means no rows."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data[: _whole_length(data)].decode().split("\n") if line]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _whole_length(data: bytes) -> int:
    """Length of ``data`` up to and with its last line end."""
    return data.rfind(b"\n") + 1


def _flush(path: Path) -> None:
    """fsync a file or a folder (for a folder: the rename inside it)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(value: Any) -> Any:
    """``value`` in JSON's own types, with null for numbers that are not finite."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")
