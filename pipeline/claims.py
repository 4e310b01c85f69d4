"""Claims: how several processes, on one machine or many, share pieces of work through one folder.

A piece is done when its result is there; results are renamed into place and are the same whoever made them. So a claim
only keeps two workers from doing the same at once. It is a file made with O_EXCL::

    claims/<piece>.<n>     {"host": ..., "pid": ..., "process": ...}; its modification time is the heartbeat

The claim of the highest n counts. It is removed when its owner is through with the piece; one that a dead owner has
left is overtaken by creating n + 1, which again only one can do. Dead means: the process is gone from this host, or the
heartbeat has stood still for ``STALE_SECONDS`` of the observer's own clock (those of two machines are never compared).
Should a live worker be taken for dead, a piece is done twice and nothing else happens.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
LOOK_SECONDS = 0.5  # between two looks at what others hold, when there is nothing else to do

PROCESS = uuid.uuid4().hex  # a restarted container has its host's name and often its process ids of before


@dataclass(frozen=True)
class Piece:
    """One piece of work."""

    name: str
    """Names its claim: letters, digits, '-' and '_'."""
    is_done: Callable[[], bool]
    work: Callable[[], None]
    size: Callable[[], int] = lambda: 1
    """Positions in it; asked for once it is done."""
    most: int = 1
    """At most so many; tells how much is left."""


class Share(Protocol):
    """What a worker may take, and what it does while others hold the rest."""

    def take(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Try to claim the piece ``name``; the claim ends with the context, whose value says whether it was got.

        Raises FileNotFoundError where the folder of the work is gone: somebody has finished it all.
        """

    def wait(self) -> None:
        """Called when all that is left is held by others."""


class Claims:
    """A worker's share: any piece that no living worker holds."""

    def __init__(self, folder: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self.folder = folder
        self.stale_seconds = stale_seconds
        self._beats: dict[Path, tuple[int, float]] = {}  # heartbeat last seen, and when it was new

    @contextlib.contextmanager
    def take(self, name: str) -> Iterator[bool]:
        path = self._claim(name)
        if path is None:
            yield False
            return
        with _heartbeat(path):
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)

    def wait(self) -> None:
        time.sleep(LOOK_SECONDS)

    def _claim(self, name: str) -> Path | None:
        """The claim made for ``name``, or None if a living worker holds it."""
        number = 1
        while (self.folder / f"{name}.{number + 1}").exists():
            number += 1
        path = self.folder / f"{name}.{number}"
        if path.exists():
            if not self._is_abandoned(path):
                return None
            path = self.folder / f"{name}.{number + 1}"
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "process": PROCESS}
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(owner, file)
        return path

    def _is_abandoned(self, path: Path) -> bool:
        try:
            with path.open(encoding="utf-8") as file:  # opening makes network file systems look at the server
                text = file.read()
                beat = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return False  # its owner is through: the next look will see the result
        if _is_gone(text):
            return True
        now = time.monotonic()
        seen, since = self._beats.get(path, (None, now))
        if seen != beat:
            self._beats[path] = (beat, now)
            return False
        return now - since > self.stale_seconds


def work_through(
    pieces: Sequence[Piece], share: Share, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Return when every piece is done, by this worker or by another.

    ``progress`` gets the positions done by all workers, and their number in all (an estimate until sizes are known).
    Raises FileNotFoundError where the folder of the work has gone meanwhile.
    """
    tally = _Tally(sum(piece.most for piece in pieces))
    pending = [piece for piece in pieces if not tally.counts(piece)]
    progress(tally.done, tally.total)
    while pending:
        left, idle = [], True
        for piece in pending:
            if not piece.is_done():
                with share.take(piece.name) as mine:
                    # Asked again: another may have ended between the question and the claim.
                    if mine and not piece.is_done():
                        piece.work()
                        idle = False
            if tally.counts(piece):
                progress(tally.done, tally.total)
            else:
                left.append(piece)
        pending = left
        if pending and idle:
            share.wait()


class _Tally:
    """Positions done, and how many there will be if pieces go on being as large against their most as so far."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = self.done_most = 0

    def counts(self, piece: Piece) -> bool:
        """Add ``piece`` if it is done; whether it is."""
        if not piece.is_done():
            return False
        self.done += piece.size()
        self.done_most += piece.most
        return True

    @property
    def total(self) -> int:
        share = self.done / self.done_most if self.done_most else 1.0
        return self.done + round((self.most - self.done_most) * share)


@contextlib.contextmanager
def _heartbeat(path: Path) -> Iterator[None]:
    """Renew the modification time of ``path`` now and then."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # overtaken, or a hiccup of the file system: the next beat may succeed
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _is_gone(text: str) -> bool:
    """Whether the owner that a claim names was a process of this host that has ended."""
    try:
        owner = json.loads(text)
        host, pid, process = owner["host"], int(owner["pid"]), owner["process"]
    except (ValueError, TypeError, KeyError):
        return False  # torn, because its owner is writing or was killed while writing: the heartbeat decides
    if host != socket.gethostname():
        return False
    if pid == os.getpid():
        return bool(process != PROCESS)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
