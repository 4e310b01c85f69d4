"""Students by policy iteration, and the files of finished ones.

Fit the labels of the traces, follow the student's own decisions through the training tables, label again at the speed
this gives, fit again. Replayed speed on the validation prompts decides when a round was the last.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.labelled import Admission, LabelledStates, decide, rows_of

if TYPE_CHECKING:
    import numpy as np

    from pipeline.baselines import Predict
    from pipeline.distill_inputs import Inputs
    from pipeline.params import PairConfig
    from pipeline.student import FittedStudent
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.replay import ReplayResult
    from treegraft.values.tables import OutcomeTables


@dataclass(frozen=True)
class Fit:
    """One finished fit: the student of one seed and one round of policy iteration."""

    seed: int
    round: int
    student: "FittedStudent"
    train: float
    """Replayed tokens per ms on the training tables, drafters' passes over prompts left out; of the general student
    of several cells (pipeline/generalize.py) the mean of these over each cell's best fixed schedule."""
    validation: float
    """The same on the validation tables."""


def rounds(config: "PairConfig") -> list[tuple[int, int]]:
    """Every seed and round that may be fitted, seed by seed."""
    return [(seed, number) for seed in config.distill.seeds for number in range(config.distill.policy_iterations + 1)]


def train_students(
    inputs: "Inputs", work: Iterable[tuple[int, int]], fit: "Callable[[int, int, Fit | None], FittedStudent]"
) -> list[Fit]:
    """All fits of ``work`` on one pair's tables; see ``train_rounds``."""

    def speeds(network: "MarginNetwork") -> tuple[float, float]:
        train, validation = (follow(network, part).warm_tokens_per_ms for part in (inputs.train, inputs.validation))
        return train, validation

    return train_rounds(work, fit, speeds)


def train_rounds(
    work: Iterable[tuple[int, int]],
    fit: "Callable[[int, int, Fit | None], FittedStudent]",
    speeds: "Callable[[MarginNetwork], tuple[float, float]]",
) -> list[Fit]:
    """All fits of ``work`` (see ``rounds``); a seed ends early when a round is no faster than the one before.

    ``fit``: (seed, round, the fit of the round before) -> student; ``speeds``: a student's on training and validation.
    """
    fits: list[Fit] = []
    for seed, number in work:
        before = [fit for fit in fits if fit.seed == seed]
        if len(before) < number or (number >= 2 and before[-1].validation <= before[-2].validation):
            continue  # this seed has ended
        student = fit(seed, number, before[-1] if before else None)
        fits.append(Fit(seed, number, student, *speeds(student.network)))
    return fits


def choose(fits: list[Fit]) -> Fit:
    """The fit with the best replayed speed on validation; at a tie the earlier round, then the earlier seed."""
    return max(fits, key=lambda fit: (fit.validation, -fit.round, -fits.index(fit)))


def kept(path: Path, fit: "Callable[[], FittedStudent]") -> "FittedStudent":
    """The student stored in ``path``, or the one that ``fit`` trains, which is stored there."""
    student = stored(path)
    if student is None:
        student = fit()
        store(path, student)
    return student


def fit_one(
    config: "PairConfig",
    inputs: "Inputs",
    seed: int,
    before: Fit | None,
    watch: Callable[[float], None] = lambda score: None,
) -> "FittedStudent":
    """One fit: of the traces' own labels, or of those that follow from the student of the round before.

    ``watch`` gets the replayed validation speed after every epoch; what it raises ends the training.
    """

    score = replayed_speed(inputs, before)

    def watched(candidate: "MarginNetwork") -> float:
        speed = score(candidate)
        watch(speed)
        return speed

    states = labelled(inputs.train, None if before is None else before.student.network)
    return fit_states(config, by_visits(config, states), watched, seed)


def replayed_speed(inputs: "Inputs", before: Fit | None) -> "Callable[[MarginNetwork], float]":
    """What scores the students of one fit: tokens per ms on the validation prompts, passes over prompts left out."""
    from treegraft.values.replay import fixed_actions, replay

    validation = inputs.validation
    # One rate for the verified sizes throughout a fit: a policy's own is a fixed point that takes several replays.
    start = (
        fixed_actions(validation, inputs.best_fixed) if before is None else decide(before.student.network, validation)
    )
    rate = replay(validation, start).decode_rate
    return lambda candidate: replay(validation, decide(candidate, validation), rate).warm_tokens_per_ms


