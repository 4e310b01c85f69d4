"""Stage report: what evaluate measured, as report.json and as pages that people read.

Reads data/evaluation/<pair>/{runs.jsonl, summary.json, steps.jsonl} and reports/<pair>/distill.json. Writes, under
reports/<pair>/::

    report.json    the truth: every other file is made from it
    report.html    one self-contained page
    report.md      the same tables as text
    metrics.json   a few numbers for `dvc metrics show`
    speedup.svg    the speed charts alone, to show elsewhere
    plots/         speedup.tsv and acceptance.tsv for `dvc plots`

and reports/index.html, which lists the reports of all pairs.

Numbers are made in `pipeline.aggregate`, pages in `pipeline.report_html`; this module only reads and writes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig

Row = TypeVar("Row")

PLOT_COLUMNS = {
    "speedup": ("bench", "method", "speedup", "low", "high", "tokens_per_s"),
    "acceptance": ("bench", "method", "depth", "share"),
}


def run(config: "PairConfig") -> None:
    """Write the report of one pair; UserError if its evaluation or distillation is missing, unfinished or malformed."""
    from pipeline.aggregate import build_report
    from pipeline.files import read_json, write_json, write_text
    from pipeline.measurements import parse_run, parse_summary
    from pipeline.recorded_steps import parse_prompt
    from pipeline.report_html import render_html, render_markdown
    from pipeline.report_index import write_index
    from pipeline.report_picture import render_picture

    again = f"run `pipeline evaluate {config.slug}` again"
    folder = config.paths.evaluation
    runs = read_rows(folder / "runs.jsonl", parse_run, again)
    steps = read_rows(folder / "steps.jsonl", parse_prompt, again)
    summary_path = folder / "summary.json"
    summary = parse_summary(read_json(summary_path, f"evaluate has not finished: {again}"), str(summary_path))
    distill = read_json(config.paths.distill_metrics, f"run `pipeline distill {config.slug}` first")
    report = build_report(
        config.slug, runs, summary, distill, steps, resamples=config.evaluate.bootstrap, seed=config.seed
    )
    out = config.paths.report
    write_text(out / "report.html", render_html(report))
    write_text(out / "report.md", render_markdown(report))
    write_text(out / "speedup.svg", render_picture(report))
    for name, rows in plots(report).items():
        write_text(out / "plots" / f"{name}.tsv", tsv(rows, PLOT_COLUMNS[name]))
    write_json(out / "metrics.json", metrics(report))
    write_json(out / "report.json", report)  # last: where it is, the others are
    index = write_index(out.parent)
    print(report["headline"]["text"])
    print(report["headline"]["over_best_single"]["text"])
    for warning in report["warnings"]:
        print(f"Warning: {warning}")
    print(f"Report: {out / 'report.html'}; all pairs: {index}")


def read_rows(path: Path, parse: Callable[[str, str], Row], again: str) -> list[Row]:
    """The rows of a file with one JSON object a line.

    Args:
        parse: makes a row of a line and of where it stands, or raises UserError.
        again: how to mend a missing, torn or malformed file (end of a UserError).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {again}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {again}") from error
    lines = text.split("\n")
    if lines.pop():  # a whole file ends with a line end
        raise UserError(f"{path} breaks off in line {len(lines) + 1}, so evaluate was interrupted: {again}")
    return [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """A few flat numbers; what was not measured is left out, because dvc takes no null for a metric."""
    ours, over_best = report["overall"]["treegraft"], report["headline"]["over_best_single"]
    numbers = {
        "speedup": report["headline"]["ratio"],
        "speedup_low": report["headline"]["low"],
        "speedup_high": report["headline"]["high"],
        "over_best_single_mean": over_best["ratio"],
        "over_best_single_low": over_best["low"],
        "over_best_single_high": over_best["high"],
        "over_best_single_max": report["over_best_single"]["max"],
        "over_best_single_min": report["over_best_single"]["min"],
        "overall_over_best_single": report["overall_over_best_single"]["ratio"],
        "tokens_per_s": ours["tokens_per_s"],
        "tokens_per_step": ours["tokens_per_step"],
        "strong_calls_per_step": ours["strong_calls_per_step"],
        "replay_predicted_speedup": report["replay"]["predicted_speedup"],
        "oracle_over_best_single": report["oracle"]["over_best_single"],
        "oracle_captured": report["oracle"]["captured"],
        "divergences": report["identity"]["divergences"],
    }
    return {name: value for name, value in numbers.items() if value is not None}


def plots(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each plot's table by the plot's name."""
    from pipeline.measurements import METHODS

    results = [
        (bench, method, group[method])
        for bench, group in [*report["benchmarks"].items(), ("(all)", report["overall"])]
        for method in METHODS
        if group[method]
    ]
    return {
        "speedup": [
            {
                "bench": bench,
                "method": method,
                "speedup": result["speedup"]["mean"],
                "low": result["speedup"]["low"],
                "high": result["speedup"]["high"],
                "tokens_per_s": result["tokens_per_s"],
            }
            for bench, method, result in results
        ],
        "acceptance": [
            {"bench": bench, "method": method, "depth": depth, "share": share}
            for bench, method, result in results
            for depth, share in enumerate(result["acceptance_by_depth"] or [], 1)
        ],
    }


def tsv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A table with a head line; nulls are empty cells, and tabs and line ends in text become spaces."""
    lines = [list(columns), *([_tsv_cell(row[name]) for name in columns] for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def _tsv_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
