"""An Optuna study on disk that any number of processes work at together, up to an exact number of finished trials.

::

    <folder>/
        journal.jsonl       all that happened, as Optuna writes and reads it
        journal.lock        held while a line is appended
        claims.lock         held while a worker takes a trial, and while results are published
        workers/<id>.lock   held by a worker as long as it lives

Exactly N trials become COMPLETE. A worker begins one only while it holds claims.lock and finds fewer than N that are
COMPLETE or RUNNING; as each RUNNING trial becomes one COMPLETE one at most, there are never more than N. A worker that
finds N of both, not all of them COMPLETE, waits: a trial that is pruned makes room for another one, so there are not
fewer either. A killed worker leaves a RUNNING trial. The kernel gives a dead process's locks back, so whoever next
wants to take a trial sees by workers/<id>.lock that nobody works at that one and marks it FAIL, which no trial that has
ended can leave again. A kill between the creation of a trial and the note of its worker leaves one without a worker:
under claims.lock that can only be a dead one's. Process ids, host names and clocks play no part.
"""

import contextlib
import multiprocessing
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from pipeline.files import cut_torn_line, is_locked, locked
from pipeline.progress import log

Settings = dict[str, Any]
"""What a trial tries, in JSON's types."""

LOOK_SECONDS = 0.5  # between two looks at what others are doing, when there is nothing to begin


class SharedStudy:
    """One process's hold on the study in ``folder``; higher values are better.

    Args:
        folder: see above; made if it is not there.
        seed: of the sampler. Every trial draws from a stream of its own, by its number: neither a second worker nor a
            resumed study draws the same again.
        suggest: the settings of a new trial.
        parameters_of: the parameters for which ``suggest`` gives certain settings, None where there are none.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        suggest: Callable[[Trial], Settings],
        parameters_of: Callable[[Settings], dict[str, Any] | None],
    ) -> None:
        self.folder = folder
        self._seed = seed
        self._suggest = suggest
        self._parameters_of = parameters_of
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder / "journal.jsonl"
        with self.claiming():
            backend = JournalFileBackend(str(journal), _KernelLock(journal))
            self.study = optuna.create_study(
                study_name="tune",
                direction="maximize",
                storage=optuna.storages.JournalStorage(backend),
                load_if_exists=True,
                # Pruned trials do not count, so a pruner must not go on raising the bar with every finished trial:
                # the worst quarter goes, by the speed after the same number of epochs.
                pruner=optuna.pruners.PercentilePruner(75.0, n_startup_trials=5, n_warmup_steps=2),
            )

    def claiming(self) -> contextlib.AbstractContextManager[None]:
        """The lock under which trials are taken; nobody takes one, or publishes, meanwhile."""
        return locked(self.folder / "claims.lock")

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """All trials, or those in certain states."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def work(self, wanted: int, first: Settings, objective: Callable[[Trial, Settings], float]) -> None:
        """Run trials until ``wanted`` are COMPLETE, by this worker and others.

        Args:
            wanted: COMPLETE trials in all, those of earlier runs included.
            first: settings that are tried before all others, unless they have been.
            objective: raises optuna.TrialPruned to give a trial up. Anything else it raises ends the worker, and its
                trial counts as failed.
        """
        with _living(self.folder / "workers") as worker:
            while (trial := self._take(wanted, first, worker)) is not None:
                if isinstance(trial, _Wait):
                    time.sleep(LOOK_SECONDS)
                    continue
                try:
                    value = objective(trial, trial.user_attrs["settings"])
                except optuna.TrialPruned:
                    self.study.tell(trial, state=TrialState.PRUNED)
                else:
                    self.study.tell(trial, value)
                self._say(trial.number, wanted)

    def _take(self, wanted: int, first: Settings, worker: str) -> "Trial | _Wait | None":
        """The next trial of this worker; None when no more are needed, or the command that started it is gone."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            return None
        with self.claiming():
            for running in self.trials(TrialState.RUNNING):
                owner = self.folder / "workers" / running.user_attrs.get("worker", "unknown")
                if not is_locked(owner):
                    self.study.tell(running.number, state=TrialState.FAIL)
                    owner.unlink(missing_ok=True)
            count = Counter(trial.state for trial in self.trials())
            if count[TrialState.COMPLETE] >= wanted:
                return None
            if count[TrialState.COMPLETE] + count[TrialState.RUNNING] >= wanted:
                return _Wait()
            return self._begin(first, worker)

    def _begin(self, first: Settings, worker: str) -> Trial:
        """Create a trial and note whose it is and what it tries."""
        stream = np.random.SeedSequence([self._seed, len(self.trials())]).generate_state(1)
        self.study.sampler = optuna.samplers.TPESampler(seed=int(stream[0]))
        begun = self.trials(TrialState.COMPLETE, TrialState.RUNNING, TrialState.PRUNED)
        settings: Settings | None = None
        if all(trial.user_attrs.get("settings") != first for trial in begun):
            parameters = self._parameters_of(first)
            if parameters is None:
                settings = first  # outside what is searched: the sampler learns nothing from it, but it is compared
            elif not self.trials(TrialState.WAITING):  # left by a worker that was killed just here
                self.study.enqueue_trial(parameters)
        trial = self.study.ask()
        trial.set_user_attr("worker", worker)
        trial.set_user_attr("settings", settings or self._suggest(trial))
        return trial

    def _say(self, number: int, wanted: int) -> None:
        trial = self.trials()[number]
        count = Counter(trial.state for trial in self.trials())
        value = "pruned" if trial.state == TrialState.PRUNED else f"{trial.value:.6g}"
        best = f", best {self.study.best_value:.6g}" if count[TrialState.COMPLETE] else ""
        log(f"tune: trial {number}: {value}; {count[TrialState.COMPLETE]}/{wanted} complete{best}")


class _Wait:
    """There is nothing to begin now, but there may be."""


@contextlib.contextmanager
def _living(folder: Path) -> Iterator[str]:
    """Hold a lock file of one's own in ``folder``; yields its name."""
    path = folder / f"{uuid.uuid4().hex}.lock"
    with locked(path):
        try:
            yield path.name
        finally:
            path.unlink(missing_ok=True)


class _KernelLock(JournalFileOpenLock):
    """The journal's lock. Optuna's own ones outlive a killed process by half a minute; this one does not.

    Before a line is appended, what a killed writer left of its last line is cut off: Optuna could never read on.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._held = contextlib.ExitStack()

    def acquire(self) -> bool:
        self._held.enter_context(locked(self._journal.with_suffix(".lock")))
        cut_torn_line(self._journal)
        return True

    def release(self) -> None:
        self._held.close()
