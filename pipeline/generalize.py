"""The command `pipeline generalize`: one student for many pairs and machines, tested on what it never saw.

Reads the traces of several pairs. Each is taken under the costs that were measured and under those of imagined hardware
(treegraft/values/regimes.py); a pair in a regime is a *cell*. One general student is trained on the training prompts
of the trained pairs in the measured regime and those of the grid; epoch, round and seed are chosen by its replayed
speed on their validation prompts, as a share of each cell's best fixed schedule. For comparison every cell gets a
student of its own, trained on that pair and regime alone. Held-out pairs and regimes are for testing. Writes::

    reports/<name>/generalize.json      all speeds on the test prompts (pipeline/generalize_report.py)
    .treegraft/<name>/generalize/       finished labels and fits, from which a killed run goes on
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.distill_inputs import Inputs, fits_digest, read_inputs
from pipeline.files import file_digest, scratch_folder
from pipeline.labelled import Admission, LabelledStates
from pipeline.students import (
    Fit,
    by_visits,
    choose,
    fit_one,
    fit_states,
    follow,
    kept,
    labelled,
    least_squares,
    one_thread,
    replayed_speed,
    rounds,
    savings,
    train_rounds,
    train_students,
)
from treegraft.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from pipeline.params import PairConfig
    from pipeline.student import FittedStudent
    from treegraft.costs import CostModel
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.regimes import Regime
    from treegraft.values.tables import OutcomeTables


@dataclass(frozen=True)
class Cell:
    """One pair in one regime."""

    pair: str
    regime: "Regime"
    inputs: Inputs
    """Of the pair under the regime's costs; the training tables are labelled."""
    seen: bool
    """Whether the general student is trained on it."""

    @property
    def name(self) -> str:
        """For file names."""
        return f"{self.pair}-{self.regime.name}"

    @property
    def general(self) -> Inputs:
        """The same as the general student sees it: without milliseconds."""
        from treegraft.values.regimes import scale_free

        inputs = self.inputs
        return replace(
            inputs,
            train=scale_free(inputs.train),
            validation=scale_free(inputs.validation),
            test=scale_free(inputs.test),
        )


def run(name: str, trained: "Sequence[PairConfig]", held_out: "Sequence[PairConfig]" = ()) -> None:
    """Train on the pairs ``trained``, test on them and on ``held_out``; write the report and print its tables.

    Settings of section distill, traces and the seed are those of the first pair.

    Raises:
        UserError: as stage distill does for each pair's traces; pairs that do not fit one another; a bad name.
    """
    from pipeline.files import write_json
    from pipeline.generalize_report import general_report, markdown
    from pipeline.progress import progress

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"'{name}' cannot be the name of a report; take letters, digits, '.', '_' and '-'.")
    check_alike(trained, held_out)
    inputs = {config.slug: read_inputs(config) for config in (*trained, *held_out)}
    check_prompts({config.slug: inputs[config.slug] for config in trained}, inputs)
    main = trained[0]
    folder = scratch_folder(Path(".treegraft") / name / "generalize", _parts(trained, held_out))
    with one_thread():
        cells = make_cells(main, inputs, [config.slug for config in trained], folder)
        fits = train_general(main, cells, folder)
        best = choose(fits)
        rule = fit_saving_rule(best.student.network, [cell.general for cell in cells if cell.seen])
        own = {cell.name: choose(train_own(main, cell, folder)) for cell in progress(cells, desc="own students")}
        report = general_report(name, cells, fits, best, rule, own)
    path = Path("reports") / name / "generalize.json"
    write_json(path, report)
    print(markdown(report))
    print(f"Written to {path}.")


def check_alike(trained: "Sequence[PairConfig]", held_out: "Sequence[PairConfig]") -> None:
    """That pairs share what a network's inputs mean, and none is named twice; UserError otherwise."""
    first = trained[0]
    slugs = [config.slug for config in (*trained, *held_out)]
    if twice := [slug for slug in slugs if slugs.count(slug) > 1]:
        raise UserError(f"The pair {twice[0]} is named twice; a pair is either trained on or held out.")
    for config in (*trained[1:], *held_out):
        for what, wanted, found in (
            ("decoding.depth", first.decoding.depth, config.decoding.depth),
            ("number of drafters", len(first.drafters), len(config.drafters)),
        ):
            if wanted != found:
                raise UserError(
                    f"{config.slug} has {what} {found} and {first.slug} has {wanted}; one scheduler needs equal ones."
                )


