"""The report for people: report.json's content as one self-contained HTML page and as Markdown.

Pure functions of the report dictionary (see `pipeline.aggregate`); text and layout live in pipeline/templates, charts
in `pipeline.svg`. The page loads nothing: style and charts are inline, its icon is a data address, there is no script.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import step_explorer, svg
from pipeline.measurements import DRAFTING_METHODS, LABELS, METHODS, SINGLE_METHODS, TIME_PARTS

if TYPE_CHECKING:
    from jinja2 import Environment

NOT_MEASURED = "not measured"
_DASH = "\N{EN DASH}"
TEMPLATES = Path(__file__).with_name("templates")
PART_NAMES = {
    "draft_light": "light drafter",
    "draft_strong": "strong drafter",
    "verify": "verify",
    "scheduler": "scheduler",
    "other": "rest",
}
_PATTERNS = {"draft_light": "dots", "draft_strong": "up", "verify": "plain", "scheduler": "bars", "other": "down"}
_PREFIX = "pattern-"
VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "undecided": "no difference shown",
    "unknown": "one prompt decides nothing",
}


def render_html(report: Mapping[str, Any]) -> str:
    """The whole page as text. report: a dictionary that passed `check_report`."""
    charts = {name: _markup(drawing) for name, drawing in _charts(report).items()}
    return _page("report", ("charts.css", "report.css", "steps.css"), **_view(report), **_steps(report), charts=charts)


def render_markdown(report: Mapping[str, Any]) -> str:
    """The same tables without charts, for a terminal or a code host."""
    return _environment(autoescape=False).get_template("report.md.j2").render(**_view(report)).lstrip()


def render_index(entries: Sequence[Mapping[str, Any]]) -> str:
    """The page that lists the reports of all pairs; entries: see ``pipeline.report_index``."""
    return _page("index", entries=entries, verdicts=VERDICTS)


def render_tune(report: Mapping[str, Any], keys: Sequence[str], enough: int, chart: str | None) -> str:
    """The page of a search; report: tune.json, keys: searched settings, enough: trials that a chart takes."""
    return _page("tune", report=report, keys=keys, enough=enough, chart=_markup(chart or ""))


def _page(name: str, styles: Sequence[str] = ("charts.css", "report.css"), **values: Any) -> str:
    """A template of page.html.j2's frame as a page with its styles inside."""
    environment = _environment(autoescape=True)
    # Our own markup; what in it came from outside (names of benchmarks and schedulers) was escaped by pipeline.svg.
    style = _markup("\n".join((TEMPLATES / style).read_text(encoding="utf-8") for style in styles))
    return environment.get_template(f"{name}.html.j2").render(style=style, **values).lstrip()


def _markup(text: str) -> str:
    from markupsafe import Markup

    return Markup(text)


def _environment(*, autoescape: bool) -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        times=times,
        interval=interval,
        per_cent=per_cent,
        number=number,
        grouped=grouped,
        cell=cell,
        label=label,
        moment=moment,
    )
    return environment


# -------------------------------------------------------------------------------------------------------------- numbers


def _or_not_measured(write: Callable[[float], str]) -> Callable[[float | None], str]:
    def written(value: float | None) -> str:
        return NOT_MEASURED if value is None else write(value)

    return written


times = _or_not_measured(lambda value: f"{value:.2f}\N{MULTIPLICATION SIGN}")
per_cent = _or_not_measured(lambda value: f"{value:.0%}".replace("-", "\N{MINUS SIGN}"))
grouped = _or_not_measured(lambda value: f"{value:,.0f}")


def number(value: float | None, digits: int = 2) -> str:
    """A number with fixed digits, or 'not measured'."""
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def interval(ratio: Mapping[str, Any]) -> str:
    """The interval of a ratio as 'low to high' with a dash between, or a dash where there is none."""
    return _DASH if ratio["low"] is None else f"{ratio['low']:.2f}{_DASH}{ratio['high']:.2f}"


