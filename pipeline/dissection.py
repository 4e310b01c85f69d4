"""What a learner makes of the traces: by the number of training prompts, and feature by feature.

Everything is judged by replay on the test prompts, summed by turn. Subsets, dropped and permuted features go through
the very functions that stage distill trains and replays with.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.headroom import turn_sums
from pipeline.students import admission_of, fit_one, follow, labelled

if TYPE_CHECKING:
    from pipeline.bootstrap import Sums
    from pipeline.distill_inputs import Inputs
    from pipeline.labelled import Admission, Predict
    from pipeline.params import PairConfig
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.tables import OutcomeTables

FRACTIONS = (0.125, 0.25, 0.5, 1.0)
STUDENT = "student"
CONSTANT = "constant in a request"
CALLED = "called{j}_layer{l}"


def on_test(learner: "MarginNetwork | Predict", inputs: "Inputs", admission: "Admission | None" = None) -> "Sums":
    """The learner's policy on the test prompts; ``admission``: None weighs it on training and validation prompts."""
    return turn_sums([follow(learner, inputs.test, admission or admission_of(learner, inputs))])


def fit_learners(config: "PairConfig", inputs: "Inputs", seed: int) -> "dict[str, MarginNetwork | Predict]":
    """A student of the traces' own labels (round 0) and every baseline, of the training prompts of ``inputs``."""
    from pipeline.baselines import BASELINES, fit_baseline

    states = labelled(inputs.train, None)
    found: dict[str, MarginNetwork | Predict] = {STUDENT: fit_one(config, inputs, seed, None).network}
    return found | {name: fit_baseline(name, states) for name in BASELINES}


# --- how many prompts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurvePoint:
    """What learners reach with a share of the training prompts."""

    fraction: float
    questions: int
    turns: tuple[int, ...]
    """Of each subset; questions may have several."""
    runs: "dict[str, list[Sums]]"
    """By learner, one for each subset, on the test prompts."""


def learning_curve(
    config: "PairConfig", inputs: "Inputs", repeats: int, seed: int, fractions: Sequence[float] = FRACTIONS
) -> list[CurvePoint]:
    """Learners on random subsets of the training questions, ``repeats`` of each size, one where it is all of them.

    The labels stay those of the traces and the validation prompts, which choose the student's epoch, stay all of them.
    ``seed``: of the student.
    """
    from pipeline.progress import progress

    whole = range(len(inputs.train.prompt_ids))
    work: list[tuple[float, list[np.ndarray]]] = []
    for fraction in fractions:
        draws = [subset(inputs.train, fraction, config.seed, repeat) for repeat in range(repeats)]
        work.append((fraction, draws[:1] if len(draws[0]) == len(whole) else draws))
    steps = iter(progress(range(sum(len(draws) for _, draws in work)), desc="learning curve", unit="subset"))
    points = []
    for fraction, draws in work:
        runs: dict[str, list[Sums]] = {}
        for turns in draws:
            next(steps)
            part = replace(inputs, train=inputs.train.select(turns))
            for name, learner in fit_learners(config, part, seed).items():
                runs.setdefault(name, []).append(on_test(learner, part))
        questions = len({inputs.train.questions[turn] for turn in draws[0]})
        points.append(CurvePoint(fraction, questions, tuple(len(turns) for turns in draws), runs))
    list(steps)  # says that all is done
    return points


def subset(tables: "OutcomeTables", fraction: float, seed: int, repeat: int) -> np.ndarray:
    """A share of every kind's questions, at least one, with all their turns: indices of turns, ascending.

    The smaller subsets of one ``repeat`` are parts of its larger ones.
    """
    questions, kept = tables.questions, set()
    for kind in dict.fromkeys(tables.kinds):
        own = list(dict.fromkeys(q for q, k in zip(questions, tables.kinds, strict=True) if k == kind))
        order = np.random.default_rng([seed, repeat, zlib.crc32(kind.encode())]).permutation(len(own))
        kept |= {own[i] for i in order[: max(1, round(fraction * len(own)))]}
    return np.flatnonzero([question in kept for question in questions])


