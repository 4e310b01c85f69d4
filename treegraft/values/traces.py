"""Traces: labelled tables as Parquet, written and read row group by row group with one explicit schema.

Folder::

    states/<split>-00000-of-0000N.parquet      one row per scheduling state
    schedules/<split>-00000-of-0000N.parquet   one row per position and schedule
    profile.json, calibration.json             what the labels were made with
    README.md                                  data card, generated from the schemas
    manifest.json                              written last: the folder is complete; has every file's digest

Rows are in the order of prompts, positions, and states or schedules, so tables come back by reshaping.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from treegraft.costs import CostModel
from treegraft.errors import UserError
from treegraft.values.schema import SCHEMA_VERSION, TraceLayout, same_type, schedules_schema, states_schema
from treegraft.values.states import offset, prefixes, schedules
from treegraft.values.tables import OutcomeTables

ROW_GROUP = 32_768  # a few MB
ROWS_PER_FILE = 1_000_000
TABLES = ("states", "schedules")
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises on a file whose bytes are damaged."""


# --- writing ---------------------------------------------------------------------------------------------------------


def write_split(folder: Path, split: str, tables: OutcomeTables) -> None:
    """Write one split's two tables below ``folder``."""
    write_parts(folder, split, [tables], len(tables))


def write_parts(folder: Path, split: str, parts: Iterable[OutcomeTables], positions: int) -> None:
    """``write_split`` of tables that come one after the other, of which only one need be in memory.

    Args:
        parts: whole prompts each, of equal settings; positions: in all parts together, which settles the file names.
    """
    writers: list[_TableWriter] = []
    try:
        for part in parts:
            if not writers:
                depth, m = part.depth, part.drafters
                writers += [
                    _TableWriter(
                        folder / "states" / split,
                        states_schema(part.feature_names, m),
                        _states_columns,
                        offset(depth, m),
                        positions,
                    ),
                    _TableWriter(
                        folder / "schedules" / split,
                        schedules_schema(part.sizes),
                        _schedules_columns,
                        m**depth,
                        positions,
                    ),
                ]
            for writer in writers:
                writer.write(part)
    finally:
        for writer in writers:
            writer.close()