def by_visits(config: "PairConfig", states: LabelledStates) -> LabelledStates:
    """The rows with the weights that section distill makes of their visits."""
    import numpy as np

    visited = states.weights > 0  # 0 leaves a row out, whatever the exponent
    return replace(states, weights=np.where(visited, states.weights**config.distill.visit_exponent, 0.0))


def fit_states(
    config: "PairConfig", states: LabelledStates, score: "Callable[[MarginNetwork], float]", seed: int
) -> "FittedStudent":
    """Train one student on labelled states with the settings of section distill."""
    import numpy as np

    from pipeline.student import fit_student

    settings = config.distill
    # Independent streams for every pair of seeds, in the 32 bits that numpy's and torch's generators share.
    mixed = int(np.random.SeedSequence([config.seed, seed]).generate_state(1)[0])
    return fit_student(
        states,
        score,
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


def follow(
    predict: "MarginNetwork | Predict", tables: "OutcomeTables", admission: Admission | None = None
) -> "ReplayResult":
    """Replay of the policy that ``predict`` makes; ``admission`` as ``decide`` takes it."""
    from treegraft.values.replay import replay

    return replay(tables, decide(predict, tables, admission))


def admission_of(predict: "MarginNetwork | Predict", inputs: "Inputs") -> Admission:
    """What calls save on a token of the training and validation prompts: the line, over the log of a prompt's length,
    that fits the turns best."""
    import numpy as np

    from treegraft.scheduling.admission import Saving

    lengths, saved, tokens = savings(predict, inputs)
    ends = np.unique([lengths.min(), lengths.max()])  # one where all prompts are of one length
    line = least_squares(np.vander(np.log(lengths), 2), saved, tokens)
    saving = Saving(tuple(ends.tolist()), tuple((np.vander(np.log(ends), 2) @ line).tolist()))
    return Admission(saving, inputs.new_tokens)


def least_squares(columns: "np.ndarray", values: "np.ndarray", weights: "np.ndarray") -> "np.ndarray":
    """Coefficients [k] of columns [n, k] that come closest to values [n], squares weighted by ``weights`` [n]."""
    import numpy as np

    root = np.sqrt(weights)
    found: np.ndarray = np.linalg.lstsq(columns * root[:, None], values * root, rcond=None)[0]
    return found


def savings(predict: "MarginNetwork | Predict", inputs: "Inputs") -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Of every turn of the training and validation prompts, each [n]: the prompt's tokens, the milliseconds that
    calls save on a token of the answer against drafting with n-grams alone, passes over prompts left out, and the
    answer's tokens."""
    import numpy as np

    from treegraft.values.replay import replay_fixed

    lengths, saved, tokens = [], [], []
    for tables in (inputs.train, inputs.validation):
        calling, never = follow(predict, tables), replay_fixed(tables, ())
        lengths.append(tables.prompt_tokens)
        saved.append((never.decode_ms - (calling.decode_ms - calling.pass_ms)) / calling.tokens)
        tokens.append(calling.tokens)
    return np.concatenate(lengths), np.concatenate(saved), np.concatenate(tokens)


@contextmanager
def one_thread() -> Iterator[None]:
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


# --- finished fits as files ------------------------------------------------------------------------------------------


def store(path: Path, student: "FittedStudent") -> None:
    """Keep a finished fit: one file, so that it is there as a whole or not at all."""
    import numpy as np
    import safetensors.numpy

    from pipeline.files import write_bytes

    network = student.network
    tensors = {"means": network.means, "scales": network.scales, "scores": np.array(student.scores, dtype=np.float64)}
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        tensors |= {f"weight{layer}": weight, f"bias{layer}": bias}
    write_bytes(path, safetensors.numpy.save(tensors, metadata={"epoch": str(student.epoch)}))


def stored(path: Path) -> "FittedStudent | None":
    """The fit that ``store`` kept, or None."""
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
