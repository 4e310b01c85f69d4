"""Recorded decoding steps as drawings: where each node of a draft tree stands, and what is written beside it.

Pure functions of `steps` in report.json (see `pipeline.recorded_steps`). No markup is made here:
templates/steps.html.j2 draws what these dataclasses say and escapes every text.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

PIECES = {" ": "\N{OPEN BOX}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}"}
CUT = "\N{HORIZONTAL ELLIPSIS}"
NOTHING = "\N{EMPTY SET}"
COLUMNS = 18  # of a node's text at most, in characters of usual width

ROW, BOX, GAP, EDGE = 27, 21, 26, 4  # pitch of rows, height of a box, space between two depths, margin
CHARACTER, SMALL = 7.3, 6.2  # widths of a token's and a note's character
SIGN, PADDING = 20, 8  # space for the drafter's sign, space at the right and between text and note

WHY = {
    "recovered": "a call takes up a branch that had been left behind",
    "shared": "accepted tokens of several drafters",
    "longest": "the longest accepted draft",
    "rejected": "the whole draft is rejected",
    "skips": "the light drafter alone",
}

Piece = tuple[bool, str]
"""A piece of text and whether it is a mark that stands for something invisible."""


@dataclass(frozen=True)
class Box:
    """One node, in the units of the drawing; x and y are its left and upper edge, its height is BOX."""

    x: int
    y: int
    width: int
    css: str
    """Of verified or unverified, accepted, recovered, bonus, root: what holds."""
    pieces: list[Piece]
    note: str
    title: str
    drafter: int | None
    """Who proposed it; None for the root and the bonus token."""


@dataclass(frozen=True)
class Link:
    """The line from a parent to a child: an SVG path."""

    path: str
    css: str


@dataclass(frozen=True)
class Drawing:
    """A laid out tree. Links of the accepted path come last, so that they are drawn over the others."""

    width: int
    height: int
    boxes: list[Box]
    links: list[Link]


# ----------------------------------------------------------------------------------------------------------------- text


def visible(text: str) -> list[Piece]:
    """A token's text with marks for white space and escapes for what cannot be seen."""

    def shown(character: str) -> Piece:
        if character in PIECES:
            return True, PIECES[character]
        if character.isprintable():
            return False, character
        return True, character.encode("unicode_escape").decode()

    if not text:
        return [(True, NOTHING)]
    return [
        (mark, "".join(piece for _, piece in group))
        for mark, group in groupby(map(shown, text), key=lambda piece: piece[0])
    ]


