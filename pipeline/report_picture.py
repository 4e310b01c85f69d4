"""A report's speed charts as one picture by itself, for a README or a slide; it loads nothing and has a dark side."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from pipeline.report_html import TEMPLATES, speed_charts
from pipeline.svg import WIDTH

COLUMNS = 2
GAP, HEADING = 28, 26

_FONT = 'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }'
_HEADING = ".heading { font-size: 14px; font-weight: 650; fill: var(--ink); }"


def render_picture(report: Mapping[str, Any]) -> str:
    """The speed-up of every method, for all prompts and for each benchmark, as the text of an SVG file.

    report: a dictionary that passed `check_report`.
    """
    charts = list(speed_charts(report).items())
    height = max(float(_frame(drawing)[3]) for _, drawing in charts)
    panels = []
    for place, (name, drawing) in enumerate(charts):
        row, column = divmod(place, COLUMNS)
        x, y = GAP + column * (WIDTH + GAP), GAP + row * (HEADING + height + GAP)
        heading = name.removeprefix("speed").strip() or "All prompts"
        panels.append(f'<text class="heading" x="{x}" y="{y + 12:g}">{escape(heading)}</text>')
        panels.append(
            drawing.replace("<svg", f'<svg x="{x}" y="{y + HEADING:g}" width="{WIDTH}" height="{height:g}"', 1)
        )
    rows = -(-len(charts) // COLUMNS)
    size = (GAP + COLUMNS * (WIDTH + GAP), GAP + rows * (HEADING + height + GAP))
    style = "\n".join([(TEMPLATES / "charts.css").read_text(encoding="utf-8"), _FONT, _HEADING])
    title = f"Speed over plain decoding of {report['pair']}: the whisker is the 95 % interval over prompts"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]:g}" width="{size[0]}" '
        f'height="{size[1]:g}">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n'
        '<rect width="100%" height="100%" rx="10" style="fill: var(--page)"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def _frame(drawing: str) -> list[str]:
    """The viewBox of a chart: x, y, width, height."""
    found = re.search(r'viewBox="([^"]+)"', drawing)
    assert found is not None
    return found[1].split()
