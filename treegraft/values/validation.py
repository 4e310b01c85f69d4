"""Checks a trace folder from its bytes to its keys, row group by row group, and says every fault in one sentence.

What is kept while a table streams by: the keys of the prompt at hand, and of each earlier prompt its name and length.
"""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treegraft.costs import CostModel
from treegraft.errors import UserError
from treegraft.values.schema import SCHEMA_VERSION, SPLITS, TraceLayout, same_type
from treegraft.values.tables import OutcomeTables
from treegraft.values.traces import READ_ERRORS, ROW_GROUP, TABLES, read_object, read_traces, sha256
from treegraft.values.validation_rows import Keys, Rows, Tally

# A damaged footer may ask for any amount of memory, and C++ exceptions that pyarrow does not know come as RuntimeError.
DAMAGE = (*READ_ERRORS, RuntimeError, MemoryError, OverflowError, KeyError)


def read_validated(folder: Path) -> dict[str, OutcomeTables]:
    """All splits of a trace folder that has no fault; UserError with the first fault otherwise."""
    faults, _ = validate_traces(folder)
    if faults:
        more = f" ({len(faults) - 1} more faults.)" if len(faults) > 1 else ""
        raise UserError(
            f"{folder}: {faults[0]}{more} Run stage traces again; `pipeline validate {folder}` lists all faults."
        )
    return {split: read_traces(folder, split) for split in SPLITS}


def validate_traces(folder: Path) -> tuple[list[str], str]:
    """Every fault of a trace folder, each a sentence with count and place, and a line that sums the folder up."""
    check = _Check(folder)
    check.manifest_and_profile()
    check.files()
    for table in TABLES:
        for split in SPLITS:
            check.table(table, split)
    check.across()
    found = [check.prompts["states", split] for split in SPLITS]
    prompts, positions = sum(len(of) for of in found), sum(sum(of.values()) for of in found)
    rows = " and ".join(f"{check.rows[table]:,} {table}" for table in TABLES)
    # Names in damaged files may hold anything.
    return [
        _printable(fault) for fault in check.faults
    ], f"{folder} has no fault: {prompts:,} prompts, {positions:,} positions, {rows}."


