"""Stage distill: from traces to the scheduler checkpoint of a pair.

Reads data/traces/<pair>/ (states with labels, outcomes of every schedule, and the calibration and latency profile that
they were made with). Trains students by policy iteration (pipeline/students.py); the epoch, the round and the seed are
all chosen by the replayed speed on the validation prompts, a loss decides nothing. Writes::

    models/schedulers/<pair>/     the best student (treegraft/scheduling/checkpoint.py); another one's model.onnx goes
    reports/<pair>/distill.json   its replayed speed beside fixed policies, simpler learners and the oracle
    .treegraft/<pair>/distill/    finished fits, from which a killed run goes on to the same bytes
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.distill_inputs import Inputs, fits_digest, read_inputs, versions
from pipeline.files import scratch_folder
from pipeline.labelled import Admission, LabelledStates
from pipeline.students import (
    Fit,
    admission_of,
    choose,
    fit_one,
    follow,
    kept,
    labelled,
    one_thread,
    rounds,
    train_students,
)

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from pipeline.student import FittedStudent
    from treegraft.scheduling.checkpoint import SchedulerConfig
    from treegraft.values.replay import ReplayResult
    from treegraft.values.tables import OutcomeTables

SCHEMA = "treegraft.distill/1"
FOLDS = 5  # of the cross-validation by prompt


def run(config: "PairConfig") -> None:
    """Train, compare and export the scheduler of one pair.

    Raises:
        UserError: traces that are missing, incomplete, not finite or made under other settings; training that diverges.
    """
    from pipeline.files import write_json
    from treegraft.scheduling.checkpoint import ONNX_FILE, save_scheduler

    inputs = read_inputs(config).with_features(config.distill.features)
    digest = fits_digest(config, config.distill.model_dump(mode="json"))
    with one_thread():
        fits = finish_fits(config, inputs, digest)
        best = choose(fits)
        metrics = measure(config, inputs, fits, best)
    onnx = config.paths.scheduler / ONNX_FILE
    had_onnx = onnx.exists()
    save_scheduler(
        config.paths.scheduler, best.student.network, _scheduler_config(config, inputs, digest, best, metrics)
    )
    if had_onnx and not onnx.exists():
        print(f"{onnx} was of the earlier scheduler and is removed: `pipeline onnx {config.slug}` writes it anew.")
    write_json(config.paths.distill_metrics, metrics)


def finish_fits(config: "PairConfig", inputs: Inputs, digest: str) -> list[Fit]:
    """All fits; those that an earlier, killed run finished are taken from the scratch folder.

    Every fit depends on nothing but the inputs and the rounds before it, so the result is that of an undisturbed run.
    """
    from pipeline.progress import progress

    folder = scratch_folder(config.paths.scratch("distill"), digest)

    def fit(seed: int, number: int, before: Fit | None) -> "FittedStudent":
        path = folder / f"seed-{seed}-round-{number}.safetensors"
        return kept(path, lambda: fit_one(config, inputs, seed, before))

    return train_students(inputs, progress(rounds(config), desc="distill", unit="fit"), fit)


# --- what it is worth ------------------------------------------------------------------------------------------------


def measure(config: "PairConfig", inputs: Inputs, fits: list[Fit], best: Fit) -> dict[str, Any]:
    """The content of distill.json; rates are replayed tokens per ms (``fits``: passes over prompts left out)."""
    from pipeline.baselines import BASELINES, fit_baseline
    from pipeline.headroom import best_layers

    states = labelled(inputs.train, None)
    learners: dict[str, Any] = {"student": best.student.network}
    learners |= {name: fit_baseline(name, states) for name in BASELINES}
    names = [drafter.name for drafter in config.drafters]
    splits = {"train": inputs.train, "validation": inputs.validation, "test": inputs.test}
    admissions = {name: admission_of(learner, inputs) for name, learner in learners.items()}
    # As for the best fixed schedule, test prompts have no say in how many layers a drafter alone drafts in.
    single: dict[str, tuple[int, ...]] = {"ngram": ()}
    single |= {_alone(names, j): best_layers(inputs.validation, j) for j in range(1, len(names))}
    plans = single | {"fixed": inputs.best_fixed}
    replay = {split: _rates(tables, learners, admissions, plans) for split, tables in splits.items()}
    judged = [*learners, "fixed"]
    return {
        "schema": SCHEMA,
        "pair": config.slug,
        "replay": replay,
        "speedup": {
            split: {name: rate / rates["plain"] for name, rate in rates.items()} for split, rates in replay.items()
        },
        "captured": {split: _captured(rates, single, judged) for split, rates in replay.items()},
        "cross_validation": cross_validate(inputs.train, states),
        "best_fixed": list(inputs.best_fixed),
        "saving": {name: asdict(admission.saving) for name, admission in admissions.items()},
        "chosen": {"seed": best.seed, "round": best.round, "epoch": best.student.epoch},
        "fits": [
            {
                "seed": fit.seed,
                "round": fit.round,
                "epoch": fit.student.epoch,
                "train": fit.train,
                "validation": fit.validation,
                "validation_by_epoch": list(fit.student.scores),
            }
            for fit in fits
        ],
        "data": {split: _size(tables) for split, tables in splits.items()},
    }


def _alone(drafters: list[str], drafter: int) -> str:
    """What a drafter by itself is called: the last one "strong", those between the light one and it by their names."""
    return "strong" if drafter == len(drafters) - 1 else f"alone_{drafters[drafter]}"


def _rates(
    tables: "OutcomeTables",
    learners: dict[str, Any],
    admissions: dict[str, Admission],
    plans: dict[str, tuple[int, ...]],
) -> dict[str, float]:
    """Replayed rate of everything that can be compared on one split; ``plans``: the fixed schedules among it."""
    from treegraft.values.replay import oracle, plain, replay_fixed

    rates = {"plain": plain(tables).tokens_per_ms}
    rates |= {name: replay_fixed(tables, plan).tokens_per_ms for name, plan in plans.items()}
    rates |= {name: follow(learner, tables, admissions[name]).tokens_per_ms for name, learner in learners.items()}
    rates["oracle"] = oracle(tables).tokens_per_ms
    return rates


def _captured(rates: dict[str, float], single: Iterable[str], names: list[str]) -> dict[str, float | None]:
    """Share of the way from the best of the drafters ``single`` to the oracle; None where the oracle is no faster."""
    best = max(rates[name] for name in single)
    headroom = rates["oracle"] - best
    return {name: (rates[name] - best) / headroom if headroom > 0 else None for name in names}


def cross_validate(tables: "OutcomeTables", states: LabelledStates) -> dict[str, Any]:
    """Every baseline's replayed rate on the training tables, each prompt decided by a model that never saw it."""
    folds, results = out_of_fold(tables, states)
    rates = {name: None if result is None else result.tokens_per_ms for name, result in results.items()}
    return {"folds": folds, "tokens_per_ms": rates}


