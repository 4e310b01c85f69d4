"""Rows of the trace tables as they stream by: their values checked one by one, their keys prompt by prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treegraft.values.schema import TraceLayout
from treegraft.values.states import offset
from treegraft.values.traces import runs

IntArray = NDArray[np.int64]
NO_KEY = -1


class Rows:
    """A batch of rows of one file: checks the values one by one, and makes keys of them."""

    def __init__(
        self, batch: pa.RecordBatch, layout: TraceLayout | None, table: str, first: int, tally: "Tally"
    ) -> None:
        self.batch, self.layout, self.table, self.first, self.tally = batch, layout, table, first, tally
        ids = batch.schema.names
        self.prompts: tuple[list[str], list[int]] = ([], [])
        """Names and first rows of the prompts, in the order of rows."""
        if "prompt_id" in ids and pa.types.is_string(batch["prompt_id"].type):
            self.prompts = runs(pa.chunked_array([batch["prompt_id"].fill_null("")]))
        key = ("prefix", "layer") if table == "states" else ("schedule", "tokens_left")
        self.has_keys = layout is not None and {"prompt_id", "position", *key} <= set(ids)

    def note(self, column: str, what: str, bad: NDArray[np.bool_]) -> None:
        """Count the rows (bool [n]) at which ``column`` is at fault."""
        rows = np.flatnonzero(bad)
        if len(rows):
            names, starts = self.prompts
            prompt = names[int(np.searchsorted(starts, rows[0], side="right")) - 1] if names else "unknown"
            self.tally.add(column, what, len(rows), self.first + int(rows[0]), prompt)

    def check_values(self) -> None:
        """Nulls, numbers that are not finite, lists of the wrong length, values out of range."""
        for name, column in zip(self.batch.schema.names, self.batch.columns, strict=True):
            if column.null_count:
                self.note(name, "no value", np.asarray(column.is_null()))
            if pa.types.is_list(column.type):
                self._check_list(name, column)
            elif pa.types.is_floating(column.type):
                values = _numbers(column, 0)
                self.note(name, "a number that is NaN or infinite", ~np.isfinite(values))
                if name == "visit_weight":
                    self.note(name, "a negative number", values < 0)
            elif pa.types.is_integer(column.type):
                self.note(name, "a negative number", _numbers(column, 0) < 0)

    def _check_list(self, name: str, column: pa.Array) -> None:
        lengths = np.diff(column.offsets.to_numpy())
        values = column.flatten()
        owner = np.repeat(np.arange(len(column)), lengths)
        numbers = _numbers(values, 0)
        if values.null_count:
            self.note(name, "no value inside a list", self._rows_with(owner, np.asarray(values.is_null())))
        if pa.types.is_floating(values.type):
            self.note(name, "a number that is NaN or infinite", self._rows_with(owner, ~np.isfinite(numbers)))
        elif pa.types.is_integer(values.type):
            self.note(name, "a negative number", self._rows_with(owner, numbers < 0))
        if self.layout is not None and name != "prefix":
            self.note(name, "a list of the wrong length", lengths != self.layout.width(name))

    def _rows_with(self, owner: IntArray, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
        rows = np.zeros(len(self.batch), np.bool_)
        rows[owner[bad]] = True
        return rows

    def keys(self) -> IntArray:
        """position x rows a position has + number of the state or schedule; NO_KEY where a row has none: int64 [n]."""
        assert self.layout is not None
        m, depth = len(self.layout.drafters), self.layout.depth
        name = "prefix" if self.table == "states" else "schedule"
        column = self.batch[name]
        offsets = column.offsets.to_numpy()
        lengths, values = np.diff(offsets), _numbers(column.values, NO_KEY)
        index = np.zeros(len(column), np.int64)
        bad = (lengths >= depth) if self.table == "states" else (lengths != depth)
        for layer in range(depth):
            rows = np.flatnonzero(lengths > layer)
            action = values[offsets[rows] + layer]
            bad[rows] |= (action < 0) | (action >= m)
            index[rows] = index[rows] * m + np.clip(action, 0, m - 1)
        if self.table == "states":
            bad |= _numbers(self.batch["layer"], NO_KEY) != lengths + 1
            index += np.array([offset(layers, m) for layers in range(depth + 1)])[np.minimum(lengths, depth)]
        self.note(name, "actions that no state or schedule of these settings has", bad)
        position = _numbers(self.batch["position"], NO_KEY).astype(np.int64)
        key: IntArray = position * self.layout.per_position(self.table) + index
        return np.where(bad | (position < 0), NO_KEY, key)

    def ends(self) -> IntArray:
        """Position + tokens left, which is the length of the prompt's answer: int64 [n]; empty for states."""
        if self.table == "states":
            return np.zeros(0, np.int64)
        position, left = (_numbers(self.batch[name], 0).astype(np.int64) for name in ("position", "tokens_left"))
        return np.asarray(position + left, np.int64)