class _TableWriter:
    """One table of one split: files of about ROWS_PER_FILE rows in row groups of at most ROW_GROUP, whole positions."""

    def __init__(
        self,
        stem: Path,
        schema: pa.Schema,
        columns: Callable[[OutcomeTables, slice], dict[str, Any]],
        per_position: int,
        positions: int,
    ) -> None:
        self.stem, self.schema, self.columns = stem, schema, columns
        files = max(1, -(-positions * per_position // ROWS_PER_FILE))
        self.positions_per_file = max(1, -(-positions // files))
        self.files = -(-positions // self.positions_per_file)
        self.step = max(1, ROW_GROUP // per_position)
        self.written = 0
        self.file: pq.ParquetWriter | None = None
        stem.parent.mkdir(parents=True, exist_ok=True)

    def write(self, part: OutcomeTables) -> None:
        start = 0
        while start < len(part):
            number, within = divmod(self.written, self.positions_per_file)
            if within == 0:
                self.close()
                path = self.stem.with_name(f"{self.stem.name}-{number:05d}-of-{self.files:05d}.parquet")
                self.file = pq.ParquetWriter(path, self.schema, compression="zstd")
            assert self.file is not None
            stop = min(start + self.step, len(part), start + self.positions_per_file - within)
            rows = pa.table(self.columns(part, slice(start, stop))).cast(self.schema)
            self.file.write_table(rows, row_group_size=ROW_GROUP)
            self.written += stop - start
            start = stop

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def _ids(tables: OutcomeTables, rows: slice, repeat: int) -> dict[str, Any]:
    of = tables.prompt_of[rows]
    first, last = int(of[0]), int(of[-1]) + 1  # prompts are contiguous, so few names are looked at
    return {
        "prompt_id": np.repeat(np.array(tables.prompt_ids[first:last])[of - first], repeat),
        "kind": np.repeat(np.array(tables.kinds[first:last])[of - first], repeat),
        "position": np.repeat(tables.position[rows], repeat).astype(np.int32),
    }


def _states_columns(tables: OutcomeTables, rows: slice) -> dict[str, Any]:
    known = prefixes(tables.depth, tables.drafters)
    n = rows.stop - rows.start
    columns = _ids(tables, rows, len(known))
    columns["layer"] = np.tile(np.array([len(prefix) + 1 for prefix in known], np.int8), n)
    columns["prefix"] = pa.array([list(prefix) for prefix in known] * n, pa.list_(pa.int8()))
    for i, name in enumerate(tables.feature_names):
        columns[f"f_{name}"] = tables.features[rows, :, i].ravel()
    for j in range(1, tables.drafters):
        columns[f"margin_{j}"] = tables.margins[rows, :, j - 1].ravel()
    columns["visit_weight"] = tables.visits[rows].ravel()
    return columns


def _schedules_columns(tables: OutcomeTables, rows: slice) -> dict[str, Any]:
    plans = schedules(tables.depth, tables.drafters).astype(np.int8)
    columns = _ids(tables, rows, len(plans))
    columns["prompt_tokens"] = np.repeat(tables.prompt_tokens[tables.prompt_of[rows]], len(plans)).astype(np.int32)
    columns["tokens_left"] = np.repeat(tables.left[rows], len(plans)).astype(np.int32)
    columns["schedule"] = _lists(np.tile(plans, (rows.stop - rows.start, 1)))
    columns["accepted"] = _lists(tables.accepted[rows])
    columns["expected"] = _lists(tables.mass[rows])
    columns["nodes"] = tables.nodes[rows].ravel()
    columns["layer_tokens"] = _lists(tables.layer_tokens[rows])
    columns["path_processed"] = _lists(tables.path_processed[rows])
    columns["mean_accepted"] = _lists(tables.mean_accepted[rows])
    return columns


def _lists(values: NDArray[Any]) -> pa.Array:
    """[..., n] as a column of lists of n."""
    *rows, width = values.shape
    offsets = np.arange(math.prod(rows) + 1, dtype=np.int32) * width
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))


def trace_manifest(
    folder: Path, tables: dict[str, OutcomeTables], drafters: list[str], temperature: float, max_new_tokens: int
) -> dict[str, Any]:
    """What manifest.json says at least: the layout, the size of each split, and every Parquet file's digest.

    Args:
        tables: by split, as they were written below ``folder``; drafters: names in order of cost, [m];
        temperature: of the target's answers; max_new_tokens: most tokens of one.
    """
    some = next(iter(tables.values()))
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for table in TABLES
        for path in sorted((folder / table).glob("*.parquet"))
    }
    return {
        "schema": SCHEMA_VERSION,
        "drafters": drafters,
        "depth": some.depth,
        "feature_names": some.feature_names,
        "verified_sizes": list(some.sizes),
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "splits": {split: split_counts(part) for split, part in tables.items()},
        "files": files,
    }


def split_counts(tables: OutcomeTables) -> dict[str, int]:
    """Prompts, positions and rows of both tables."""
    return {
        "prompts": len(tables.prompt_ids),
        "positions": len(tables),
        "states": len(tables) * offset(tables.depth, tables.drafters),
        "schedules": len(tables) * tables.drafters**tables.depth,
    }


def sha256(path: Path) -> str:
    """Digest of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_traces(folder: Path, split: str) -> OutcomeTables:
    """The labelled tables of a split; besides its arrays one row group is in memory.

    It trusts the values: ``validation.read_validated`` checks them before.

    Raises:
        UserError: the folder is incomplete, of another schema, or a file lacks a column or is damaged.
    """
    layout = TraceLayout.from_manifest(read_object(folder / "manifest.json"))
    costs = CostModel.from_json(read_object(folder / "profile.json").get("cost_model", {}))
    states, plans = (layout.per_position(table) for table in TABLES)
    files = {table: _files(folder / table, split, layout.schema(table)) for table in TABLES}
    rows = {table: sum(pq.read_metadata(path).num_rows for path in paths) for table, paths in files.items()}
    positions = rows["schedules"] // plans
    if rows != {"states": positions * states, "schedules": positions * plans}:
        raise UserError(f"the {split} tables in {folder} hold an incomplete position; run stage traces again.")
    return OutcomeTables(
        feature_names=layout.feature_names,
        drafters=len(layout.drafters),
        depth=layout.depth,
        sizes=layout.sizes,
        costs=costs,
        **_read_states(files["states"], layout, positions),
        **_read_schedules(files["schedules"], layout, positions),
    )


def _read_states(files: list[Path], layout: TraceLayout, positions: int) -> dict[str, Any]:
    """Features, margins and visits of ``OutcomeTables``."""
    states, names, strong = layout.per_position("states"), layout.feature_names, len(layout.drafters) - 1
    features = np.empty((positions * states, len(names)), np.float32)
    margins = np.empty((positions * states, strong), np.float32)
    visits = np.empty(positions * states, np.float32)
    for at, group in _groups(files):
        for i, name in enumerate(names):
            features[at, i] = group[f"f_{name}"].to_numpy()
        for j in range(strong):
            margins[at, j] = group[f"margin_{j + 1}"].to_numpy()
        visits[at] = group["visit_weight"].to_numpy()
    return {
        "features": features.reshape(positions, states, -1),
        "margins": margins.reshape(positions, states, strong),
        "visits": visits.reshape(positions, states),
    }


def _read_schedules(files: list[Path], layout: TraceLayout, positions: int) -> dict[str, Any]:
    """What the table of schedules holds of ``OutcomeTables``."""
    plans = layout.per_position("schedules")
    rows = positions * plans
    arrays: dict[str, NDArray[Any]] = {
        "accepted": np.empty((rows, len(layout.sizes)), np.int16),
        "mass": np.empty((rows, len(layout.sizes)), np.float32),
        "nodes": np.empty(rows, np.int16),
        "layer_tokens": np.empty((rows, layout.depth), np.int16),
        "path_processed": np.empty((rows, len(layout.drafters)), np.int16),
        "mean_accepted": np.empty((rows, layout.width("mean_accepted")), np.float32),
    }
    position, left = np.empty(positions, np.int64), np.empty(positions, np.int64)
    ids: list[str] = []
    kinds: list[str] = []
    prompt_tokens: list[int] = []
    starts: list[int] = []
    for at, group in _groups(files):
        for name, array in arrays.items():
            column = group["expected" if name == "mass" else name].combine_chunks()
            values = column if array.ndim == 1 else column.flatten()
            array[at] = values.to_numpy().reshape(array[at].shape)
        some = group.select(["prompt_id", "kind", "prompt_tokens", "position", "tokens_left"])
        some = some.slice(-at.start % plans)
        some = some.take(np.arange(0, len(some), plans))  # one row a position
        first = -(-at.start // plans)
        position[first : first + len(some)] = some["position"].to_numpy()
        left[first : first + len(some)] = some["tokens_left"].to_numpy()
        for name, start in zip(*runs(some["prompt_id"]), strict=True):
            if not ids or ids[-1] != name:
                ids.append(name)
                kinds.append(some["kind"][start].as_py())
                prompt_tokens.append(some["prompt_tokens"][start].as_py())
                starts.append(first + start)
    return {
        "prompt_ids": ids,
        "kinds": kinds,
        "prompt_tokens": np.array(prompt_tokens, np.int64),
        "prompt_of": np.repeat(np.arange(len(ids)), np.diff([*starts, positions])),
        "position": position,
        "left": left,
        **{name: array.reshape(positions, plans, *array.shape[1:]) for name, array in arrays.items()},
    }


def runs(column: pa.ChunkedArray) -> tuple[list[str], list[int]]:
    """The names in a column of strings, one for each run of equal ones, and the row at which each run starts."""
    encoded = column.combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()
    if not len(codes):
        return [], []
    starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])
    return encoded.dictionary.take(pa.array(codes[starts])).to_pylist(), starts.tolist()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a trace folder's file; UserError where it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing, so the traces are incomplete; run stage traces again.") from None
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged; run stage traces again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold an object; run stage traces again.")
    return value


def _files(folder: Path, split: str, schema: pa.Schema) -> list[Path]:
    """The files of a split, all of which have the columns of ``schema``."""
    files = sorted(folder.glob(f"{split}-*.parquet"))
    if not files:
        raise UserError(f"{folder} has no {split} file; run stage traces again.")
    for path in files:
        try:
            found = pq.read_schema(path)
            wrong = [
                field.name
                for field in schema
                if field.name not in found.names or not same_type(field.type, found.field(field.name).type)
            ]
        except READ_ERRORS as error:
            raise _damaged(path, error) from error
        if wrong:
            raise UserError(f"{path} lacks the column {wrong[0]} or has it in another type; run stage traces again.")
    return files


def _groups(files: list[Path]) -> Iterator[tuple[slice, pa.Table]]:
    """The row groups of several files in order, each with its rows' place in the whole."""
    done = 0
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    group = file.read_row_group(number)
                    yield slice(done, done + len(group)), group
                    done += len(group)
        except READ_ERRORS as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> UserError:
    return UserError(f"{path} is damaged ({' '.join(str(error).split())[:120]}); run stage traces again.")