def check_prompts(trained: dict[str, Inputs], tested: dict[str, Inputs]) -> None:
    """That no question is a training prompt of one pair and a test prompt of another; UserError otherwise."""
    for pair, inputs in trained.items():
        known = {*inputs.train.questions, *inputs.validation.questions}
        for other, held in tested.items():
            if both := sorted(known.intersection(held.test.questions)):
                raise UserError(
                    f"The question {both[0]} is a training prompt of {pair} and a test prompt of {other}; "
                    "label both pairs with the same prompts.sources."
                )


def _parts(trained: "Sequence[PairConfig]", held_out: "Sequence[PairConfig]") -> dict[str, Any]:
    """All that labels and fits depend on."""
    here = Path(__file__).parent
    main = trained[0]
    settings = main.distill.model_dump(mode="json") | main.traces.model_dump(mode="json") | {"main_seed": main.seed}
    return {
        "trained": {config.slug: fits_digest(config, settings) for config in trained},
        "held_out": {config.slug: fits_digest(config, settings) for config in held_out},
        "code": {module: file_digest(here / f"{module}.py") for module in ("baselines", "generalize", "relabel")},
    }


# --- cells -----------------------------------------------------------------------------------------------------------


def make_cells(config: "PairConfig", inputs: dict[str, Inputs], trained: list[str], folder: Path) -> list[Cell]:
    """Every pair in every regime, labelled."""
    from pipeline.progress import progress
    from treegraft.values.regimes import GRID, HELD_OUT, MEASURED

    pieces = [(pair, regime) for pair in inputs for regime in (MEASURED, *GRID, *HELD_OUT)]
    cells = []
    for pair, regime in progress(pieces, desc="labels", unit="regime"):
        path = folder / f"labels-{pair}-{regime.name}.npz"
        there = in_regime(inputs[pair], regime, config.traces.policy_iterations, path)
        seen = pair in trained and regime not in HELD_OUT
        cells.append(Cell(pair, regime, there.with_features(config.distill.features), seen))
    return cells


def in_regime(inputs: Inputs, regime: "Regime", iterations: int, path: Path) -> Inputs:
    """A pair's tables under the costs of ``regime``, relabelled as stage traces labels; ``path`` keeps the labels."""
    from io import BytesIO

    import numpy as np

    from pipeline.files import write_bytes
    from pipeline.label_work import npz_bytes
    from pipeline.relabel import label_training
    from treegraft.values.regimes import MEASURED, recosted, regime_costs
    from treegraft.values.replay import best_fixed

    if regime == MEASURED:
        return inputs  # the traces' own labels are of these costs
    costs = regime_costs(inputs.train.costs, regime)
    train, validation, test = (recosted(part, costs) for part in (inputs.train, inputs.validation, inputs.test))
    if not path.exists():
        labels = label_training(train, iterations).labelling
        write_bytes(path, npz_bytes({"margins": labels.margins, "visits": labels.visits}))
    with np.load(BytesIO(path.read_bytes())) as stored:
        train = train.labelled(stored["margins"], stored["visits"])
    return replace(inputs, train=train, validation=validation, test=test, best_fixed=best_fixed(validation))


# --- students --------------------------------------------------------------------------------------------------------


def train_general(config: "PairConfig", cells: list[Cell], folder: Path) -> list[Fit]:
    """All fits of the general student; nothing but the cells that are ``seen`` is looked at."""
    from pipeline.progress import progress

    seen = [cell.general for cell in cells if cell.seen]

    def fit(seed: int, number: int, before: Fit | None) -> "FittedStudent":
        path = folder / f"general-seed-{seed}-round-{number}.safetensors"
        return kept(path, lambda: fit_general(config, seen, seed, before))

    def speeds(network: "MarginNetwork") -> tuple[float, float]:
        return (
            _over_fixed(network, [(part.train, part.best_fixed) for part in seen]),
            _over_fixed(network, [(part.validation, part.best_fixed) for part in seen]),
        )

    return train_rounds(progress(rounds(config), desc="general student", unit="fit"), fit, speeds)


