"""The command `pipeline tune`: better settings for the student, searched with Optuna. No part of `dvc repro`.

A trial trains students as stage distill does, with other values of some keys of section distill
(pipeline/search_space.py). Its value is their replayed speed on the validation prompts: of each seed's best round, the
mean over ``distill.seeds``; the test prompts are never looked at. The present settings are tried first. Writes::

    .treegraft/<pair>/tune/<digest>/   the study (pipeline/study.py), which any number of such commands share; one for
                                       each state of traces, code and settings that are not searched
    reports/<pair>/tune.{json,html}    what was tried, what was best, how much each parameter matters
    params.yaml                        the best settings, under pairs.<pair>.distill, if they beat the present ones
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.distill_inputs import Inputs, fits_digest, read_inputs
from pipeline.search_space import KEYS, parameters_of, settings_of, suggest, with_settings
from pipeline.students import Fit, fit_one, one_thread, rounds, train_students

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

    from pipeline.params import PairConfig
    from pipeline.student import FittedStudent
    from pipeline.study import SharedStudy


def run(config: "PairConfig") -> None:
    """Search until ``tune.trials`` are finished, then publish what was found.

    Raises:
        UserError: as stage distill does for its traces.
    """
    inputs = read_inputs(config)
    study = open_study(config)
    with _helpers(config):
        search(config, inputs, study)
    publish(config, study)


def open_study(config: "PairConfig") -> "SharedStudy":
    """The study of the present traces, code and settings that are not searched."""
    from pipeline.study import SharedStudy

    fixed = {key: value for key, value in config.distill.model_dump(mode="json").items() if key not in KEYS}
    folder = config.paths.scratch("tune") / fits_digest(config, fixed)[:16]
    return SharedStudy(folder, config.seed, suggest, parameters_of)


def search(config: "PairConfig", inputs: Inputs, study: "SharedStudy") -> None:
    """Run trials until enough are finished, by this process and by others."""
    present = settings_of(config)

    def objective(trial: "Trial", settings: dict[str, Any]) -> float:
        # The present settings are what the best is compared with: they run to their end.
        return speed(with_settings(config, settings), inputs, None if settings == present else trial)

    with one_thread():
        study.work(config.tune.trials, present, objective)


def speed(config: "PairConfig", inputs: Inputs, trial: "Trial | None") -> float:
    """Replayed tokens per ms on the validation prompts: each seed's best round, the mean over the seeds.

    ``trial`` is told the speed after every epoch of the first fit. The later fits are not comparable epoch by epoch,
    because they depend on when those before them stopped.

    Raises:
        optuna.TrialPruned: others were faster after as many epochs, or training diverged.
    """
    import optuna

    from pipeline.student import DivergedError

    seen = inputs.with_features(config.distill.features)
    work = rounds(config)

    def fit(seed: int, number: int, before: Fit | None) -> "FittedStudent":
        if trial is None or (seed, number) != work[0]:
            return fit_one(config, seen, seed, before)
        return fit_one(config, seen, seed, before, _Pruning(trial))

    try:
        fits = train_students(seen, work, fit)
    except DivergedError:
        raise optuna.TrialPruned from None
    best = [max(fit.validation for fit in fits if fit.seed == seed) for seed in config.distill.seeds]
    return sum(best) / len(best)


class _Pruning:
    """Reports the score of every epoch to a trial and gives it up where the study's pruner says so."""

    def __init__(self, trial: "Trial") -> None:
        self._trial = trial
        self._epoch = 0

    def __call__(self, score: float) -> None:
        import optuna

        self._trial.report(score, self._epoch)
        self._epoch += 1
        if self._trial.should_prune():
            raise optuna.TrialPruned


# --- several processes -----------------------------------------------------------------------------------------------


@contextmanager
def _helpers(config: "PairConfig") -> Iterator[None]:
    """``tune.workers`` - 1 more processes that work at the same study meanwhile."""
    from pipeline.progress import log

    # Spawned: a fork of a process in which torch's threads run may hang.
    context = multiprocessing.get_context("spawn")
    helpers = [context.Process(target=_help, args=(config,)) for _ in range(config.tune.workers - 1)]
    for helper in helpers:
        helper.start()
    try:
        yield
    except BaseException:
        for helper in helpers:
            helper.terminate()
        raise
    finally:
        for helper in helpers:
            helper.join()
    if any(helper.exitcode for helper in helpers):
        log("tune: a worker ended before its time; the others have done its trials")


def _help(config: "PairConfig") -> None:
    """What a further process does."""
    try:
        search(config, read_inputs(config), open_study(config))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


# --- results ---------------------------------------------------------------------------------------------------------


def publish(config: "PairConfig", study: "SharedStudy") -> None:
    """Write the report and, if they are better, the best settings; say on standard output what was done."""
    from pipeline.tune_report import write_report

    present = settings_of(config)
    with study.claiming():  # another command at the same study may be through too
        write_report(config, study.study, present)
        print(_verdict(config, study.study.best_trial, study.trials(), present))


def _verdict(config: "PairConfig", best: "FrozenTrial", trials: "list[FrozenTrial]", present: dict[str, Any]) -> str:
    """Change params.yaml if that is better; in words, what came out and what to do next."""
    from pipeline.params_edit import write_distill

    slug, same = config.slug, [trial for trial in trials if trial.user_attrs.get("settings") == present]
    if not any(trial.state.is_finished() for trial in same):
        return (
            f"{slug}: the present settings are not among the trials, so nothing is compared; params.yaml stays as it "
            f"is. Try them with `pipeline tune {slug} --trials {config.tune.trials + 1}`."
        )
    before = next((_value(trial) for trial in same if trial.state.name == "COMPLETE"), None)
    speed = f"{_value(best):.6g} tokens/ms replayed on the validation prompts"
    if before is not None and _value(best) <= before:
        return f"{slug}: no trial was faster than the present settings ({speed}); params.yaml stays as it is."
    gain = "the present settings do not train" if before is None else f"{_value(best) / before - 1:+.2%}"
    changes = write_distill(slug, best.user_attrs["settings"])
    if not changes:
        return f"{slug}: params.yaml has the settings of the best trial, number {best.number}, already ({speed})."
    return (
        f"{slug}: trial {best.number} is the best ({speed}, {gain}). params.yaml now has, under pairs.{slug}.distill: "
        f"{'; '.join(changes)}. Now run `dvc repro` or `pipeline distill {slug}`."
    )


def _value(trial: "FrozenTrial") -> float:
    assert trial.value is not None  # it is complete
    return trial.value
