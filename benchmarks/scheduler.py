"""What a scheduler learns from the traces of a pair: from how many prompts, from which features, against what.

    python benchmarks/scheduler.py smollm2-135m --output scheduler.md

Reads the traces as stage distill does and prints Markdown tables: a learning curve of the student and of the simpler
learners, an ablation of the student's features, and all policies side by side. Every figure is replayed on the test
prompts, as speed over plain decoding and as captured share of the headroom: 0 is the better single drafter, 1 the
clairvoyant oracle. Fits that stage distill has finished are taken over, missing ones are trained and left for it.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.bootstrap import Sums
    from pipeline.dissection import Ablation, CurvePoint
    from pipeline.distill_inputs import Inputs
    from pipeline.headroom import Yardsticks
    from pipeline.params import PairConfig
    from pipeline.students import Fit
    from treegraft.values.tables import OutcomeTables


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print; bad input ends it with one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="slug of a pair in params.yaml whose traces are there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables there too")
    parser.add_argument("--repeats", type=_count, default=3, help="random subsets of each size in the learning curve")
    parser.add_argument("--seeds", type=_count, default=1, help="first of distill.seeds that train without a feature")
    parser.add_argument("--draws", type=_count, default=3, help="permutations of each feature, for each of these seeds")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a parameter")
    options = parser.parse_args(arguments)

    from pipeline.files import write_text
    from pipeline.params_file import load_pair
    from treegraft.errors import UserError

    try:
        text = study(load_pair(options.pair, options.set), options.repeats, options.seeds, options.draws)
        print(text, end="")
        if options.output is not None:
            write_text(options.output, text)
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def study(config: "PairConfig", repeats: int, seeds: int, draws: int) -> str:
    """All tables of a pair as Markdown; equal traces and settings give equal text."""
    from pipeline.dissection import learning_curve
    from pipeline.distill import finish_fits
    from pipeline.distill_inputs import fits_digest, read_inputs
    from pipeline.headroom import yardsticks
    from pipeline.students import one_thread

    inputs = read_inputs(config).with_features(config.distill.features)
    with one_thread():
        fits = finish_fits(config, inputs, fits_digest(config, config.distill.model_dump(mode="json")))
        measures = yardsticks([inputs.test])
        first = config.distill.seeds[0]
        full = FullModel.of(inputs, fits)
        parts = [
            _introduction(config, inputs, measures),
            curve_section(learning_curve(config, inputs, repeats, first), measures, full, first),
            ablation_section(config, inputs, measures, full, seeds, draws),
            policies_section(config, inputs, measures, fits),
        ]
    return "\n".join(parts)


@dataclass(frozen=True)
class FullModel:
    """Students of round 0 with all features and all prompts, by seed."""

    fits: "dict[int, Fit]"
    runs: "dict[int, Sums]"
    """On the test prompts."""

    @classmethod
    def of(cls, inputs: "Inputs", fits: "list[Fit]") -> "FullModel":
        """Those among ``fits``, replayed."""
        from pipeline.dissection import on_test

        own = {fit.seed: fit for fit in fits if fit.round == 0}
        return cls(own, {seed: on_test(fit.student.network, inputs) for seed, fit in own.items()})

    def spread(self, measures: "Yardsticks") -> float:
        """Fastest seed's speed over plain decoding minus the slowest's."""
        speeds = [measures.speed(run) for run in self.runs.values()]
        return max(speeds) - min(speeds)

    def summary(self, measures: "Yardsticks") -> str:
        """Mean and range in a sentence's middle."""
        speeds = [measures.speed(run) for run in self.runs.values()]
        return f"{_mean_and_range(speeds, _speed)} over the seeds {', '.join(map(str, self.runs))}"


def _introduction(config: "PairConfig", inputs: "Inputs", measures: "Yardsticks") -> str:

    def size(tables: "OutcomeTables") -> str:
        return f"{len(tables.prompt_ids)} turns of {len(set(tables.questions))} questions"

    distill = config.distill
    names = [_alone_name(config, plan) for plan in measures.alone]
    better = max(range(len(names)), key=lambda j: measures.fixed[measures.alone[j]].rate)
    return f"""# What the scheduler of {config.slug} learns

Traces: {size(inputs.train)} train, {size(inputs.validation)} choose epoch, round and seed, {size(inputs.test)} test.
Students: hidden layers {list(distill.hidden)}, at most {distill.epochs} epochs, patience {distill.patience}, seeds \
{list(distill.seeds)}; {len(inputs.train.feature_names)} features.
Speeds are replayed on the test prompts, over plain decoding. Captured: share of the way from the better single drafter
({names[better]}: {_speed(measures.speed(measures.single))}) to the oracle ({_speed(measures.speed(measures.oracle))}).
"""


# --- learning curve --------------------------------------------------------------------------------------------------