def cell(value: object) -> str:
    """Any value as one line of a Markdown table."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def moment(stamp: str) -> str:
    """An ISO time to the minute; any other text as it is."""
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".strip()


def label(method: str) -> str:
    """The name that people read for a method or a scheduler."""
    return LABELS.get(method, method.replace("_", " "))


# -------------------------------------------------------------------------------------------------------- what is shown


def _view(report: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of both templates."""
    overall = report["overall"]
    return {
        "report": report,
        "methods": METHODS,
        "drafting": DRAFTING_METHODS,
        "benches": sorted(report["benchmarks"]),
        "groups": _groups(report),
        "others": [(measured, _groups(measured)) for measured in report["other_temperatures"]],
        "verdicts": VERDICTS,
        "part_names": PART_NAMES,
        "patterns": _markup(svg.pattern_definitions(_PREFIX, _PATTERNS)),
        "part_keys": {part: _markup(svg.pattern_key(part, _PREFIX)) for part in TIME_PARTS},
        "replay_keys": {
            method: _markup(svg.marker_key(shape, method)) for shape, method in enumerate(_replayed_methods(report))
        },
        "measured_methods": [method for method in METHODS if overall[method]],
        "depths": range(1, 1 + max(len(overall[method]["acceptance_by_depth"]) for method in DRAFTING_METHODS)),
        "ms_per_token": {method: _ms_per_token(overall[method]) for method in METHODS if overall[method]},
        "schedulers": _schedulers(report),
        "best_single": _replayed_best(report),
        "hardware": list(_flatten(report["hardware"])),
        "settings": list(_flatten(report["settings"])),
        "provenance": list(_flatten(report["provenance"])),
    }