def out_of_fold(tables: "OutcomeTables", states: LabelledStates) -> "tuple[int, dict[str, ReplayResult | None]]":
    """The number of folds and each baseline's replay in them; None where a single question leaves no fold."""
    import numpy as np

    from pipeline.baselines import BASELINES, fit_baseline, grouped_folds
    from treegraft.values.replay import replay
    from treegraft.values.values import greedy_actions

    positions, states_each = tables.features.shape[:2]
    questions = np.array(tables.questions)  # whose turns share a fold
    folds = list(grouped_folds(np.repeat(questions[tables.prompt_of], states_each), FOLDS))
    results: dict[str, ReplayResult | None] = dict.fromkeys(BASELINES)
    for name in BASELINES if folds else ():
        actions = np.zeros(positions * states_each, dtype=np.int64)
        for fitted, held_out in folds:
            rows = LabelledStates(states.features[fitted], states.margins[fitted], states.weights[fitted])
            actions[held_out] = greedy_actions(fit_baseline(name, rows)(states.features[held_out]))
        results[name] = replay(tables, actions.reshape(positions, states_each))
    return len(folds), results


def _size(tables: "OutcomeTables") -> dict[str, int]:
    return {
        "turns": len(tables.prompt_ids),
        "positions": tables.features.shape[0],
        "states": tables.features.shape[0] * tables.features.shape[1],
    }


# --- exporting -------------------------------------------------------------------------------------------------------


def _scheduler_config(
    config: "PairConfig", inputs: Inputs, digest: str, best: Fit, metrics: dict[str, Any]
) -> "SchedulerConfig":
    """Everything but the weights, without times or host names, so that equal inputs give equal bytes."""
    from treegraft.scheduling.admission import Saving
    from treegraft.scheduling.checkpoint import SchedulerConfig

    costs = inputs.train.costs
    network = best.student.network
    settings = config.decoding.settings()
    admission = Admission(Saving(**metrics["saving"]["student"]), inputs.new_tokens)
    seen = [follow(network, tables, admission) for tables in (inputs.train, inputs.validation)]
    kinds = sorted(set(inputs.train.kinds))
    return SchedulerConfig(
        pair=config.slug,
        drafters=tuple(drafter.name for drafter in config.drafters),
        feature_names=tuple(inputs.train.feature_names),
        means=tuple(network.means.tolist()),
        scales=tuple(network.scales.tolist()),
        hidden=network.hidden,
        depth=settings.depth,
        width=settings.width,
        look_back=settings.look_back,
        ngram=settings.ngram,
        verified_sizes=settings.verified_sizes,
        # Of the steps alone: the decoder compares it with milliseconds of a step.
        rate_tokens_per_ms=float(sum(run.tokens.sum() for run in seen) / sum(run.decode_ms.sum() for run in seen)),
        saving=admission.saving,
        best_fixed=inputs.best_fixed,
        calibration=inputs.calibration,
        cost_model=costs.to_json(),
        cost_model_digest=costs.digest(),
        tokenizer_hashes=inputs.tokenizer_hashes,
        replay={split: metrics["replay"][split] for split in ("validation", "test")},
        provenance={
            "data": {"kinds": kinds, "temperature": inputs.temperature}
            | {f"{split}_{name}": n for split, d in metrics["data"].items() for name, n in d.items()},
            "chosen": metrics["chosen"],
            "distill": config.distill.model_dump(mode="json"),
            "seed": config.seed,
            "inputs_digest": digest,
            "versions": versions(),
        },
    )
