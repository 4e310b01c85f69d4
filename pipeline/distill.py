"""Stage distill: from traces to the scheduler checkpoint of a pair.

Reads data/traces/<pair>/ (states with labels, outcomes of every schedule, and the calibration and latency profile that
they were made with). Trains students by policy iteration: fit the labels of the traces, follow the student's own
decisions through the training tables, label again at the speed this gives, fit again. The epoch, the round and the seed
are all chosen by the replayed speed on the validation prompts; a loss decides nothing. Writes::

    models/schedulers/<pair>/     the best student (treegraft/scheduling/checkpoint.py)
    reports/<pair>/distill.json   its replayed speed beside fixed policies, simpler learners and the oracle
    .treegraft/<pair>/distill/    finished fits, from which a killed run goes on to the same bytes
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import read_json, scratch_folder
from pipeline.labelled import LabelledStates, decide, rows_of
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.baselines import Predict
    from pipeline.params import PairConfig
    from pipeline.student import FittedStudent
    from treegraft.scheduling.checkpoint import SchedulerConfig
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.replay import ReplayResult
    from treegraft.values.tables import OutcomeTables

SCHEMA = "treegraft.distill/1"
FOLDS = 5  # of the cross-validation by prompt


@dataclass(frozen=True)
class Inputs:
    """What the stage reads."""

    train: "OutcomeTables"
    validation: "OutcomeTables"
    test: "OutcomeTables"
    calibration: dict[str, Any]
    temperature: float
    """Of the labelled answers."""
    tokenizer_hashes: dict[str, str]
    best_fixed: tuple[int, ...]
    """Fastest fixed schedule on the validation prompts."""
    digest: str
    """Of all that the fits depend on: traces, parameters, code, versions."""


@dataclass(frozen=True)
class Fit:
    """One finished fit: the student of one seed and one round of policy iteration."""

    seed: int
    round: int
    student: "FittedStudent"
    train: float
    """Replayed tokens per ms on the training tables."""
    validation: float
    """The same on the validation tables."""


def run(config: "PairConfig") -> None:
    """Train, compare and export the scheduler of one pair.

    Raises:
        UserError: traces that are missing, incomplete, not finite or made under other settings; training that diverges.
    """
    from pipeline.files import write_json
    from treegraft.scheduling.checkpoint import save_scheduler

    inputs = read_inputs(config)
    with _one_thread():
        fits = train_students(config, inputs)
        best = choose(fits)
        metrics = measure(config, inputs, fits, best)
    save_scheduler(config.paths.scheduler, best.student.network, _scheduler_config(config, inputs, best, metrics))
    write_json(config.paths.distill_metrics, metrics)


def choose(fits: list[Fit]) -> Fit:
    """The fit with the best replayed speed on validation; at a tie the earlier round, then the earlier seed."""
    return max(fits, key=lambda fit: (fit.validation, -fit.round, -fits.index(fit)))


# --- policy iteration ------------------------------------------------------------------------------------------------


def train_students(config: "PairConfig", inputs: Inputs) -> list[Fit]:
    """All fits, seed by seed. A seed ends early when a round is no faster on validation than the one before.

    Fits that an earlier, killed run finished are taken from the scratch folder. Every fit depends on nothing but the
    inputs and the rounds before it, so the result is that of an undisturbed run.
    """
    from pipeline.progress import progress

    folder = scratch_folder(config.paths.scratch("distill"), inputs.digest)
    rounds = range(config.distill.policy_iterations + 1)
    work = [(seed, round_) for seed in config.distill.seeds for round_ in rounds]
    fits: list[Fit] = []
    for seed, round_ in progress(work, desc="distill", unit="fit"):
        before = [fit for fit in fits if fit.seed == seed]
        if len(before) < round_ or (round_ >= 2 and before[-1].validation <= before[-2].validation):
            continue  # this seed has ended
        path = folder / f"seed-{seed}-round-{round_}.safetensors"
        student = _stored(path)
        if student is None:
            student = _fit(config, inputs, before[-1] if before else None, seed)
            _store(path, student)
        rates = [follow(student.network, tables).tokens_per_ms for tables in (inputs.train, inputs.validation)]
        fits.append(Fit(seed, round_, student, *rates))
    return fits


def _fit(config: "PairConfig", inputs: Inputs, before: Fit | None, seed: int) -> "FittedStudent":
    """One fit: of the traces' own labels, or of those that follow from the student of the round before."""
    import numpy as np

    from pipeline.student import fit_student
    from treegraft.values.replay import fixed_actions, replay

    settings, validation = config.distill, inputs.validation
    network = None if before is None else before.student.network
    # One rate for the verified sizes throughout a fit: a policy's own is a fixed point that takes several replays.
    start = fixed_actions(validation, inputs.best_fixed) if network is None else decide(network, validation)
    rate = replay(validation, start).decode_rate
    # Independent streams for every pair of seeds, in the 32 bits that numpy's and torch's generators share.
    mixed = int(np.random.SeedSequence([config.seed, seed]).generate_state(1)[0])
    return fit_student(
        labelled(inputs.train, network),
        lambda candidate: replay(validation, decide(candidate, validation), rate).tokens_per_ms,
        hidden=settings.hidden,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        patience=settings.patience,
        seed=mixed,
    )