def _numbers(column: pa.Array, instead: int) -> NDArray[Any]:
    """The values of a column, ``instead`` where there is none."""
    values: NDArray[Any] = column.fill_null(instead).to_numpy(zero_copy_only=False)
    return values


class Tally:
    """Faults of values in one file, counted by column and kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: dict[tuple[str, str], tuple[int, int, str]] = {}

    def add(self, column: str, what: str, count: int, row: int, prompt: str) -> None:
        before, first, where = self.found.get((column, what), (0, row, prompt))
        self.found[column, what] = (before + count, first, where)

    def sentences(self) -> Iterator[str]:
        for (column, what), (count, row, prompt) in self.found.items():
            rows = "1 row has" if count == 1 else f"{count} rows have"
            yield f"{self.name}, column {column}: {rows} {what}, the first is row {row} (prompt {prompt})."


@dataclass
class Keys:
    """The rows of one table and split in order, prompt by prompt: duplicates, gaps and rows out of order."""

    per_position: int
    positions: dict[str, int] = field(default_factory=dict)
    """Of each finished prompt."""
    faults: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    """What is no fault where rows could not be read."""
    partial: bool = False
    """Whether a prompt has rows without keys."""
    _prompt: str | None = None
    _parts: list[tuple[str, int, IntArray, IntArray]] = field(default_factory=list)

    def add(self, name: str, first: int, rows: Rows) -> None:
        """Rows of the file ``name`` from row ``first`` on."""
        prompts, starts = rows.prompts
        keys, ends = (rows.keys(), rows.ends()) if rows.has_keys else (np.zeros(0, np.int64), np.zeros(0, np.int64))
        for prompt, start, stop in zip(prompts, starts, [*starts[1:], len(rows.batch)], strict=True):
            if prompt != self._prompt:
                self.close()
                self._prompt = prompt
                if prompt in self.positions:
                    self.faults.append(
                        f"{name}: prompt {prompt} comes again in row {first + start}: its rows are duplicates or not "
                        "beside each other."
                    )
            self._parts.append((name, first + start, keys[start:stop], ends[start:stop]))

    def close(self) -> None:
        """The prompt at hand is over."""
        if self._prompt is None:
            return
        prompt, parts = self._prompt, self._parts
        self._prompt, self._parts = None, []
        keys = np.concatenate([part[2] for part in parts])
        if not len(keys) or (keys == NO_KEY).any():
            self.positions.setdefault(prompt, 0)
            self.partial = True
            return
        sorted_keys = np.sort(keys)
        unique = sorted_keys[np.append(True, sorted_keys[1:] != sorted_keys[:-1])]
        length = int(unique[-1]) // self.per_position + 1
        if prompt not in self.positions:
            self.positions[prompt] = length
        if len(unique) < len(keys):
            order = np.argsort(keys, kind="stable")
            again = np.sort(order[1:][keys[order[1:]] == keys[order[:-1]]])
            self.faults.append(
                f"{_place(parts, int(again[0]))}: {len(again)} rows of prompt {prompt} have the key of an earlier row, "
                f"the first is position {int(keys[again[0]]) // self.per_position}."
            )
        elif (keys[1:] < keys[:-1]).any():
            at = int(np.flatnonzero(keys[1:] < keys[:-1])[0]) + 1
            self.faults.append(f"{_place(parts, at)}: the rows of prompt {prompt} are not in the order of their keys.")
        if (lacking := length * self.per_position - len(unique)) > 0:
            gap = int(np.flatnonzero(np.append(unique, -1) != np.arange(len(unique) + 1))[0])
            self.gaps.append(
                f"{_place(parts, 0)}: prompt {prompt} lacks {lacking} of {length * self.per_position} rows, the first "
                f"at position {gap // self.per_position}."
            )
        ends = np.concatenate([part[3] for part in parts])
        if len(wrong := np.flatnonzero(ends != length)):
            self.gaps.append(
                f"{_place(parts, int(wrong[0]))}: {len(wrong)} rows of prompt {prompt} have tokens_left that do not "
                f"end with its {length} positions."
            )


def _place(parts: list[tuple[str, int, IntArray, IntArray]], index: int) -> str:
    """File and row of the ``index``-th row of a prompt whose rows came in ``parts``."""
    for name, first, keys, _ in parts:
        if index < len(keys):
            return f"{name}, row {first + index}"
        index -= len(keys)
    raise IndexError(index)
