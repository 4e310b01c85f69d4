"""Columns of the trace tables with unit and meaning, what a trace folder's manifest says, and the data card of both."""

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from treegraft.errors import UserError
from treegraft.values.states import offset

SCHEMA_VERSION = "4"
SPLITS = ("train", "validation", "test")

FEATURES = {
    "log_prompt_tokens": ("log tokens", "log(1 + prompt length)"),
    "target_ms": ("ms", "modelled time of one token in the target after the prompt"),
    r"drafter(\d+)_ms": ("ms", r"modelled time of one token in drafter \1 after the prompt"),
    r"log_cost_ratio(\d+)": ("log ratio", r"log(drafter \1's time / target's time)"),
    "layer_share": ("share", "layer to be decided / depth"),
    "call_share": ("share", "calls so far in this step / depth"),
    r"called(\d+)_layer(\d+)": ("0 or 1", r"1 if drafter \1 acted in layer \2 of this step"),
    "frontier_depth": ("tokens", "mean depth of the frontier"),
    "frontier_leaf_share": ("share", "frontier nodes without children"),
    "collapse_debt": ("tokens", "mean depth of the frontier minus that of the reselected one"),
    "lookback_share": ("share", "reselected nodes that were added before the last layer"),
    "frontier_overlap": ("share", "nodes in both frontiers / width"),
    "reselected_score": ("log probability", "mean score of the reselected nodes"),
    "log_answer_tokens": ("log tokens", "log(1 + tokens of the answer so far)"),
    "light_match": ("share", "longest suffix of the text that occurred before / longest that is looked up"),
    "light_chance": ("probability", "that its best continuation is the next token, by the n-gram table"),
    "light_hits": ("share", "latest tokens that the best continuation foresaw, moving average"),
    "target_confidence": ("probability", "that the target gave to its latest tokens, moving average"),
    r"drafter(\d+)_hits": ("share", r"latest tokens that drafter \1 proposed first, called everywhere, moving average"),
    "root_chance": ("probability", "likeliest child of the root, by present scores"),
    "tree_mass": ("tokens", "expected accepted length if the whole tree were verified, by present scores"),
    r"(frontier|reselected)_mass": ("tokens", r"summed path probability of the \1 nodes"),
}
"""Unit and meaning of every feature, by a pattern of its name."""


def _field(name: str, kind: pa.DataType, unit: str, meaning: str) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"unit": unit, "description": meaning})


def _feature(name: str) -> pa.Field:
    for pattern, (unit, meaning) in FEATURES.items():
        if found := re.fullmatch(pattern, name):
            return _field(f"f_{name}", pa.float32(), unit, found.expand(meaning))
    # A feature of another version of the library: traces that hold it stay readable.
    return _field(f"f_{name}", pa.float32(), "unknown", f"feature {name}")


_IDS = [
    _field("prompt_id", pa.string(), "name", "kind, question id and turn of the prompt"),
    _field("kind", pa.string(), "name", "kind of prompt (benchmark)"),
    _field("position", pa.int32(), "tokens", "answer tokens before the decoding step, from 0"),
]


def states_schema(feature_names: list[str], drafters: int) -> pa.Schema:
    """Columns of the table of scheduling states."""
    columns = [
        *_IDS,
        _field("layer", pa.int8(), "layers", "layer to be decided, from 1"),
        _field("prefix", pa.list_(pa.int8()), "drafter index", "actions of the layers before"),
        *(_feature(name) for name in feature_names),
        *(
            _field(f"margin_{j}", pa.float32(), "tokens", f"worth of action {j} over action 0, the policy going on")
            for j in range(1, drafters)
        ),
        _field("visit_weight", pa.float32(), "weight", "how much the state counts in training"),
    ]
    return pa.schema(columns, metadata={"treegraft.schema": SCHEMA_VERSION, "treegraft.table": "states"})