def labelled(tables: "OutcomeTables", network: "MarginNetwork | None") -> LabelledStates:
    """Training rows with the labels of the traces, or those that hold when ``network`` decides from there on."""
    import numpy as np

    from treegraft.values.replay import replay
    from treegraft.values.values import margins, visit_weights

    values, visits = tables.margins, tables.visits
    if network is not None:
        actions = decide(network, tables)
        result = replay(tables, actions)
        values = margins(tables, actions, result.decode_rate, result.lag).astype(np.float32)
        visits = visit_weights(tables, actions, result.visited).astype(np.float32)
    return LabelledStates(rows_of(tables.features), rows_of(values), visits.reshape(-1))


def follow(predict: "MarginNetwork | Predict", tables: "OutcomeTables") -> "ReplayResult":
    """Replay of the policy that ``predict`` makes."""
    from treegraft.values.replay import replay

    return replay(tables, decide(predict, tables))


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: at these sizes a second one mostly waits, and sums must not depend on the number of cores."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):  # scikit-learn and numpy
            yield
    finally:
        torch.set_num_threads(threads)


# --- finished fits in the scratch folder -----------------------------------------------------------------------------


def _store(path: Path, student: "FittedStudent") -> None:
    """Keep a finished fit: one file, so that it is there as a whole or not at all."""
    import numpy as np
    import safetensors.numpy

    from pipeline.files import write_bytes

    network = student.network
    tensors = {"means": network.means, "scales": network.scales, "scores": np.array(student.scores, dtype=np.float64)}
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        tensors |= {f"weight{layer}": weight, f"bias{layer}": bias}
    write_bytes(path, safetensors.numpy.save(tensors, metadata={"epoch": str(student.epoch)}))


