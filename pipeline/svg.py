"""Charts as inline SVG text: small functions from numbers to markup, which know nothing of TreeGraft's report.

Every chart is one `<svg>` with a title and a description for screen readers. Colours are CSS classes (`c-<name>`) that
the page defines for light and dark; no chart tells series apart by colour alone: bars carry their names, lines carry
markers and names at their ends, the parts of stacked bars carry patterns. All charts are WIDTH units wide so that text
has one size and is legible on a phone without zooming.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH = 340
_TIMES = "\N{MULTIPLICATION SIGN}"
_CHARACTER = 6.6  # mean width of a character at the charts' 12-unit text, for placing labels


@dataclass(frozen=True)
class Bar:
    """One bar: `css` is its colour's name; low and high draw an interval; value None is drawn as 'not measured'."""

    label: str
    css: str
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """One line: values at x = 1, 2, ..."""

    label: str
    css: str
    values: Sequence[float]


@dataclass(frozen=True)
class Stack:
    """One stacked bar: parts as (css, value) from left to right."""

    label: str
    css: str
    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Points:
    """One series of a scatter: (x, y) or (x, y, size), size in (0, 1]."""

    label: str
    css: str
    points: Sequence[tuple[float, ...]] = field(default_factory=tuple)


def ticks(high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from 0 up to the first that is at least `high` (any positive number)."""
    raw = high / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(size * magnitude for size in (1, 2, 2.5, 5, 10) if size * magnitude >= raw * (1 - 1e-9))
    return [index * step for index in range(math.ceil(high / step - 1e-9) + 1)]


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Label positions as near as possible to `positions`, in the same order, at least `gap` apart, inside low..high.

    Where they cannot all fit, the gap shrinks to what fits.
    """
    if not positions:
        return []
    gap = min(gap, (high - low) / max(len(positions) - 1, 1))
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    placed = [min(max(positions[index], low), high) for index in order]
    for index in range(1, len(placed)):
        placed[index] = max(placed[index], placed[index - 1] + gap)
    placed[-1] = min(placed[-1], high)
    for index in range(len(placed) - 2, -1, -1):
        placed[index] = min(placed[index], placed[index + 1] - gap)
    result = [0.0] * len(positions)
    for index, position in zip(order, placed, strict=True):
        result[index] = position
    return result


def short(value: float) -> str:
    """A tick's number without trailing zeros."""
    return f"{value:.4g}"


# ------------------------------------------------------------------------------------------------------------- elements


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _element(tag: str, content: str | None = None, **attributes: float | str) -> str:
    """An element; a trailing underscore in an attribute's name is dropped and others become hyphens."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else _number(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}/>" if content is None else f"<{tag}{written}>{content}</{tag}>"


def _text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    return _element("text", escape(content), x=x, y=y, class_=css or "label", text_anchor=anchor)


def _rule(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return _element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def _svg(name: str, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """The chart; `name` is unique in the page because the title and the description are referred to by id."""
    head = _element("title", escape(title), id=f"{name}-title") + _element(
        "desc", escape(description), id=f"{name}-desc"
    )
    return _element(
        "svg",
        head + "".join(parts),
        viewBox=f"0 0 {WIDTH} {_number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_="chart",
    )


_MARKERS = ("circle", "square", "diamond", "triangle", "inverted", "bar")


def marker(shape: int, x: float, y: float, css: str, size: float = 4) -> str:
    """A marker at (x, y) whose shape follows from the series' place, so that series differ without colour."""
    kind = _MARKERS[shape % len(_MARKERS)]
    css = f"marker c-{css}"
    if kind == "circle":
        return _element("circle", cx=x, cy=y, r=size, class_=css)
    if kind == "square":
        side = size * 0.9
        return _element("rect", x=x - side, y=y - side, width=2 * side, height=2 * side, class_=css)
    outlines = {
        "diamond": [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        "triangle": [(0, -1.15), (1.15, 0.95), (-1.15, 0.95)],
        "inverted": [(0, 1.15), (1.15, -0.95), (-1.15, -0.95)],
        "bar": [(-1.2, -0.5), (1.2, -0.5), (1.2, 0.5), (-1.2, 0.5)],
    }
    points = " ".join(f"{_number(x + dx * size)},{_number(y + dy * size)}" for dx, dy in outlines[kind])
    return _element("polygon", points=points, class_=css)


def marker_key(shape: int, css: str) -> str:
    """The marker alone, for a legend."""
    return _element("svg", marker(shape, 8, 8, css, 5), viewBox="0 0 16 16", class_="key", aria_hidden="true")


def _pattern_fill(css: str, x: float, y: float, width: float, height: float, prefix: str) -> str:
    """A filled rectangle with the pattern of its part over it; the patterns are those of `pattern_definitions`."""
    place: dict[str, Any] = {"x": x, "y": y, "width": width, "height": height}
    return _element("rect", **place, class_=f"fill c-{css}") + _element("rect", **place, fill=f"url(#{prefix}{css})")


_PATTERNS = {
    "up": '<path class="hatch" d="M0 6 6 0"/>',
    "down": '<path class="hatch" d="M0 0 6 6"/>',
    "dots": '<circle class="dot" cx="3" cy="3" r="1.1"/>',
    "bars": '<path class="hatch" d="M3 0V6"/>',
}


def pattern_definitions(prefix: str, patterns: dict[str, str]) -> str:
    """An invisible `<svg>` that defines a pattern per css name; a pattern is up, down, dots, bars or plain."""
    definitions = "".join(
        _element(
            "pattern", _PATTERNS.get(kind, ""), id=f"{prefix}{css}", width=6, height=6, patternUnits="userSpaceOnUse"
        )
        for css, kind in patterns.items()
    )
    return _element("svg", _element("defs", definitions), width=0, height=0, class_="definitions", aria_hidden="true")


def pattern_key(css: str, prefix: str) -> str:
    """A swatch of a stacked bar's part, for a legend."""
    return _element(
        "svg", _pattern_fill(css, 0, 1, 16, 14, prefix), viewBox="0 0 16 16", class_="key", aria_hidden="true"
    )


# --------------------------------------------------------------------------------------------------------------- charts


def bars(
    name: str,
    title: str,
    rows: Sequence[Bar],
    *,
    high: float,
    reference: float,
    reference_label: str,
    unit: str = _TIMES,
) -> str:
    """Horizontal bars from 0 to `high` (shared by the panels of a figure) with intervals and a line at `reference`."""
    left, right, row_height, top = 92, 50, 22, 20

    def x(value: float) -> float:
        return left + (WIDTH - left - right) * min(max(value / high, 0.0), 1.0)

    bottom = top + row_height * len(rows)
    parts = []
    told = []
    for index, row in enumerate(rows):
        middle = top + row_height * (index + 0.5)
        css = "label strong" if row.css == "treegraft" else "label"
        parts.append(_text(left - 8, middle + 4, row.label, css, "end"))
        if row.value is None:
            parts.append(_text(left + 6, middle + 4, "not measured", "label faint"))
            told.append(f"{row.label} not measured")
            continue
        parts.append(
            _element("rect", x=left, y=middle - 7, width=x(row.value) - left, height=14, class_=f"fill c-{row.css}")
        )
        interval = ""
        if row.low is not None and row.high is not None:
            interval = f" ({row.low:.2f} to {row.high:.2f})"
            for width in ("whisker-halo", "whisker"):
                parts.append(_rule(x(row.low), middle, x(row.high), middle, width))
                parts += [_rule(x(end), middle - 4, x(end), middle + 4, width) for end in (row.low, row.high)]
        parts.append(_text(WIDTH, middle + 4, f"{row.value:.2f}{unit}", css + " value", "end"))
        told.append(f"{row.label} {row.value:.2f}{interval}")
    parts.append(_rule(x(reference), top - 4, x(reference), bottom + 2, "reference"))
    parts.append(_text(x(reference), top - 8, reference_label, "label faint", "middle"))
    return _svg(name, bottom + 4, title, "; ".join(told) + ".", parts)


def lines(name: str, title: str, series: Sequence[Line], *, x_title: str, high: float = 1.0) -> str:
    """Lines over x = 1, 2, ... with values 0..high shown as per cent; each line's name stands at its end."""
    depth = max((len(line.values) for line in series), default=1)
    left, right, top, bottom = 40, 96, 10, 190

    def x(level: int) -> float:
        return left + 10 + (WIDTH - left - right - 20) * (level - 1) / max(depth - 1, 1)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / high

    parts = []
    for tick in ticks(high, 5):
        if tick <= high * (1 + 1e-9):
            parts.append(_rule(left, y(tick), WIDTH - right, y(tick), "axis" if tick == 0 else "grid"))
            parts.append(_text(left - 6, y(tick) + 4, f"{tick:.0%}", "label faint", "end"))
    # Two digits and a gap must fit between the labels that are shown.
    every = math.ceil(3 * _CHARACTER * (depth - 1) / (x(depth) - x(1))) if depth > 1 else 1
    levels = range(1, depth + 1, every)
    parts += [_text(x(level), bottom + 16, str(level), "label faint", "middle") for level in levels]
    parts.append(_text((left + WIDTH - right) / 2, bottom + 34, x_title, "label faint", "middle"))
    drawn = [line for line in series if line.values]
    heights = spread([y(line.values[-1]) for line in drawn], 15, top + 4, bottom)
    told = []
    for shape, (line, label_y) in enumerate(zip(drawn, heights, strict=True)):
        points = [(x(level), y(value)) for level, value in enumerate(line.values, 1)]
        path = " ".join(f"{_number(px)},{_number(py)}" for px, py in points)
        parts.append(_element("polyline", points=path, class_=f"line c-{line.css}"))
        parts.extend(marker(shape, px, py, line.css) for px, py in points)
        end_x, end_y = points[-1]
        parts.append(_rule(end_x + 6, end_y, WIDTH - right + 6, label_y, "leader"))
        css = "label strong" if line.css == "treegraft" else "label"
        parts.append(_text(WIDTH - right + 10, label_y + 4, line.label, css))
        told.append(f"{line.label} " + ", ".join(f"{value:.0%}" for value in line.values))
    return _svg(name, bottom + 40, title, "; ".join(told) + ".", parts)


def stacks(name: str, title: str, rows: Sequence[Stack], *, unit: str, names: dict[str, str], prefix: str) -> str:
    """Stacked horizontal bars, each under its name and total; `names` says a part's css name in words."""
    high = max((sum(value for _, value in row.parts) for row in rows), default=0.0) or 1.0
    row_height = 42
    parts = []
    told = []
    for index, row in enumerate(rows):
        top = row_height * index
        total = sum(value for _, value in row.parts)
        css = "label strong" if row.css == "treegraft" else "label"
        parts.append(_text(0, top + 12, row.label, css))
        parts.append(_text(WIDTH, top + 12, f"{_three(total)} {unit}", css + " value", "end"))
        start = 0.0
        for part, value in row.parts:
            width = WIDTH * value / high
            if width > 0:
                parts.append(_pattern_fill(part, start, top + 18, width, 16, prefix))
                if start > 0:
                    parts.append(_rule(start, top + 18, start, top + 34, "divider"))
            start += width
        shares = ", ".join(f"{names[part]} {_three(value)}" for part, value in row.parts)
        told.append(f"{row.label}: {_three(total)} {unit} ({shares})")
    return _svg(name, row_height * len(rows), title, "; ".join(told) + ".", parts)


def _three(value: float) -> str:
    """Three significant digits, never in exponent notation."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def diagonal(
    name: str,
    title: str,
    series: Sequence[Points],
    *,
    high: float,
    x_title: str,
    y_title: str,
    percent: bool = False,
    connect: bool = False,
) -> str:
    """Points in a square 0..high with the diagonal on which both axes agree; `connect` joins them by a line."""
    left, top, side = 46, 24, 250
    bottom = top + side

    def x(value: float) -> float:
        return left + side * min(max(value / high, 0.0), 1.0)

    def y(value: float) -> float:
        return bottom - side * min(max(value / high, 0.0), 1.0)

    parts = []
    for tick in ticks(high, 5):
        if tick > high * (1 + 1e-9):
            continue
        label = f"{tick:.0%}" if percent else short(tick)
        css = "axis" if tick == 0 else "grid"
        parts += [_rule(left, y(tick), left + side, y(tick), css), _rule(x(tick), top, x(tick), bottom, css)]
        parts.append(_text(left - 6, y(tick) + 4, label, "label faint", "end"))
        parts.append(_text(x(tick), bottom + 16, label, "label faint", "middle"))
    parts.append(_rule(x(0), y(0), x(high), y(high), "reference"))
    parts.append(_text(left + side / 2, bottom + 34, x_title, "label faint", "middle"))
    parts.append(_text(0, 12, y_title, "label faint"))
    told = []
    for shape, group in enumerate(series):
        if connect and len(group.points) > 1:
            path = " ".join(f"{_number(x(point[0]))},{_number(y(point[1]))}" for point in group.points)
            parts.append(_element("polyline", points=path, class_=f"line c-{group.css}"))
        for point in group.points:
            size = 5.0 if len(point) < 3 else 2.5 + 4.5 * math.sqrt(point[2])
            parts.append(marker(shape, x(point[0]), y(point[1]), group.css, size))
        values = ", ".join(
            f"{point[0]:.0%} and {point[1]:.0%}" if percent else f"{point[0]:.2f} and {point[1]:.2f}"
            for point in group.points
        )
        told.append(f"{group.label}: {values}")
    return _svg(name, bottom + 40, title, f"{x_title} and {y_title}. " + "; ".join(told) + ".", parts)


def span(name: str, title: str, start: Bar, end: Bar, at: Bar, others: Sequence[Bar], *, unit: str = _TIMES) -> str:
    """A track from `start` to `end`, filled from `start` to `at`, with ticks for `others` below it.

    The axis is widened where `at` or one of `others` lies outside the track; a fill left of it has the colour "loss".
    """
    marks = [bar for bar in (start, end, at, *others) if bar.value is not None]
    values = [float(bar.value) for bar in marks if bar.value is not None]
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or 0.5
    low, high = low - margin, high + margin
    top, thick = 40, 20

    def x(value: float | None) -> float:
        return WIDTH * (float(value or 0.0) - low) / (high - low)

    a, b, c = x(start.value), x(end.value), x(at.value)
    parts = [
        _element("rect", x=min(a, b), y=top, width=abs(b - a), height=thick, class_="track"),
        _element(
            "rect", x=min(a, c), y=top, width=abs(c - a), height=thick, class_=f"fill c-{at.css if c >= a else 'loss'}"
        ),
        _rule(c, top - 8, c, top + thick + 4, "tick bold"),
    ]
    ours = f"{at.label} {at.value:.2f}{unit}"
    half = len(ours) * _CHARACTER / 2 + 6
    parts.append(_text(min(max(c, half), WIDTH - half), top - 14, ours, "label strong", "middle"))
    below = sorted((bar for bar in marks if bar is not at), key=lambda bar: -float(bar.value or 0.0))
    ticks_below, labels_below = [], []
    for row, bar in enumerate(below):
        label = f"{bar.label} {bar.value:.2f}{unit}"
        y, place = top + thick + 20 + row * 17, x(bar.value)
        ticks_below.append(_rule(place, top - 3, place, y + 2, "tick"))
        # From right to left and down, so that a tick meets few labels; where it does, the label's halo interrupts it.
        right = WIDTH - place > len(label) * _CHARACTER + 10
        labels_below.append(
            _text(place + 5 if right else place - 5, y, label, "label halo", "start" if right else "end")
        )
    parts += ticks_below + labels_below
    told = "; ".join(f"{bar.label} {bar.value:.2f}" for bar in sorted(marks, key=lambda bar: float(bar.value or 0.0)))
    return _svg(name, top + thick + 12 + 17 * len(below), title, told + ".", parts)