def schedules_schema(sizes: tuple[int, ...]) -> pa.Schema:
    """Columns of the table of schedules."""
    grid = "/".join(map(str, sizes))
    columns = [
        *_IDS,
        _field("prompt_tokens", pa.int32(), "tokens", "length of the prompt"),
        _field("tokens_left", pa.int32(), "tokens", "answer tokens from this position on"),
        _field("schedule", pa.list_(pa.int8()), "drafter index", "action of every layer"),
        _field("accepted", pa.list_(pa.int16()), "tokens", f"accepted length when {grid} nodes are verified"),
        _field("expected", pa.list_(pa.float32()), "tokens", f"accepted length the scores expect, {grid} nodes"),
        _field("nodes", pa.int16(), "nodes", "nodes of the tree, root left out"),
        _field("layer_tokens", pa.list_(pa.int16()), "tokens", "tokens the acting drafter processed in each layer"),
        _field(
            "path_processed", pa.list_(pa.int16()), "tokens", "leading tokens of the true path each drafter processed"
        ),
        _field(
            "mean_accepted",
            pa.list_(pa.float32()),
            "tokens",
            f"mean of accepted over the target's draws, the text's end left out, {grid} nodes; empty for greedy text",
        ),
    ]
    return pa.schema(columns, metadata={"treegraft.schema": SCHEMA_VERSION, "treegraft.table": "schedules"})


def same_type(left: pa.DataType, right: pa.DataType) -> bool:
    """Whether two column types hold the same values; a list's inner name and nullability are a writer's habit."""
    if pa.types.is_list(left) and pa.types.is_list(right):
        return same_type(left.value_type, right.value_type)
    return bool(left == right)


@dataclass(frozen=True)
class TraceLayout:
    """What the tables of a trace folder look like, from its manifest."""

    feature_names: list[str]
    drafters: list[str]
    """In order of cost, [m]."""
    depth: int
    sizes: tuple[int, ...]
    """The grid of verified sizes, [G]."""
    temperature: float
    """Of the target's answers; 0 is greedy text."""

    @staticmethod
    def from_manifest(manifest: dict[str, Any]) -> "TraceLayout":
        """Raises UserError for another schema version or an entry that is missing or of the wrong kind."""
        if manifest.get("schema") != SCHEMA_VERSION:
            raise UserError(f"manifest.json has schema version {manifest.get('schema')}, not {SCHEMA_VERSION}.")
        kinds = {"feature_names": str, "drafters": str, "verified_sizes": int}
        for name, kind in kinds.items():
            values = manifest.get(name)
            if not isinstance(values, list) or not values or not all(type(value) is kind for value in values):
                raise UserError(f"manifest.json has no usable {name}.")
        depth = manifest.get("depth")
        if type(depth) is not int or not 1 <= depth <= 64:
            raise UserError("manifest.json has no usable depth.")
        temperature = manifest.get("temperature")
        if type(temperature) is not float or not 0 <= temperature < float("inf"):
            raise UserError("manifest.json has no usable temperature.")
        sizes = tuple(manifest["verified_sizes"])
        return TraceLayout(manifest["feature_names"], manifest["drafters"], depth, sizes, temperature)

    def schema(self, table: str) -> pa.Schema:
        """Of the table ``states`` or ``schedules``."""
        if table == "states":
            return states_schema(self.feature_names, len(self.drafters))
        return schedules_schema(self.sizes)

    def per_position(self, table: str) -> int:
        """Rows that a position has in a table."""
        m = len(self.drafters)
        return offset(self.depth, m) if table == "states" else int(m**self.depth)

    def width(self, column: str) -> int:
        """Length of every list in a column of lists of ``schedules``."""
        sizes = len(self.sizes)
        widths = {
            "accepted": sizes,
            "expected": sizes,
            "mean_accepted": sizes if self.temperature > 0 else 0,
            "path_processed": len(self.drafters),
        }
        return widths.get(column, self.depth)


def data_card(pair: str, manifest: dict[str, Any]) -> str:
    """README.md of a trace folder: what it holds, column by column, from the schemas themselves."""
    layout = TraceLayout.from_manifest(manifest)
    lines = [
        f"# Traces of {pair}",
        "",
        f"Schema version {SCHEMA_VERSION}. Splits are by prompt. Drafters in order of cost: "
        f"{', '.join(layout.drafters)}. Depth {layout.depth}. Temperature of the answers {layout.temperature:g}.",
        "",
        "| split | prompts | positions | states | schedules |",
        "|---|---|---|---|---|",
        *(
            f"| {split} | {c['prompts']} | {c['positions']} | {c['states']} | {c['schedules']} |"
            for split, c in manifest["splits"].items()
        ),
    ]
    for table in ("states", "schedules"):
        lines += ["", f"## {table}", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for field in layout.schema(table):
            about = {key.decode(): value.decode() for key, value in field.metadata.items()}
            lines.append(f"| {field.name} | {field.type} | {about['unit']} | {about['description']} |")
    load = 'datasets.load_dataset("parquet", data_files={"train": "states/train-*.parquet"})'
    return "\n".join([*lines, "", f"Load with `{load}`. Check a copy with `pipeline validate <folder>`.", ""])
