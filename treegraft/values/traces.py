"""Traces: labelled tables as Parquet, written and read with one explicit schema.

Folder::

    states/<split>-00000-of-0000N.parquet      one row per scheduling state
    schedules/<split>-00000-of-0000N.parquet   one row per position and schedule
    profile.json, calibration.json             what the labels were made with
    README.md                                  data card, generated from the schemas
    manifest.json                              written last: the folder is complete

Rows are in the order of prompts, positions, and states or schedules, so tables come back by reshaping.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treegraft.costs import CostModel
from treegraft.errors import UserError
from treegraft.values.lattice import Outcomes
from treegraft.values.states import offset, prefixes, schedules
from treegraft.values.tables import OutcomeTables, build_tables

SCHEMA_VERSION = "1"
ROW_GROUP = 32_768  # a few MB
ROWS_PER_FILE = 1_000_000


def _field(name: str, kind: pa.DataType, unit: str, meaning: str) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"unit": unit, "description": meaning})


_IDS = [
    _field("prompt_id", pa.string(), "", "kind, question id and turn of the prompt"),
    _field("kind", pa.string(), "", "kind of prompt (benchmark)"),
    _field("position", pa.int32(), "tokens", "answer tokens before the decoding step, from 0"),
]


def states_schema(feature_names: list[str], drafters: int) -> pa.Schema:
    """Columns of the table of scheduling states."""
    columns = [
        *_IDS,
        _field("layer", pa.int8(), "", "layer to be decided, from 1"),
        _field("prefix", pa.list_(pa.int8()), "drafter index", "actions of the layers before"),
        *(_field(f"f_{name}", pa.float32(), "", f"feature {name}") for name in feature_names),
        *(
            _field(f"margin_{j}", pa.float32(), "tokens", f"worth of action {j} over action 0, the policy going on")
            for j in range(1, drafters)
        ),
        _field("visit_weight", pa.float32(), "", "how much the state counts in training"),
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
    ]
    return pa.schema(columns, metadata={"treegraft.schema": SCHEMA_VERSION, "treegraft.table": "schedules"})


def write_split(folder: Path, split: str, tables: OutcomeTables) -> dict[str, Any]:
    """Write one split's two tables below ``folder``; returns row counts for the manifest."""
    count = {}
    for name, schema, batches in (
        ("states", states_schema(tables.feature_names, tables.drafters), _states(tables)),
        ("schedules", schedules_schema(tables.sizes), _schedules(tables)),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        per_position = offset(tables.depth, tables.drafters) if name == "states" else tables.drafters**tables.depth
        count[name] = len(tables) * per_position
        files = max(1, -(-count[name] // ROWS_PER_FILE))
        batch_list = iter(batches)
        rows_each = -(-len(tables) // files)
        for number in range(files):
            path = folder / name / f"{split}-{number:05d}-of-{files:05d}.parquet"
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                for batch in _take(batch_list, rows_each, number, len(tables)):
                    writer.write_table(batch.cast(schema), row_group_size=ROW_GROUP)
    count["positions"] = len(tables)
    count["prompts"] = len(tables.prompt_ids)
    return count


def _take(batches: "Iterator[tuple[int, pa.Table]]", rows_each: int, number: int, total: int) -> Iterator[pa.Table]:
    """The tables of one file: positions [number * rows_each, (number + 1) * rows_each)."""
    end = min((number + 1) * rows_each, total)
    done = number * rows_each
    while done < end:
        positions, table = next(batches)
        done += positions
        yield table


POSITIONS_PER_BATCH = 1024


def _ids(tables: OutcomeTables, rows: slice, repeat: int) -> dict[str, Any]:
    of = tables.prompt_of[rows]
    return {
        "prompt_id": np.repeat(np.array(tables.prompt_ids)[of], repeat),
        "kind": np.repeat(np.array(tables.kinds)[of], repeat),
        "position": np.repeat(tables.position[rows], repeat).astype(np.int32),
    }


def _batches(tables: OutcomeTables) -> Iterator[slice]:
    files_rows = len(tables)
    for start in range(0, files_rows, POSITIONS_PER_BATCH):
        yield slice(start, min(start + POSITIONS_PER_BATCH, files_rows))


def _states(tables: OutcomeTables) -> Iterator[tuple[int, pa.Table]]:
    known = prefixes(tables.depth, tables.drafters)
    for rows in _batches(tables):
        n = rows.stop - rows.start
        columns = _ids(tables, rows, len(known))
        columns["layer"] = np.tile(np.array([len(prefix) + 1 for prefix in known], np.int8), n)
        columns["prefix"] = pa.array([list(prefix) for prefix in known] * n, pa.list_(pa.int8()))
        for i, name in enumerate(tables.feature_names):
            columns[f"f_{name}"] = tables.features[rows, :, i].ravel()
        for j in range(1, tables.drafters):
            columns[f"margin_{j}"] = tables.margins[rows, :, j - 1].ravel()
        columns["visit_weight"] = tables.visits[rows].ravel()
        yield n, pa.table(columns)


def _lists(values: np.ndarray) -> pa.Array:
    """[..., n] as a column of lists of n."""
    width = values.shape[-1]
    count = values.size // max(width, 1)
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * width, pa.array(values.ravel()))


def _schedules(tables: OutcomeTables) -> Iterator[tuple[int, pa.Table]]:
    plans = schedules(tables.depth, tables.drafters).astype(np.int8)
    for rows in _batches(tables):
        n = rows.stop - rows.start
        columns = _ids(tables, rows, len(plans))
        columns["prompt_tokens"] = np.repeat(tables.prompt_tokens[tables.prompt_of[rows]], len(plans)).astype(np.int32)
        columns["tokens_left"] = np.repeat(tables.left[rows], len(plans)).astype(np.int32)
        columns["schedule"] = _lists(np.tile(plans, (n, 1)))
        columns["accepted"] = _lists(tables.accepted[rows])
        columns["expected"] = _lists(tables.mass[rows])
        columns["nodes"] = tables.nodes[rows].ravel()
        columns["layer_tokens"] = _lists(tables.layer_tokens[rows])
        columns["path_processed"] = _lists(tables.path_processed[rows])
        yield n, pa.table(columns)


def read_traces(folder: Path, split: str) -> OutcomeTables:
    """The labelled tables of a split.

    Raises:
        UserError: the folder is incomplete, of another schema, or a file lacks a column or is damaged.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing, so the traces are incomplete; run stage traces again.") from None
    except ValueError:
        raise UserError(f"a JSON file in {folder} is damaged; run stage traces again.") from None
    if manifest.get("schema") != SCHEMA_VERSION:
        raise UserError(
            f"the traces in {folder} have schema {manifest.get('schema')}, not {SCHEMA_VERSION}; make them anew."
        )
    names, m, depth = manifest["feature_names"], len(manifest["drafters"]), manifest["depth"]
    sizes = tuple(manifest["verified_sizes"])
    states = _read(folder / "states", split, states_schema(names, m))
    plans = _read(folder / "schedules", split, schedules_schema(sizes))
    per_state, per_plan = offset(depth, m), m**depth
    positions = len(plans) // per_plan
    if len(states) != positions * per_state or len(plans) != positions * per_plan:
        raise UserError(f"the {split} tables in {folder} hold an incomplete position; run stage traces again.")

    def stacked(column: str, width: int) -> np.ndarray:
        return (
            plans[column].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(positions, per_plan, width)
        )

    def of_states(columns: list[str]) -> np.ndarray:
        values = [states[name].to_numpy().reshape(positions, per_state) for name in columns]
        return np.stack(values, axis=-1) if values else np.zeros((positions, per_state, 0), np.float32)

    ids = np.array(plans["prompt_id"].to_pylist()[::per_plan])
    kinds = plans["kind"].to_pylist()[::per_plan]
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if positions else np.zeros(0, np.int64)
    ends = np.append(starts[1:], positions)
    arrays = {
        "features": of_states([f"f_{name}" for name in names]),
        "accepted": stacked("accepted", len(sizes)),
        "mass": stacked("expected", len(sizes)),
        "nodes": plans["nodes"].to_numpy().reshape(positions, per_plan),
        "layer_tokens": stacked("layer_tokens", depth),
        "path_processed": stacked("path_processed", m),
    }
    prompt_tokens = plans["prompt_tokens"].to_numpy()[::per_plan]
    tables = build_tables(
        [
            (
                str(ids[a]),
                kinds[a],
                int(prompt_tokens[a]),
                Outcomes(**{name: array[a:b] for name, array in arrays.items()}),
            )
            for a, b in zip(starts, ends, strict=True)
        ],
        names,
        m,
        depth,
        sizes,
        CostModel.from_json(profile["cost_model"]),
    )
    labels = of_states([f"margin_{j}" for j in range(1, m)])
    return tables.labelled(labels, of_states(["visit_weight"])[..., 0])


def _read(folder: Path, split: str, schema: pa.Schema) -> pa.Table:
    files = sorted(folder.glob(f"{split}-*.parquet"))
    if not files:
        raise UserError(f"{folder} has no {split} file; run stage traces again.")
    parts = []
    for path in files:
        try:
            found = pq.read_schema(path)
            if not found.equals(schema):
                missing = sorted(set(schema.names) - set(found.names))
                what = f"lacks the columns {', '.join(missing)}" if missing else "has columns of other types"
                raise UserError(f"{path} {what}; run stage traces again.")
            parts.append(pq.read_table(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{path} is damaged ({' '.join(str(error).split())[:120]}); run stage traces again."
            ) from error
    return pa.concat_tables(parts)


def data_card(pair: str, manifest: dict[str, Any], states: pa.Schema, plans: pa.Schema) -> str:
    """README.md of a trace folder: what it holds, column by column, from the schemas themselves."""
    lines = [
        f"# Traces of {pair}",
        "",
        f"Schema version {SCHEMA_VERSION}. Splits are by prompt. Drafters in order of cost: "
        f"{', '.join(manifest['drafters'])}. Depth {manifest['depth']}.",
        "",
        "| split | prompts | positions | states | schedules |",
        "|---|---|---|---|---|",
        *(
            f"| {split} | {c['prompts']} | {c['positions']} | {c['states']} | {c['schedules']} |"
            for split, c in manifest["splits"].items()
        ),
    ]
    for schema in (states, plans):
        table = schema.metadata[b"treegraft.table"].decode()
        lines += ["", f"## {table}", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for field in schema:
            about = {key.decode(): value.decode() for key, value in field.metadata.items()}
            lines.append(f"| {field.name} | {field.type} | {about['unit']} | {about['description']} |")
    load = 'datasets.load_dataset("parquet", data_files={"train": "states/train-*.parquet"})'
    return "\n".join([*lines, "", f"Load with `{load}`.", ""])
