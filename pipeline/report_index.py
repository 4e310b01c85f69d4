"""The page that lists the report of every pair: reports/index.html.

Stage report writes it after each pair's own report, from all report.json that are there. It is no dvc output: the
cells of a matrix cannot share one, and a stage of its own would depend on the reports of all pairs, those outside `run`
included, which dvc.yaml cannot name. It holds nothing that the reports do not hold, so nothing is lost with it.
"""

from pathlib import Path
from typing import Any

from pipeline.files import read_json, write_shared
from pipeline.report_html import render_index
from pipeline.report_schema import SCHEMA, check_report
from treegraft.errors import UserError


def write_index(reports: Path) -> Path:
    """Write index.html into the folder ``reports`` from the <pair>/report.json below it; returns its path."""
    path = reports / "index.html"
    write_shared(path, render_index(entries(reports)).encode())
    return path


def entries(reports: Path) -> list[dict[str, Any]]:
    """What the page shows of each pair, in order of name: {folder, report, device}, or {folder, problem}.

    A report that cannot be read, of an earlier format for example, is listed as such: it is no fault of the pair whose
    stage writes the page.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(reports.glob("*/report.json")):
        folder = path.parent.name
        try:
            report = load_report(path)
        except UserError:
            found.append({"folder": folder, "problem": f"cannot be read: run `pipeline report {folder}` again"})
        else:
            found.append({"folder": folder, "report": report, "device": report["hardware"].get("name", "")})
    return found


def load_report(path: Path) -> dict[str, Any]:
    """The report in a file; UserError in one sentence for anything else."""
    try:
        report = read_json(path, "give the report.json that stage report wrote")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if report.get("schema") != SCHEMA:
        raise UserError(
            f"{path} is not a report of this version: its schema is {report.get('schema')!r}, not {SCHEMA!r}."
        )
    try:
        check_report(report)
    except ValueError as error:
        first = str(error).removeprefix("not a report: ").split("; ")[0]
        raise UserError(f"{path} is not a report of this version: {first}.") from error
    return report
