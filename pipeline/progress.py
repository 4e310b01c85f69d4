"""Progress of long work: a bar on a terminal, now and then a plain line where there is none (logs, CI)."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

# A log of a twenty-minute run stays readable: at most about forty lines of progress.
SECONDS_BETWEEN_LINES = 30.0


def log(message: str) -> None:
    """One line of plain progress on standard error, above a bar if one is shown."""
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


def progress(
    iterable: Iterable[T], total: int | None = None, desc: str = "", *, initial: int = 0, unit: str = "it"
) -> Iterator[T]:
    """Yield the items of ``iterable`` while showing how far it has come.

    ``total``: number of items with those done before (default: ``len(iterable) + initial`` where it has a length);
    ``initial``: how many of them an earlier, interrupted run did. On a terminal this is a tqdm bar; elsewhere a line
    such as ``label: 12/48, 63 s`` every 30 s and one at the end.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable) + initial
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(iterable, total=total, desc=desc, initial=initial, unit=unit, dynamic_ncols=True)
        return
    started = said = time.monotonic()
    done = initial
    for item in iterable:
        yield item
        done += 1
        now = time.monotonic()
        if now - said >= SECONDS_BETWEEN_LINES and done != total:
            said = now
            log(_line(desc, done, total, now - started))
    log(_line(desc, done, total, time.monotonic() - started))


def _line(desc: str, done: int, total: int | None, seconds: float) -> str:
    """One plain line of progress."""
    of = f"/{total}" if total is not None else ""
    return f"{desc}: {done}{of}, {seconds:.0f} s"


class Meter:
    """Progress of shared work that is told how far it has come: positions a second and the time left.

    Call it with the positions done by all workers and with their number in all, which may change on the way. On a
    terminal it is a tqdm bar; elsewhere a line every 30 s and one when all is done.
    """

    def __init__(self, desc: str) -> None:
        self._desc = desc
        self._started = self._said = time.monotonic()
        self._first: int | None = None
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` positions are done."""
        if self._first is None:
            self._first = done  # what was there before, which is not the rate of this run
            if sys.stderr.isatty():
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=self._desc, initial=done, unit=" positions", dynamic_ncols=True)
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._bar.close()
            return
        now = time.monotonic()
        if done >= total or now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            log(_meter_line(self._desc, done, total, done - self._first, now - self._started))


def _meter_line(desc: str, done: int, total: int, lately: int, seconds: float) -> str:
    """One plain line of a meter; ``lately`` positions took ``seconds``."""
    line = f"{desc}: {done}/{total} positions, {seconds:.0f} s"
    if lately <= 0 or seconds <= 0:
        return line
    rate = lately / seconds
    return f"{line}, {rate:.3g} positions/s" + (f", {(total - done) / rate:.0f} s left" if done < total else "")


class Steps:
    """Progress of work that calls back with (step, done, total): one line for each further twentieth of a step.

    On a terminal the line is drawn over until its step is done.
    """

    def __init__(self) -> None:
        self._said: tuple[str, int] = ("", -1)

    def __call__(self, step: str, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` parts of ``step`` are done."""
        now = (step, done * 20 // max(total, 1))
        if now == self._said:
            return
        self._said = now
        line = f"{step}: {done}/{total}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}" + ("" if done < total else "\n"))
            sys.stderr.flush()
        else:
            log(line)