class _Check:
    """The state of one validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []
        self.manifest: dict[str, Any] = {}
        self.layout: TraceLayout | None = None
        self.prompts: dict[tuple[str, str], dict[str, int]] = {}
        """Positions of each prompt, by table and split."""
        self.rows = dict.fromkeys(TABLES, 0)
        self.broken: set[str] = set()
        """Splits with rows that could not be read: what they lack is no further fault."""

    def manifest_and_profile(self) -> None:
        """The JSON files."""
        try:
            self.manifest = read_object(self.folder / "manifest.json")
            self.layout = TraceLayout.from_manifest(self.manifest)
        except UserError as error:
            self.faults.append(f"{_sentence(error)} So columns and keys were not checked.")
        try:
            CostModel.from_json(read_object(self.folder / "profile.json").get("cost_model", {}))
            read_object(self.folder / "calibration.json")
        except (UserError, AttributeError) as error:
            self.faults.append(_sentence(error))

    def files(self) -> None:
        """Every Parquet file against the size and digest that the manifest has of it."""
        recorded = self.manifest.get("files")
        if not isinstance(recorded, dict):
            if self.layout is not None:
                self.faults.append("manifest.json has no usable files, so lost and changed bytes cannot be noticed.")
            return
        found = {path.relative_to(self.folder).as_posix() for table in TABLES for path in self._found(table, "")}
        for name in sorted(found - set(recorded)):
            self.faults.append(f"{name} is not in the manifest.")
        for name, about in sorted(recorded.items()):
            wanted = about if isinstance(about, dict) else {}
            if name not in found:
                self.faults.append(f"{name} is missing.")
            elif (size := (self.folder / name).stat().st_size) != wanted.get("bytes"):
                self.faults.append(f"{name} is {size} bytes long, not {wanted.get('bytes')}: truncated or replaced.")
            elif sha256(self.folder / name) != wanted.get("sha256"):
                self.faults.append(f"{name} holds other bytes than were written: damaged or edited.")

    def _found(self, table: str, split: str) -> list[Path]:
        return sorted((self.folder / table).glob(f"{split}*.parquet"))

    def table(self, table: str, split: str) -> None:
        """All files of one table and split, as one sequence of rows."""
        keys = Keys(0 if self.layout is None else self.layout.per_position(table))
        files = self._found(table, f"{split}-")
        if not files:
            self.faults.append(f"{table} has no file of the split {split}.")
        broken = not files
        for number, path in enumerate(files):
            name = f"{table}/{path.name}"
            if not re.fullmatch(rf"{split}-{number:05d}-of-{len(files):05d}\.parquet", path.name):
                self.faults.append(f"{name} is not number {number} of {len(files)} files by its name.")
            whole = False
            tally = Tally(name)
            try:
                with pq.ParquetFile(path) as file:
                    whole = self._file(file, name, table, tally, keys)
            except DAMAGE as error:
                self.faults.append(f"{name} cannot be read as Parquet ({_short(error)}).")
            self.faults += tally.sentences()
            if not whole:
                broken = True
        keys.close()
        self.faults += keys.faults
        if broken or keys.partial:
            self.broken.add(split)
        else:
            self.faults += keys.gaps
        self.prompts[table, split] = keys.positions

    def _file(self, file: pq.ParquetFile, name: str, table: str, tally: Tally, keys: Keys) -> bool:
        """One open file; whether all its rows could be read and have keys."""
        schema = file.schema_arrow
        version = (schema.metadata or {}).get(b"treegraft.schema", b"none").decode(errors="replace")
        if version != SCHEMA_VERSION:
            self.faults.append(f"{name} has schema version {version}, not {SCHEMA_VERSION}.")
        usable = schema.names
        if self.layout is not None:
            usable = self._columns(schema, self.layout.schema(table), name)
        whole = True
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            done = 0
            try:
                for batch in file.iter_batches(ROW_GROUP, row_groups=[group], columns=usable):
                    batch.validate(full=True)
                    rows_of = Rows(batch, self.layout, table, row + done, tally)
                    rows_of.check_values()
                    keys.add(name, row + done, rows_of)
                    whole &= rows_of.has_keys
                    done += len(batch)
            except DAMAGE as error:
                self.faults.append(
                    f"{name}: row group {group + 1} of {file.num_row_groups} (rows {row} to {row + rows - 1}) cannot "
                    f"be read ({_short(error)})."
                )
                whole = False
            row += rows
        self.rows[table] += row
        return whole

    def _columns(self, found: pa.Schema, wanted: pa.Schema, name: str) -> list[str]:
        """The wanted columns that are there in their type."""
        usable = []
        for column in wanted:
            times = found.names.count(column.name)
            if times == 0:
                self.faults.append(f"{name} lacks the column {column.name}.")
            elif times > 1:
                self.faults.append(f"{name} has the column {column.name} {times} times.")
            elif not same_type(found.field(column.name).type, column.type):
                self.faults.append(
                    f"{name}: column {column.name} is of type {found.field(column.name).type}, not {column.type}."
                )
            else:
                usable.append(column.name)
        for column in sorted(set(found.names) - set(wanted.names)):
            self.faults.append(f"{name} has a column {column} that does not belong to the table.")
        return usable

    def across(self) -> None:
        """Splits against each other, the two tables against each other, and both against the manifest."""
        names = {}
        for split in SPLITS:
            found = self.prompts["states", split] | self.prompts["schedules", split]
            # The turns of a question belong together: ids are <kind>/<question>/<turn>.
            names[split] = {name.rsplit("/", 1)[0] for name in found}
        for i, one in enumerate(SPLITS):
            for other in SPLITS[i + 1 :]:
                if leaked := sorted(names[one] & names[other]):
                    self.faults.append(
                        f"{len(leaked)} prompts are in both {one} and {other}, the first of them {leaked[0]}."
                    )
        if self.layout is None:
            return
        for split in (split for split in SPLITS if split not in self.broken):
            states, plans = (self.prompts[table, split] for table in TABLES)
            differing = [name for name in {**states, **plans} if states.get(name) != plans.get(name)]
            if differing:
                first = differing[0]
                self.faults.append(
                    f"{split}: {len(differing)} prompts have other positions in states than in schedules, the first of "
                    f"them {first} ({states.get(first, 0)} and {plans.get(first, 0)})."
                )
            elif list(states) != list(plans):
                self.faults.append(f"{split}: the two tables have the prompts in different orders.")
            counts = self.manifest.get("splits", {}).get(split, {})
            for what, count in (("prompts", len(states)), ("positions", sum(states.values()))):
                if counts.get(what) != count:
                    self.faults.append(f"{split} has {count} {what}, not {counts.get(what)} as the manifest says.")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[0].upper() + text[1:] if text.startswith("the ") else text


def _short(error: BaseException) -> str:
    """An error of pyarrow, cut to what a sentence bears."""
    return _printable(error)[:120] or type(error).__name__


def _printable(text: object) -> str:
    """One line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