def curve_section(points: "list[CurvePoint]", measures: "Yardsticks", full: FullModel, seed: int) -> str:
    """Two tables, speeds and captured shares, and what the last two rows of them say."""
    learners = list(points[-1].runs)
    head = ["training questions", "turns", "subsets", *learners]

    def rows(value: "Callable[[Sums], float]", show: Callable[[float], str]) -> list[list[str]]:
        return [
            [
                f"{_fraction(point.fraction)}: {point.questions}",
                _range(point.turns),
                str(len(point.turns)),
                *(_mean_and_range([value(run) for run in point.runs[name]], show) for name in learners),
            ]
            for point in points
        ]

    lines = [
        "## Learning curve\n",
        "Random subsets of the training questions, by kind alike; mean (lowest - highest). The student is that of "
        f"seed {seed}, round 0.\nLabels are those of the traces, which all training prompts had a part in; all "
        "validation prompts choose the epoch.\n",
        _table(head, rows(measures.speed, _speed)),
        "Captured share of the headroom:\n",
        _table(head, rows(measures.captured, _share)),
        *_trends(points, measures, full),
    ]
    return "\n".join(lines) + "\n"


def _trends(points: "list[CurvePoint]", measures: "Yardsticks", full: FullModel) -> Iterable[str]:
    """One line a learner: whether its curve still rises at the end."""
    from pipeline.dissection import STUDENT, trend

    half, whole = points[-2:]
    if half.questions == whole.questions:
        yield "There are too few questions for halves of them, so nothing can be said about more."
        return
    noise = full.spread(measures)
    yield f"From half to all of the training prompts (the student's seeds differ by {_speed(noise)}):\n"
    for name in whole.runs:
        halves, end = [measures.speed(run) for run in half.runs[name]], measures.speed(whole.runs[name][0])
        said = trend(halves, end, noise if name == STUDENT else 0.0)
        yield f"- {name} {said}: {_mean_and_range(halves, _speed)} to {_speed(end)}"


# --- ablation --------------------------------------------------------------------------------------------------------


def ablation_section(
    config: "PairConfig", inputs: "Inputs", measures: "Yardsticks", full: FullModel, seeds: int, draws: int
) -> str:
    """One table of groups and one of single features, worst loss first, beside the spread of the full model's seeds."""
    from pipeline.dissection import ablate, feature_units, present_groups
    from pipeline.progress import progress

    used = list(full.fits)[:seeds]
    networks = {seed: full.fits[seed].student.network for seed in used}
    base = [full.runs[seed] for seed in used]
    groups, units = present_groups(inputs.train), feature_units(inputs.train)
    steps = iter(progress(range(len(groups) + len(units)), desc="ablation", unit="feature"))

    tables = []
    for what, parts in (("group", groups), ("feature", units)):
        found = {
            name: ablate(config, inputs, networks, names, draws)
            for (name, names), _ in zip(parts.items(), steps, strict=False)
        }
        tables.append(_ablation_table(what, found, measures, base, full))
    list(steps)  # says that all is done
    noise = f"changes up to {_speed(full.spread(measures))} are no larger than those from seed to seed.\n"
    noise += "The range of a few seeds is the least that noise amounts to: a change just above it is no finding"
    if len(full.runs) == 1:
        noise = "with one seed nobody can tell which changes are noise"
    return f"""## Ablation

The student (round 0, seeds {", ".join(map(str, used))}) trained without a feature, and the full student with that
feature permuted among the test prompts' states of the same layer ({draws} draws for each seed, lowest to highest in
brackets). Changes are of the speed, against the full student of the same seeds. The full student has
{full.summary(measures)}: {noise}.

{tables[0]}
{tables[1]}"""


def _ablation_table(
    what: str, found: "dict[str, Ablation]", measures: "Yardsticks", base: "list[Sums]", full: FullModel
) -> str:
    import numpy as np

    own = [measures.speed(run) for run in base]
    spread = full.spread(measures)
    rows: list[tuple[float, list[str]]] = []
    for name, one in found.items():
        pairs = zip(one.permuted, own, strict=True)
        moved = [measures.speed(run) - start for runs, start in pairs for run in runs]
        shuffled = [measures.captured(run) for runs in one.permuted for run in runs]
        cells, change = ["", "", "", ""], float(np.mean(moved))
        if one.dropped:
            speed, captured = _means(one.dropped, measures)
            change = speed - float(np.mean(own))
            beyond = "" if len(full.runs) == 1 else "yes" if abs(change) > spread else "no"
            cells = [_speed(speed), f"{change:+.3f}", _share(captured), beyond]
        permuted = f"{np.mean(moved):+.3f} ({min(moved):+.3f} to {max(moved):+.3f})"
        rows.append((change, [f"`{name}`", str(len(one.features)), *cells, permuted, _share(float(np.mean(shuffled)))]))
    whole, captured = _means(base, measures)
    nothing = ["nothing", "0", _speed(whole), "+0.000", _share(captured), "", "+0.000", _share(captured)]
    retrained = ["retrained", "change", "captured", "beyond seeds"]
    head = [f"left out: {what}", "columns", *retrained, "permuted: change", "captured"]
    return _table(head, [nothing, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))])


def _means(runs: "list[Sums]", measures: "Yardsticks") -> tuple[float, float]:
    """Mean speed and mean captured share."""
    speeds, shares = [measures.speed(run) for run in runs], [measures.captured(run) for run in runs]
    return sum(speeds) / len(speeds), sum(shares) / len(shares)