def _steps(report: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of steps.html.j2."""
    drafters = max((len(prompt["drafters"]) for prompt in report["steps"]), default=0)
    return {
        "explored": step_explorer.explorer(report["steps"]),
        "box_height": step_explorer.BOX,
        "drafter_signs": [_markup(svg.marker(shape, 0, 0, f"drafter{shape}", 4.5)) for shape in range(drafters)],
    }


def _groups(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], list[str]]]:
    """(name, results by method, methods to list) of all prompts and of each benchmark.

    All prompts list every method, a benchmark only those measured on some benchmark: 'not measured' is said once.
    """
    benches = report["benchmarks"]
    if len(benches) == 1:
        return [(bench, group, list(METHODS)) for bench, group in benches.items()]
    shown = [method for method in METHODS if any(group[method] for group in benches.values())]
    return [
        ("all prompts", report["overall"], list(METHODS)),
        *((bench, benches[bench], shown) for bench in sorted(benches)),
    ]


def _ms_per_token(result: Mapping[str, Any]) -> dict[str, float] | None:
    split = result["time_split_ms"]
    if split is None or not result["tokens"]:
        return None
    return {part: split[part] / result["tokens"] for part in TIME_PARTS}


def _schedulers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Replayed schedulers as speed-ups over plain decoding, fastest on the test prompts first."""
    rates = report["baselines"]["schedulers"]
    plain = rates.get("plain", {})

    def ratio(row: Mapping[str, Any], split: str) -> float | None:
        return row[split] / plain[split] if row.get(split) is not None and plain.get(split) else None

    rows = [
        {"name": name, **{split: ratio(row, split) for split in ("validation", "test")}} for name, row in rates.items()
    ]
    return sorted(rows, key=lambda row: (-(row["test"] or 0.0), row["name"]))


def _replayed_best(report: Mapping[str, Any]) -> str | None:
    """The better single drafter by replay over all prompts; None where replay has not both."""
    modelled = report["replay"]["speedup"]
    if any(modelled.get(method) is None for method in SINGLE_METHODS):
        return None
    return max(SINGLE_METHODS, key=lambda method: modelled[method])


def _replayed_methods(report: Mapping[str, Any]) -> list[str]:
    known = {entry["method"] for entry in report["replay"]["cells"] if entry["predicted_speedup"] is not None}
    return [method for method in DRAFTING_METHODS if method in known]


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, text) rows."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _flatten(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name, value
    else:
        yield name, json.dumps(value, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------------------- charts


def _charts(report: Mapping[str, Any]) -> dict[str, str]:
    """Every chart of the page by name; a chart whose numbers were not measured is missing."""
    charts = speed_charts(report)
    overall = report["overall"]
    charts["acceptance"] = svg.lines(
        "acceptance",
        "Share of steps that accept at least so many draft tokens, all prompts",
        [svg.Line(label(method), method, overall[method]["acceptance_by_depth"]) for method in DRAFTING_METHODS],
        x_title="accepted draft tokens, at least",
    )
    split = {method: _ms_per_token(overall[method]) for method in METHODS if overall[method]}
    charts["time"] = svg.stacks(
        "time",
        "Milliseconds per emitted token by what they are spent on, all prompts",
        [svg.Stack(label(method), method, list(parts.items())) for method, parts in split.items() if parts],
        unit="ms/token",
        names=PART_NAMES,
        prefix=_PREFIX,
    )
    if report["calibration"]:
        most = max(bin_["count"] for bin_ in report["calibration"]) or 1
        points = [(bin_["predicted"], bin_["observed"], bin_["count"] / most) for bin_ in report["calibration"]]
        charts["calibration"] = svg.diagonal(
            "calibration",
            "Predicted probability that a draft token is accepted, and share that was",
            [svg.Points("nodes", "treegraft", sorted(points))],
            high=1.0,
            x_title="predicted",
            y_title="observed",
            percent=True,
            connect=True,
        )
    charts.update(_replay_charts(report))
    return charts


def speed_charts(report: Mapping[str, Any]) -> dict[str, str]:
    """A panel for all prompts ("speed") and one per benchmark ("speed <bench>"), all with one scale."""
    groups = [("", report["overall"]), *sorted(report["benchmarks"].items())]
    shown = [method for method in METHODS[1:] if any(group[method] for _, group in groups)]
    results = [group[method]["speedup"] for _, group in groups for method in shown if group[method]]
    high = max(1.0, *(max(result["mean"], result["high"] or 0.0) for result in results)) * 1.02
    charts = {}
    for place, (bench, group) in enumerate(groups):
        rows = [
            svg.Bar(label(method), method, *(group[method]["speedup"][key] for key in ("mean", "low", "high")))
            if group[method]
            else svg.Bar(label(method), method, None)
            for method in shown
        ]
        title = f"Speed-up over plain decoding, {bench or 'all prompts'}"
        drawing = svg.bars(f"speed-{place}", title, rows, high=high, reference=1.0, reference_label="plain = 1")
        charts[f"speed {bench}" if bench else "speed"] = drawing
    return charts


def _replay_charts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Predicted against measured speed-ups, and the way from the better single drafter to the oracle."""
    cells = [entry for entry in report["replay"]["cells"] if entry["predicted_speedup"] is not None]
    if cells:
        high = svg.ticks(max(max(entry["predicted_speedup"], entry["measured_speedup"]) for entry in cells), 5)[-1]
        yield (
            "replay",
            svg.diagonal(
                "replay",
                "Speed-up over plain decoding, predicted by replay and measured, by benchmark and method",
                [
                    svg.Points(
                        label(method),
                        method,
                        [
                            (entry["predicted_speedup"], entry["measured_speedup"])
                            for entry in cells
                            if entry["method"] == method
                        ],
                    )
                    for method in _replayed_methods(report)
                ],
                high=high,
                x_title="predicted by replay",
                y_title="measured",
            ),
        )
    modelled = report["replay"]["speedup"]
    best = _replayed_best(report)
    if best is None or modelled.get("oracle") is None or modelled.get("treegraft") is None:
        return

    def bar(name: str, text: str | None = None) -> svg.Bar:
        return svg.Bar(text or label(name), name, modelled.get(name))

    others = [bar("fixed")] if modelled.get("fixed") is not None else []
    yield (
        "headroom",
        svg.span(
            "headroom",
            "Replayed speed-up over plain decoding, from the better single drafter to the oracle",
            bar(best),
            bar("oracle"),
            bar("treegraft"),
            others,
        ),
    )
