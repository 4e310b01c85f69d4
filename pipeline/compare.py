"""Holds a report against an earlier one and says what changed beyond noise.

Noise. Prompts differ far more in speed than methods do, so the intervals of two reports overlap even where every single
prompt got slower. But both reports measured the same prompts. So a change is a ratio, later over earlier, of the same
quantity on the prompts that both have, and its 95% interval comes from resampling these prompts, each with all that
both reports measured on it. A change is beyond noise if

- the interval does not contain 1,
- it is at least `LEAST_CHANGE`: two runs on one machine differ by a little in all prompts alike (clock rate, placement
  in memory), which no resampling of prompts can see, and
- at least `FEWEST_PROMPTS` prompts are shared: with five, all of them move one way by chance once in 16 times.

Where no prompt is shared, two reported intervals that do not overlap are a change. Divergences are counts without
noise in float32 and mostly noise in other types; headroom captured and the replay's error have no interval. They are
shown and not judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.bootstrap import Sums, draw_prompts, drawn_ratios, percentile_interval
from pipeline.measurements import LABELS, METHODS

LEAST_CHANGE = 0.02
FEWEST_PROMPTS = 6
RESAMPLES = 2000
MACHINE = ("device", "name", "cores", "threads", "dtype", "drafter_dtype")
ALL = "(all)"
MARKS = {"higher": " +", "lower": " -", "same": "", "unknown": " ?"}

Report = Mapping[str, Any]
"""A report; or what a report has of one of its temperatures."""


@dataclass(frozen=True)
class Quantity:
    """A figure of one report: its value, that of every resample of the shared prompts, and the reported interval."""

    value: float
    drawn: np.ndarray | None  # float64 [resamples]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Change:
    """A figure in both reports, and later over earlier with its paired 95% interval, where there is one."""

    earlier: float
    later: float
    low: float | None
    high: float | None
    verdict: str
    """higher, lower, same (within noise) or unknown (too little to tell)."""

    @property
    def ratio(self) -> float:
        """Later over earlier."""
        return self.later / self.earlier


@dataclass(frozen=True)
class Row:
    """One method on one benchmark, or on all shared prompts, at one temperature; pairs are (earlier, later)."""

    temperature: float
    bench: str
    method: str
    prompts: int
    """Shared by both reports."""
    speedup: Change
    tokens_per_step: Change | None
    over_best_single: Change | None
    captured: tuple[float | None, float | None]
    replay_error: tuple[float | None, float | None]
    divergences: tuple[int | None, int | None]


@dataclass(frozen=True)
class Comparison:
    """What `render` writes, and what a caller may act on."""

    differences: list[str]
    """Sentences about what else than speed differs."""
    headline: str
    verdict: str
    """faster, slower, same or unknown: TreeGraft over plain decoding, all shared prompts, worst temperature."""
    undecidable: str | None
    """Why the verdict must not be acted on; None where it may."""
    rows: list[Row]


def compare_reports(earlier: Report, later: Report) -> Comparison:
    """Compare two reports that passed `check_report`."""
    rows = [
        row
        for one in (earlier, *earlier["other_temperatures"])
        for other in (later, *later["other_temperatures"])
        if one["temperature"] == other["temperature"]
        for row in _rows(earlier, later, one, other)
    ]
    verdict, headline = "unknown", "The reports share no benchmark at the same temperature: nothing can be compared."
    judged = [row for row in rows if (row.bench, row.method) == (ALL, "treegraft")]
    if judged:
        worst = min(judged, key=lambda row: ("lower", "unknown", "same", "higher").index(row.speedup.verdict))
        verdict = {"lower": "slower", "higher": "faster"}.get(worst.speedup.verdict, worst.speedup.verdict)
        headline = _headline(worst)
    machine = _differing(*({key: report["hardware"].get(key) for key in MACHINE} for report in (earlier, later)))
    undecidable = None
    if earlier["pair"] != later["pair"]:
        undecidable = f"the reports are of the pairs {earlier['pair']} and {later['pair']}"
    elif machine:
        undecidable = f"the reports are of different hardware ({machine})"
    elif verdict == "unknown":
        undecidable = f"it takes {FEWEST_PROMPTS} prompts that both reports measured at the same temperature"
    return Comparison(_differences(earlier, later, machine), headline, verdict, undecidable, rows)


# ------------------------------------------------------------------------------------------------------- what changed


@dataclass(frozen=True)
class _Scope:
    """One benchmark, or all of them, in what one report has of one temperature."""

    measured: Report
    name: str
    prompts: Mapping[str, Sequence[str]]
    """Prompts that both reports have, by benchmark."""

    def cell(self, method: str) -> Mapping[str, Any] | None:
        """The reported figures of one method."""
        group = self.measured["overall"] if self.name == ALL else self.measured["benchmarks"][self.name]
        return group[method]

    def sums(self, method: str, taken: str = "seconds") -> Sums | None:
        """Tokens and seconds (or steps) of the shared prompts; None where the method or its steps are not known."""
        tokens: list[int] = []
        spent: list[float | None] = []
        for bench, prompts in self.prompts.items():
            found = self.measured["by_prompt"][bench]
            if method not in found["methods"]:
                return None
            sums, place = found["methods"][method], {prompt: index for index, prompt in enumerate(found["prompts"])}
            tokens += [sums["tokens"][place[prompt]] for prompt in prompts]
            spent += [sums[taken][place[prompt]] for prompt in prompts]
        return None if None in spent else Sums(np.array(tokens, float), np.array(spent, float))

    @cached_property
    def draws(self) -> np.ndarray | None:
        """Resamples of the shared prompts, the same in both reports; None for fewer than two."""
        return draw_prompts(sum(map(len, self.prompts.values())), RESAMPLES, 0, self.name)

    def ratio(self, method: str, base: str, reported: Mapping[str, Any]) -> Quantity | None:
        """Speed of `method` over that of `base`; what was reported where fewer than two prompts are shared."""
        if self.draws is None:
            value = reported["mean"] if "mean" in reported else reported["ratio"]
            return Quantity(value, None, reported["low"], reported["high"])
        own, other = self.sums(method), self.sums(base)
        if own is None or other is None:
            return None
        return Quantity(own.rate / other.rate, drawn_ratios(own, other, self.draws))

    def speedup(self, method: str) -> Quantity | None:
        """Speed over plain decoding."""
        cell = self.cell(method)
        return None if cell is None else self.ratio(method, "plain", cell["speedup"])

    def tokens_per_step(self, method: str) -> Quantity | None:
        """Emitted tokens for each forward of the target; None where steps are not counted."""
        sums = self.sums(method, "steps")
        if sums is None or self.draws is None:
            return None
        return Quantity(sums.rate, sums.drawn_rates(self.draws))

    def over_best_single(self) -> Quantity | None:
        """TreeGraft over the better single drafter, on average over benchmarks."""
        parts = []
        for bench, prompts in self.prompts.items():
            reported = self.measured["over_best_single"][bench]
            part = _Scope(self.measured, bench, {bench: prompts}).ratio("treegraft", reported["best"], reported)
            if part is None:
                return None
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        drawn = [part.drawn for part in parts if part.drawn is not None]
        mean = float(np.mean([part.value for part in parts]))
        return Quantity(mean, np.mean(drawn, axis=0) if len(drawn) == len(parts) else None)


def judge(earlier: Quantity, later: Quantity, prompts: int) -> Change:
    """Whether a quantity changed beyond noise, as the head of this module says; prompts: how many are shared."""
    low: float | None = None
    high: float | None = None
    verdict = "unknown"
    if earlier.drawn is not None and later.drawn is not None:
        low, high = percentile_interval(later.drawn / earlier.drawn).values()
    if low is not None and high is not None:
        if prompts >= FEWEST_PROMPTS:
            verdict = "higher" if low > 1 else "lower" if high < 1 else "same"
    elif not prompts and None not in (earlier.low, earlier.high, later.low, later.high):
        apart = earlier.high < later.low or later.high < earlier.low  # type: ignore[operator]
        verdict = "same" if not apart else "higher" if later.value > earlier.value else "lower"
    if verdict != "unknown" and abs(later.value / earlier.value - 1) < LEAST_CHANGE:
        verdict = "same"
    return Change(earlier.value, later.value, low, high, verdict)


def _rows(earlier: Report, later: Report, one: Report, other: Report) -> Iterator[Row]:
    """All prompts, then each benchmark of both reports; `one` and `other` are their parts of the same temperature."""
    benches = sorted(one["by_prompt"].keys() & other["by_prompt"].keys())
    prompts = {bench: _shared_prompts(one["by_prompt"][bench], other["by_prompt"][bench]) for bench in benches}
    for name in (ALL, *benches) if benches else ():
        scopes = [_Scope(part, name, prompts if name == ALL else {name: prompts[name]}) for part in (one, other)]
        count = sum(map(len, scopes[0].prompts.values()))

        def change(quantities: Sequence[Quantity | None], count: int = count) -> Change | None:
            first, second = quantities
            return None if first is None or second is None else judge(first, second, count)

        for method in METHODS[1:]:
            speedup = change([scope.speedup(method) for scope in scopes])
            if speedup is None:  # not measured in both
                continue
            ours = method == "treegraft"
            cells = [scope.cell(method) or {} for scope in scopes]
            yield Row(
                one["temperature"],
                name,
                method,
                count,
                speedup,
                change([scope.tokens_per_step(method) for scope in scopes]),
                change([scope.over_best_single() for scope in scopes]) if ours else None,
                (_captured(earlier, one, name), _captured(later, other, name)) if ours else (None, None),
                (_replay_error(earlier, one, name, method), _replay_error(later, other, name, method)),
                (cells[0]["divergences"], cells[1]["divergences"]),
            )


def _shared_prompts(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """Prompts of a benchmark that both reports have and on which every method emitted a token."""

    def alive(found: Mapping[str, Any]) -> set[str]:
        return {
            prompt
            for index, prompt in enumerate(found["prompts"])
            if all(sums["tokens"][index] for sums in found["methods"].values())
        }

    return sorted(alive(earlier) & alive(later))


def _captured(report: Report, measured: Report, bench: str) -> float | None:
    if measured["temperature"] != report["temperature"]:
        return None  # replay is about the first temperature
    oracle = report["oracle"]
    found = oracle if bench == ALL else oracle["benches"].get(bench, {})
    return found.get("captured")


def _replay_error(report: Report, measured: Report, bench: str, method: str) -> float | None:
    """Predicted over measured speed-up, less 1."""
    if measured["temperature"] != report["temperature"]:
        return None
    replay = report["replay"]
    if bench == ALL:
        predicted, found = replay["speedup"].get(method), measured["overall"][method]["speedup"]["mean"]
    else:
        cells = {(cell["bench"], cell["method"]): cell for cell in replay["cells"]}
        cell = cells.get((bench, method), {"predicted_speedup": None, "measured_speedup": None})
        predicted, found = cell["predicted_speedup"], cell["measured_speedup"]
    return predicted / found - 1 if predicted is not None and found else None


# -------------------------------------------------------------------------------------------------------- what is said


def _headline(row: Row) -> str:
    change = row.speedup
    start = {
        "higher": "TreeGraft got faster beyond noise",
        "lower": "TreeGraft got slower beyond noise",
        "same": "TreeGraft's speed changed by no more than noise",
        "unknown": "Too few shared prompts to tell whether TreeGraft's speed changed",
    }[change.verdict]
    interval = f", 95% interval {change.low:.3f} to {change.high:.3f}" if change.low is not None else ""
    return (
        f"{start}: {change.earlier:.2f}, now {change.later:.2f} times plain decoding at temperature "
        f"{row.temperature:g} (later/earlier {change.ratio:.3f}{interval}; {row.prompts} shared prompts)."
    )


def _differences(earlier: Report, later: Report, machine: str) -> list[str]:
    found = []
    if earlier["pair"] != later["pair"]:
        found.append(f"Different pair: {earlier['pair']}, now {later['pair']}.")
    if machine:
        found.append(f"Different hardware: {machine}.")
    versions = [report["hardware"].get("versions", {}) for report in (earlier, later)]
    for name, pair in (("versions", versions), ("settings", [earlier["settings"], later["settings"]])):
        if changed := _differing(*pair):
            found.append(f"Different {name}: {changed}.")
    prompts = [{p for bench in part["by_prompt"].values() for p in bench["prompts"]} for part in (earlier, later)]
    texts = [report["provenance"].get("inputs", {}).get("prompts") for report in (earlier, later)]
    if prompts[0] != prompts[1]:
        found.append(
            f"Different prompts: {len(prompts[0] & prompts[1])} in both, {len(prompts[0] - prompts[1])} only in the "
            f"earlier, {len(prompts[1] - prompts[0])} only in the later."
        )
    elif texts[0] != texts[1]:
        found.append("Different prompts: the same names, but not the same texts.")
    code = [_code(report["provenance"]) for report in (earlier, later)]
    if code[0] != code[1]:
        found.append(f"Different code: {code[0]}, now {code[1]}.")
    for name, report in (("earlier", earlier), ("later", later)):
        found += [f"Warning of the {name} report: {warning}" for warning in report["warnings"]]
    return found


def _code(provenance: Mapping[str, Any]) -> str:
    revision = provenance.get("git_revision")
    if revision is None:
        return f"source digest {str(provenance.get('code_digest'))[:12]}"
    return f"{revision[:12]} with uncommitted changes" if provenance.get("dirty") else str(revision[:12])


def _differing(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> str:
    """Every value that is another or there only once, as 'name old, now new; ...'."""
    before, after = dict(_flat(earlier)), dict(_flat(later))
    return "; ".join(
        f"{name} {before.get(name, 'none')}, now {after.get(name, 'none')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


def render(comparison: Comparison) -> str:
    """Differences, the headline, and one table as plain text."""
    lines = [*comparison.differences, comparison.headline]
    if not comparison.rows:
        return "\n".join(lines)
    several = len({row.temperature for row in comparison.rows}) > 1
    head = ["benchmark", "method", "speed-up", "later/earlier (95%)", "tokens/step", "over better single"]
    head += ["captured", "replay error", "divergences"]
    table = [["temperature", *head] if several else head]
    for row in comparison.rows:
        interval = f" ({row.speedup.low:.3f} to {row.speedup.high:.3f})" if row.speedup.low is not None else ""
        cells = [
            row.bench,
            LABELS.get(row.method, row.method),
            _arrow(row.speedup),
            f"{row.speedup.ratio:.3f}{interval}",
            _arrow(row.tokens_per_step),
            _arrow(row.over_best_single),
            _both(row.captured, "{:.0%}"),
            _both(row.replay_error, "{:+.0%}"),
            _both(row.divergences, "{}"),
        ]
        table.append([f"{row.temperature:g}", *cells] if several else cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines.append("")
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    judged = [
        change.verdict
        for row in comparison.rows
        for change in (row.speedup, row.tokens_per_step, row.over_best_single)
        if change is not None and change.verdict != "unknown"
    ]
    lines += [
        "",
        "earlier -> later; + higher and - lower beyond noise, ? too few shared prompts to tell. Beyond noise: the "
        f"interval does not contain 1 and the change is {LEAST_CHANGE:.0%} or more.",
        f"Of the {len(judged)} judged figures about {0.05 * len(judged):.0f} may be marked by chance.",
    ]
    return "\n".join(lines)


def _arrow(change: Change | None) -> str:
    return "" if change is None else f"{change.earlier:.2f} -> {change.later:.2f}{MARKS[change.verdict]}"


def _both(values: tuple[float | None, float | None], form: str) -> str:
    if values == (None, None):
        return ""
    return " -> ".join("none" if value is None else form.format(value) for value in values)