def fit_general(config: "PairConfig", seen: list[Inputs], seed: int, before: Fit | None) -> "FittedStudent":
    """One fit on all cells together, scored by the mean of its speeds over each cell's best fixed schedule."""
    import numpy as np

    from treegraft.values.replay import replay_fixed

    network = None if before is None else before.student.network
    states = joined([by_visits(config, labelled(part.train, network)) for part in seen])
    scores = [replayed_speed(part, before) for part in seen]
    fixed = [replay_fixed(part.validation, part.best_fixed).warm_tokens_per_ms for part in seen]

    def score(candidate: "MarginNetwork") -> float:
        return float(np.mean([one(candidate) / base for one, base in zip(scores, fixed, strict=True)]))

    return fit_states(config, states, score, seed)


def joined(parts: list[LabelledStates]) -> LabelledStates:
    """The rows of several cells, each cell weighing as much as any other, as it does in the score."""
    import numpy as np

    return LabelledStates(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.margins for part in parts]),
        np.concatenate([part.weights / part.weights.mean() / len(part.weights) for part in parts]),
    )


def _over_fixed(network: "MarginNetwork", parts: "list[tuple[OutcomeTables, tuple[int, ...]]]") -> float:
    """Mean speed over the best fixed schedule, passes over prompts left out."""
    import numpy as np

    from treegraft.values.replay import replay_fixed

    return float(
        np.mean(
            [
                follow(network, tables).warm_tokens_per_ms / replay_fixed(tables, schedule).warm_tokens_per_ms
                for tables, schedule in parts
            ]
        )
    )


def train_own(config: "PairConfig", cell: Cell, folder: Path) -> list[Fit]:
    """All fits of the student that knows one cell alone."""

    def fit(seed: int, number: int, before: Fit | None) -> "FittedStudent":
        path = folder / f"own-{cell.name}-seed-{seed}-round-{number}.safetensors"
        return kept(path, lambda: fit_one(config, cell.inputs, seed, before))

    return train_students(cell.inputs, rounds(config), fit)


# --- admission without milliseconds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavingRule:
    """What calls save on a token, as a share of one of the target's, linear in what a cost model says of a machine and
    in the log of the prompt's length.

    A pair's own scheduler has this from replay of its traces; a pair that was never seen has none.
    """

    coefficients: "np.ndarray"
    """Of ``machine`` and the log, [n + 1]."""
    prompt_tokens: tuple[int, ...]
    """Of the shortest and the longest prompt seen; one number if these are alike."""

    def admission(self, costs: "CostModel", new_tokens: int) -> Admission:
        """For requests of ``new_tokens`` on a machine."""
        import numpy as np

        from treegraft.scheduling.admission import Saving
        from treegraft.values.regimes import token_ms

        shares = self.coefficients[:-1] @ machine(costs) + self.coefficients[-1] * np.log(self.prompt_tokens)
        return Admission(Saving(self.prompt_tokens, tuple((shares * token_ms(costs)).tolist())), new_tokens)


def machine(costs: "CostModel") -> "np.ndarray":
    """What the rule looks at: 1, log cost ratio, growth of verification; none of it has a unit of time."""
    import numpy as np

    from treegraft.values.regimes import cost_ratio, verify_growth

    return np.array([1.0, np.log(cost_ratio(costs)), *verify_growth(costs)])


def fit_saving_rule(network: "MarginNetwork", seen: list[Inputs]) -> SavingRule:
    """Least squares over the turns of the cells that the general student was trained on, which weigh alike."""
    import numpy as np

    from treegraft.values.regimes import token_ms

    columns, shares, weights, seen_lengths = [], [], [], []
    for part in seen:
        costs = part.train.costs
        lengths, saved, tokens = savings(network, part)
        columns.append(np.column_stack([np.tile(machine(costs), (len(lengths), 1)), np.log(lengths)]))
        shares.append(saved / token_ms(costs))
        weights.append(tokens / tokens.sum())
        seen_lengths.append(lengths)
    found = least_squares(np.concatenate(columns), np.concatenate(shares), np.concatenate(weights))
    every = np.concatenate(seen_lengths)
    return SavingRule(found, tuple(np.unique([every.min(), every.max()]).tolist()))