def trend(halves: Sequence[float], whole: float, noise: float = 0.0) -> str:
    """What figures of several halves of the prompts and of all of them show.

    noise: by how much the figure of all differs from training to training.
    """
    gain = whole - float(np.mean(halves))
    if whole > max(halves) and gain > noise:
        return "still rises"
    if whole < min(halves) and -gain > noise:
        return "falls"
    return "shows no change beyond its spread"


# --- which features --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ablation:
    """What one unit or group of features is worth: one run for every seed (retrained) or seed and draw (permuted)."""

    features: tuple[str, ...]
    dropped: "list[Sums]"
    permuted: "list[list[Sums]]"
    """By seed."""


def feature_units(tables: "OutcomeTables") -> dict[str, list[str]]:
    """The tables' features by what is left out at once: what says the same stays together, the rest stands alone."""
    from treegraft.scheduling.features import feature_names

    every = feature_names(tables.depth, tables.drafters)
    constant = every[: every.index("layer_share")]
    units: dict[str, list[str]] = {}
    for name in tables.feature_names:
        unit = CONSTANT if name in constant else CALLED if name.startswith("called") else name
        units.setdefault(unit, []).append(name)
    return units


def present_groups(tables: "OutcomeTables") -> dict[str, list[str]]:
    """The groups of ``feature_groups`` as far as the tables have them."""
    from treegraft.scheduling.features import feature_groups

    known = feature_groups(tables.depth, tables.drafters)
    groups = {group: [name for name in names if name in tables.feature_names] for group, names in known.items()}
    return {group: names for group, names in groups.items() if names}


def ablate(
    config: "PairConfig",
    inputs: "Inputs",
    networks: "dict[int, MarginNetwork]",
    names: Sequence[str],
    draws: int,
) -> Ablation:
    """Train without ``names``, and permute them under the full networks (by seed, round 0).

    Where ``names`` are all features there is nothing to train on, so ``dropped`` is empty.
    """
    seeds = list(networks) if set(names) != set(inputs.train.feature_names) else []
    return Ablation(
        tuple(names),
        [drop(config, inputs, names, seed) for seed in seeds],
        [permute(network, inputs, names, draws, config.seed) for network in networks.values()],
    )


def drop(config: "PairConfig", inputs: "Inputs", names: Sequence[str], seed: int) -> "Sums":
    """A student of round 0 that never saw the features ``names``."""
    rest = [name for name in inputs.train.feature_names if name not in names]
    splits = {split: getattr(inputs, split).with_features(rest) for split in ("train", "validation", "test")}
    fewer = replace(inputs, **splits)
    return on_test(fit_one(config, fewer, seed, None).network, fewer)


def permute(network: "MarginNetwork", inputs: "Inputs", names: Sequence[str], draws: int, seed: int) -> "list[Sums]":
    """The network with ``names`` shuffled among the test prompts' states, several times; what it admits stays."""
    admission = admission_of(network, inputs)
    found = []
    for draw in range(draws):
        random = np.random.default_rng([seed, draw, zlib.crc32(",".join(names).encode())])
        found.append(on_test(network, replace(inputs, test=permuted(inputs.test, names, random)), admission))
    return found


def permuted(tables: "OutcomeTables", names: Sequence[str], random: np.random.Generator) -> "OutcomeTables":
    """The tables with the features ``names``, together, shuffled among the states of the same layer."""
    from treegraft.values.states import offset

    columns = [tables.feature_names.index(name) for name in names]
    features = tables.features.copy()
    for layer in range(tables.depth):
        states = slice(offset(layer, tables.drafters), offset(layer + 1, tables.drafters))
        own = features[:, states, columns]  # [P, states, columns]
        rows = own.reshape(-1, len(columns))
        features[:, states, columns] = rows[random.permutation(len(rows))].reshape(own.shape)
    return replace(tables, features=features)