# --- policies side by side -------------------------------------------------------------------------------------------


def policies_section(config: "PairConfig", inputs: "Inputs", measures: "Yardsticks", fits: "list[Fit]") -> str:
    """All policies on the test prompts, and learners out of fold on the training prompts."""
    from pipeline.baselines import BASELINES, fit_baseline
    from pipeline.dissection import on_test
    from pipeline.distill import choose, out_of_fold
    from pipeline.foresight import step_known, with_sizes_known
    from pipeline.headroom import fixed_by_kind, turn_sums, yardsticks
    from pipeline.students import admission_of, follow, labelled
    from treegraft.values.replay import oracle

    states, best = labelled(inputs.train, None), choose(fits)
    runs = {"plain decoding": measures.plain} | _alone(config, measures)
    runs[f"best fixed schedule of the validation prompts {list(inputs.best_fixed)}"] = measures.fixed[inputs.best_fixed]
    runs["best fixed schedule of each kind, in hindsight"] = fixed_by_kind(inputs.test)
    network, admission = best.student.network, admission_of(best.student.network, inputs)
    student = follow(network, inputs.test, admission)
    runs[f"student as distill exports it (seed {best.seed}, round {best.round})"] = turn_sums([student])
    runs |= {name: on_test(fit_baseline(name, states), inputs) for name in BASELINES}
    runs["oracle"] = measures.oracle
    folds, results = out_of_fold(inputs.train, states)
    own = yardsticks([inputs.train])
    held_out = {f"{name}, out of fold": turn_sums([found]) for name, found in results.items() if found is not None}
    seen = {"plain decoding": own.plain} | _alone(config, own) | held_out | {"oracle": own.oracle}
    crossed = f"""On the training prompts, each question decided by a learner of {folds} folds that never saw it. No \
request weighs a drafter's pass over its prompt here, and speeds and shares are over these prompts' own yardsticks.

{_policies_table(config, inputs.train, own, seen)}"""
    sizes = follow(network, with_sizes_known(inputs.test), admission)
    foresight = {
        "nothing: the student above": turn_sums([student]),
        "the best verified size, the student's calls": turn_sums([sizes]),
        "the step's best schedule": step_known(inputs.test),
        "the answer's best schedules": turn_sums([oracle(inputs.test, student.step_rate)]),
        "all of it: the oracle": measures.oracle,
    }
    return f"""## Policies side by side

On the test prompts. Intervals are 95 % bootstrap intervals of the ratio to the better single drafter, \
{config.evaluate.bootstrap} resamples of questions.

{_policies_table(config, inputs.test, measures, runs)}
{crossed if held_out else "There are too few training questions for a cross-validation."}
## What the oracle knows

Policies that are told beforehand, on the test prompts, a part of what the oracle knows. The third plays in every \
step the schedule of most tokens less what the step's time is worth, and calls in no request that is faster without; \
the fourth is a shortest path through the answer. Both leave the verified size to the rule that decoders follow.

{_policies_table(config, inputs.test, measures, foresight)}"""


def _alone(config: "PairConfig", measures: "Yardsticks") -> "dict[str, Sums]":
    return {_alone_name(config, plan): measures.fixed[plan] for plan in measures.alone}


def _alone_name(config: "PairConfig", plan: tuple[int, ...]) -> str:
    """A drafter by itself; ``plan`` as in ``Yardsticks.alone``."""
    if not plan[0]:
        return f"{config.drafters[0].name} alone"
    layers = sum(action > 0 for action in plan)
    return f"{config.drafters[plan[0]].name} in {layers} of {len(plan)} layers"


def _policies_table(
    config: "PairConfig", tables: "OutcomeTables", measures: "Yardsticks", runs: "dict[str, Sums]"
) -> str:
    from pipeline.bootstrap import draw_prompts, drawn_ratios, percentile_interval
    from pipeline.headroom import question_sums

    single = question_sums(tables, measures.single)
    draws = draw_prompts(len(single.tokens), config.evaluate.bootstrap, config.seed, "")
    rows = []
    for name, run in runs.items():
        interval = percentile_interval(drawn_ratios(question_sums(tables, run), single, draws))
        low, high = interval["low"], interval["high"]
        between = "" if low is None or high is None else f"{_speed(low)} - {_speed(high)}"
        ratio = run.rate / measures.single.rate
        rows.append([name, _speed(measures.speed(run)), _share(measures.captured(run)), _speed(ratio), between])
    return _table(["policy", "speed", "captured", "over the better single", "95 % interval"], rows)


# --- text ------------------------------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]) + "\n"


def _mean_and_range(values: Sequence[float], show: Callable[[float], str]) -> str:
    mean = show(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({show(min(values))} - {show(max(values))})"


def _range(counts: Sequence[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} - {max(counts)}"


def _fraction(value: float) -> str:
    return "all" if value == 1 else f"1/{round(1 / value)}"


def _speed(value: float) -> str:
    return f"{value:.3f}"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.0f} %"


def _count(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


if __name__ == "__main__":
    main()