def _stored(path: Path) -> "FittedStudent | None":
    """The fit that ``_store`` kept, or None."""
    import safetensors.numpy

    from pipeline.student import FittedStudent
    from treegraft.scheduling.network import MarginNetwork

    if not path.exists():
        return None
    tensors = safetensors.numpy.load(path.read_bytes())
    layers = range(len(tensors) // 2 - 1)
    network = MarginNetwork(
        [tensors[f"weight{layer}"] for layer in layers],
        [tensors[f"bias{layer}"] for layer in layers],
        tensors["means"],
        tensors["scales"],
    )
    scores = tuple(tensors["scores"].tolist())
    epoch = max(range(len(scores)), key=scores.__getitem__)  # the first of the best, as training chose it
    return FittedStudent(network, scores[epoch], epoch, scores)


# --- what it is worth ------------------------------------------------------------------------------------------------


def measure(config: "PairConfig", inputs: Inputs, fits: list[Fit], best: Fit) -> dict[str, Any]:
    """The content of distill.json; rates are replayed tokens per ms."""
    from pipeline.baselines import BASELINES, fit_baseline

    states = labelled(inputs.train, None)
    learners: dict[str, Any] = {"student": best.student.network}
    learners |= {name: fit_baseline(name, states) for name in BASELINES}
    names = [drafter.name for drafter in config.drafters]
    splits = {"train": inputs.train, "validation": inputs.validation, "test": inputs.test}
    replay = {split: _rates(tables, learners, inputs.best_fixed, names) for split, tables in splits.items()}
    return {
        "schema": SCHEMA,
        "pair": config.slug,
        "replay": replay,
        "speedup": {
            split: {name: rate / rates["plain"] for name, rate in rates.items()} for split, rates in replay.items()
        },
        "captured": {split: _captured(rates, [*learners, "fixed"]) for split, rates in replay.items()},
        "cross_validation": cross_validate(inputs.train, states),
        "best_fixed": list(inputs.best_fixed),
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


def _rates(
    tables: "OutcomeTables", learners: dict[str, Any], schedule: tuple[int, ...], drafters: list[str]
) -> dict[str, float]:
    """Replayed rate of everything that can be compared on one split."""
    from treegraft.values.replay import oracle, plain, replay_fixed

    def fixed(actions: tuple[int, ...]) -> float:
        return replay_fixed(tables, actions).tokens_per_ms

    depth, last = len(schedule), len(drafters) - 1
    rates = {"plain": plain(tables).tokens_per_ms, "ngram": fixed((0,) * depth), "strong": fixed((last,) * depth)}
    # With more than two drafters, those between the light and the dearest one go by their names.
    rates |= {f"always_{drafters[j]}": fixed((j,) * depth) for j in range(1, last)}
    rates["fixed"] = fixed(schedule)
    rates |= {name: follow(learner, tables).tokens_per_ms for name, learner in learners.items()}
    rates["oracle"] = oracle(tables).tokens_per_ms
    return rates


def _captured(rates: dict[str, float], names: list[str]) -> dict[str, float | None]:
    """Share of the way from the best single drafter to the oracle; None where the oracle is no faster."""
    single = max(rate for name, rate in rates.items() if name in ("ngram", "strong") or name.startswith("always_"))
    headroom = rates["oracle"] - single
    return {name: (rates[name] - single) / headroom if headroom > 0 else None for name in names}


def cross_validate(tables: "OutcomeTables", states: LabelledStates) -> dict[str, Any]:
    """Every baseline's replayed rate on the training tables, each prompt decided by a model that never saw it."""
    import numpy as np

    from pipeline.baselines import BASELINES, fit_baseline, grouped_folds
    from treegraft.values.replay import replay
    from treegraft.values.values import greedy_actions

    positions, states_each = tables.features.shape[:2]
    # Turns of one prompt (<kind>/<question>/<turn>) stay together.
    prompts = np.array([turn.rsplit("/", 1)[0] for turn in tables.prompt_ids])
    folds = list(grouped_folds(np.repeat(prompts[tables.prompt_of], states_each), FOLDS))
    rates: dict[str, float | None] = dict.fromkeys(BASELINES)
    for name in BASELINES if folds else ():
        actions = np.zeros(positions * states_each, dtype=np.int64)
        for fitted, held_out in folds:
            rows = LabelledStates(states.features[fitted], states.margins[fitted], states.weights[fitted])
            actions[held_out] = greedy_actions(fit_baseline(name, rows)(states.features[held_out]))
        rates[name] = replay(tables, actions.reshape(positions, states_each)).tokens_per_ms
    return {"folds": len(folds), "tokens_per_ms": rates}


def _size(tables: "OutcomeTables") -> dict[str, int]:
    return {
        "turns": len(tables.prompt_ids),
        "positions": tables.features.shape[0],
        "states": tables.features.shape[0] * tables.features.shape[1],
    }


# --- reading and exporting -------------------------------------------------------------------------------------------


def read_inputs(config: "PairConfig") -> Inputs:
    """Read the traces and check that they belong to the settings of now.

    Raises:
        UserError: they are missing, incomplete, not finite, or were made with other drafters, depth or features.
    """
    from treegraft.values.replay import best_fixed
    from treegraft.values.validation import read_validated

    folder, redo = config.paths.traces, f"run `pipeline traces {config.slug}` again"
    if len(config.drafters) < 2:
        raise UserError(
            f"{config.slug} has one drafter, so there is nothing to schedule; add a dearer one to params.yaml."
        )
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; run `pipeline traces {config.slug}` first.")
    tables = read_validated(folder)
    for split, table in tables.items():
        _check_tables(config, table, f"{folder}, {split}", redo)
    return Inputs(
        tables["train"],
        tables["validation"],
        tables["test"],
        read_json(folder / "calibration.json", redo),
        read_json(folder / "manifest.json", redo)["temperature"],
        _tokenizers(folder / "profile.json", redo),
        best_fixed(tables["validation"]),
        _digest(config),
    )


def _check_tables(config: "PairConfig", tables: "OutcomeTables", where: str, redo: str) -> None:
    """Settings and feature names of one split."""
    from treegraft.scheduling.features import feature_names

    settings, drafters = config.decoding.settings(), len(config.drafters)
    names = feature_names(settings.depth, drafters)
    for what, wanted, found in (
        ("depth", settings.depth, tables.depth),
        ("number of drafters", drafters, tables.drafters),
        ("verified sizes", list(settings.verified_sizes), list(tables.sizes)),
        ("features", names, list(tables.feature_names)),
    ):
        if wanted != found:
            raise UserError(f"{where}: these traces were made with other {what} ({found}, now {wanted}); {redo}.")


def _tokenizers(path: Path, redo: str) -> dict[str, str]:
    """The hashes of the pair's tokenizers, which the profile recorded."""
    hashes = read_json(path, redo).get("tokenizer_hashes")
    if not isinstance(hashes, dict) or not hashes:
        raise UserError(f"{path} has no tokenizer_hashes; {redo}.")
    return hashes


def _digest(config: "PairConfig") -> str:
    """Of all that the fits depend on, so that a finished fit is never taken for one of other inputs."""
    import treegraft.values.replay
    from pipeline.files import file_digest, json_text

    here, values = Path(__file__), Path(treegraft.values.replay.__file__).parent
    code = [here, here.with_name("student.py"), *values.glob("*.py"), *(values.parent / "scheduling").glob("*.py")]
    parts = {
        "traces": {str(path): file_digest(path) for path in config.paths.traces.rglob("*") if path.is_file()},
        "code": {f"{path.parent.name}/{path.name}": file_digest(path) for path in code},
        "distill": config.distill.model_dump(mode="json"),
        "decoding": config.decoding.model_dump(mode="json"),
        "seed": config.seed,
        "versions": _versions(),
    }
    return hashlib.sha256(json_text(parts).encode()).hexdigest()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "lightning", "numpy", "scikit-learn")}


def _scheduler_config(config: "PairConfig", inputs: Inputs, best: Fit, metrics: dict[str, Any]) -> "SchedulerConfig":
    """Everything but the weights, without times or host names, so that equal inputs give equal bytes."""
    from treegraft.scheduling.checkpoint import SchedulerConfig

    costs = inputs.train.costs
    network = best.student.network
    settings = config.decoding.settings()
    seen = [follow(network, tables) for tables in (inputs.train, inputs.validation)]
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
            "inputs_digest": inputs.digest,
            "versions": _versions(),
        },
    )