def columns(text: str) -> int:
    """The width of a text in characters of usual width."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def shortened(pieces: list[Piece], limit: int = COLUMNS) -> list[Piece]:
    """As many characters as fit into ``limit`` columns, the last of them an ellipsis where something is cut off."""
    if sum(columns(text) for _, text in pieces) <= limit:
        return pieces
    kept: list[Piece] = []
    room = limit - 1
    for mark, text in pieces:
        fits = 0
        while fits < len(text) and columns(text[: fits + 1]) <= room:
            fits += 1
        kept += [(mark, text[:fits])] if fits else []
        room -= columns(text[:fits])
        if fits < len(text):
            break
    return [*kept, (True, CUT)]


def chance(probability: float) -> str:
    """A probability in as few characters as it needs."""
    return "<.01" if probability < 0.01 else f"{probability:.2f}".removeprefix("0")


def signed(margin: float) -> str:
    """A margin with its sign."""
    return f"{margin:+.2f}".replace("-", "\N{MINUS SIGN}")


# --------------------------------------------------------------------------------------------------------------- layout


def lay_out(step: Mapping[str, Any], drafters: Sequence[str]) -> Drawing:
    """Where the nodes of a recorded step stand: a column for each depth, the likelier of two siblings above the other.

    Only an emitted token comes before likelier ones: the accepted tokens and the bonus token are the first row.
    """
    parent = list(step["parent"])
    emitted = list(step["accepted"])
    if step["bonus"] is not None:
        emitted.append(len(parent))
        parent.append(step["accepted"][-1] if step["accepted"] else 0)
    children = _children(parent, [*step["probability"], 0.0], set(emitted))
    depths = [0]
    for above in parent[1:]:
        depths.append(depths[above] + 1)
    rows = _rows(parent, depths, children)
    boxes = [_box(step, node, drafters) for node in range(len(parent))]
    lefts = [EDGE]
    for depth in range(max(depths)):
        widest = max(box.width for box, at in zip(boxes, depths, strict=True) if at == depth)
        lefts.append(lefts[-1] + widest + GAP)
    boxes = [
        replace(box, x=lefts[depth], y=EDGE + row * ROW) for box, depth, row in zip(boxes, depths, rows, strict=True)
    ]
    order = sorted(range(1, len(parent)), key=lambda node: (node in emitted, node))
    links = [Link(_path(boxes[parent[node]], boxes[node]), _link_css(step, node, node in emitted)) for node in order]
    return Drawing(
        width=max(box.x + box.width for box in boxes) + EDGE,
        height=max(box.y for box in boxes) + BOX + EDGE,
        boxes=boxes,
        links=links,
    )


def _children(parent: list[int], probability: list[float], emitted: set[int]) -> list[list[int]]:
    """The children of each node in the order in which they are drawn."""
    children: list[list[int]] = [[] for _ in parent]
    for node in range(1, len(parent)):
        children[parent[node]].append(node)
    for below in children:
        below.sort(key=lambda node: (node not in emitted, -probability[node], node))
    return children


def _rows(parent: list[int], depths: list[int], children: list[list[int]]) -> list[int]:
    """The row of each node, as high up as it can be without a crossing.

    Nodes are placed depth first. One stands below all that were placed before in its own column, so boxes stay apart,
    and below all of the next column, where the lines end that start in its column.
    """
    rows = [0] * len(parent)
    lowest = [-1] * (max(depths) + 2)
    waiting = [0]
    while waiting:
        node = waiting.pop()
        depth = depths[node]
        rows[node] = max(rows[parent[node]], lowest[depth] + 1, lowest[depth + 1] + 1)
        lowest[depth] = rows[node]
        waiting += reversed(children[node])
    return rows


def _box(step: Mapping[str, Any], node: int, drafters: Sequence[str]) -> Box:
    """What a node shows, not placed yet; the number behind the last node stands for the bonus token."""
    drafter: int | None = None
    if node == len(step["text"]):
        text, css, note, title = step["bonus"], "bonus", "bonus", "the bonus token, the target's own"
    elif node == 0:
        text, css, note, title = step["text"][0], "root", "root", "the root, the last token of the text so far"
    else:
        text, drafter, scorer = step["text"][node], step["drafter"][node], step["scorer"][node]
        states = [state for state in ("verified", "accepted", "recovered") if node in step[state]]
        css = " ".join(states if "verified" in states else ["unverified", *states])
        note = chance(step["probability"][node])
        title = f"proposed by {drafters[drafter]} in layer {step['layer'][node]}, probability {note}"
        title += f" by {drafters[scorer]}" if scorer != drafter else ""
        title = ", ".join([title, *(states or ["not verified"])])
    pieces = visible(text)
    shown = shortened(pieces)
    used = sum(columns(piece) for _, piece in shown) * CHARACTER + len(note) * SMALL
    return Box(
        x=0,
        y=0,
        width=round((PADDING if drafter is None else SIGN) + used + 2 * PADDING),
        css=css,
        pieces=shown,
        note=note,
        title="".join(piece for _, piece in pieces) + ": " + title,
        drafter=drafter,
    )


def _path(above: Box, below: Box) -> str:
    """Straight to the right within a row, otherwise with a bend in the gap before the child's column."""
    start, y, end = above.x + above.width, above.y + BOX // 2, below.y + BOX // 2
    return f"M{start} {y}H{below.x}" if y == end else f"M{start} {y}H{below.x - GAP // 2}V{end}H{below.x}"


def _link_css(step: Mapping[str, Any], node: int, emitted: bool) -> str:
    if emitted:
        return "emitted"
    return "verified" if node in step["verified"] else "unverified"


# --------------------------------------------------------------------------------------------------------- what is said


def explorer(recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For the template: each recorded prompt with its steps."""
    return [
        {
            "prompt_id": prompt["prompt_id"],
            "bench": prompt["bench"],
            "drafters": prompt["drafters"],
            "steps": [_step(step, prompt, f"step-{number}-{step['step']}") for step in prompt["steps"]],
        }
        for number, prompt in enumerate(recorded, 1)
    ]


def _step(step: Mapping[str, Any], prompt: Mapping[str, Any], name: str) -> dict[str, Any]:
    accepted, checked = len(step["accepted"]), step["checked"]
    emitted = [step["text"][node] for node in step["accepted"]]
    if step["bonus"] is not None:
        emitted.append(step["bonus"])
    return {
        "name": name,
        "heading": f"Step {step['step']} of {prompt['total']}",
        "why": WHY[step["why"]],
        "counts": f"{step['drafted']} nodes drafted, {checked} verified, {accepted} accepted",
        "left_out": step["drafted"] + 1 - len(step["text"]),
        "before": [visible(text) for text in step["before"]],
        "emitted": [visible(text) for text in emitted],
        "accepted": accepted,
        "layers": [
            {
                "action": layer["action"],
                "margins": [signed(margin) for margin in layer["margins"]],
                "added": layer["added"],
            }
            for layer in step["layers"]
        ],
        "drawing": lay_out(step, prompt["drafters"]),
    }
