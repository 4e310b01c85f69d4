"""Every fault that a trace folder can have is made and found, with its place; no damage ends in a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.treegraft.values.toy import labelled_tables, seal, write_folder
from treegraft.errors import UserError
from treegraft.values import validation
from treegraft.values.schema import SCHEMA_VERSION
from treegraft.values.validation import read_validated, validate_traces

TABLES = {split: labelled_tables(i, kind=split) for i, split in enumerate(("train", "validation", "test"))}
STATES, SCHEDULES = "states/train-00000-of-00001.parquet", "schedules/train-00000-of-00001.parquet"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_folder(folder, TABLES)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "traces"))


def rewrite(folder: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Put a changed table in place of a file, as somebody would who also updates the digests."""
    pq.write_table(change(pq.read_table(folder / name)), folder / name)
    seal(folder, TABLES)


def with_value(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = value
        field = table.schema.field(column)
        return table.set_column(table.schema.get_field_index(column), field, pa.array(values, field.type))

    return change


def test_a_whole_folder_has_one_line(whole: Path) -> None:
    faults, summary = validate_traces(whole)
    assert faults == []
    assert summary.endswith("has no fault: 9 prompts, 108 positions, 324 states and 432 schedules.")
    assert set(read_validated(whole)) == {"train", "validation", "test"}


def cast(column: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.schema.get_field_index(column), column, table[column].cast(kind))

    return change


def repeat_row(row: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.concat_tables([table.slice(0, row + 1), table.slice(row)])


def without_rows(first: int, count: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.concat_tables([table.slice(0, first), table.slice(first + count)])


def other_version(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({"treegraft.schema": "0"})


@pytest.mark.parametrize(
    ("name", "change", "sentences"),
    [
        (STATES, lambda t: t.drop_columns(["margin_1"]), [f"{STATES} lacks the column margin_1."]),
        (SCHEDULES, lambda t: t.drop_columns(["schedule"]), [f"{SCHEDULES} lacks the column schedule."]),
        (STATES, cast("layer", pa.int32()), [f"{STATES}: column layer is of type int32, not int8."]),
        (
            SCHEDULES,
            cast("expected", pa.list_(pa.float64())),
            [f"{SCHEDULES}: column expected is of type list<element: double>, not list<item: float>."],
        ),
        (
            STATES,
            lambda t: t.append_column("more", pa.array([0] * len(t))),
            [f"{STATES} has a column more that does not belong to the table."],
        ),
        (STATES, other_version, [f"{STATES} has schema version 0, not {SCHEMA_VERSION}."]),
        (
            STATES,
            lambda t: with_value("margin_1", 70, float("inf"))(with_value("margin_1", 40, float("nan"))(t)),
            [
                f"{STATES}, column margin_1: 2 rows have a number that is NaN or infinite, the first is row 40 (prompt "
                "train/1/0)."
            ],
        ),
        (
            SCHEDULES,
            with_value("expected", 100, [0.0, float("nan"), 1.0, 1.0]),
            [
                f"{SCHEDULES}, column expected: 1 row has a number that is NaN or infinite, the first is row 100 "
                "(prompt train/2/0)."
            ],
        ),
        (
            SCHEDULES,
            with_value("accepted", 5, [1, 2]),
            [
                f"{SCHEDULES}, column accepted: 1 row has a list of the wrong length, the first is row 5 (prompt "
                "train/0/0)."
            ],
        ),
        (
            SCHEDULES,
            with_value("mean_accepted", 5, [1.0, 2.0, 2.0, 2.0]),  # of greedy text
            [
                f"{SCHEDULES}, column mean_accepted: 1 row has a list of the wrong length, the first is row 5 (prompt "
                "train/0/0)."
            ],
        ),
        (
            STATES,
            with_value("visit_weight", 3, -1.0),
            [f"{STATES}, column visit_weight: 1 row has a negative number, the first is row 3 (prompt train/0/0)."],
        ),
        (
            STATES,
            with_value("prefix", 41, [7]),
            [
                f"{STATES}, column prefix: 1 row has actions that no state or schedule of these settings has, the "
                "first is row 41 (prompt train/1/0)."
            ],
        ),
        (
            STATES,
            repeat_row(40),
            [
                f"{STATES}, row 41: 1 rows of prompt train/1/0 have the key of an earlier row, the first is position "
                "1.",
            ],
        ),
        (
            SCHEDULES,
            lambda t: pa.concat_tables([t, t.slice(0, 48)]),
            [
                f"{SCHEDULES}: prompt train/0/0 comes again in row 144: its rows are duplicates or not beside "
                "each other.",
            ],
        ),
        (
            STATES,
            lambda t: t.take([1, 0, *range(2, len(t))]),
            [f"{STATES}, row 1: the rows of prompt train/0/0 are not in the order of their keys."],
        ),
        (
            STATES,
            without_rows(50, 1),
            [f"{STATES}, row 36: prompt train/1/0 lacks 1 of 36 rows, the first at position 4."],
        ),
        (
            STATES,
            without_rows(36, 36),
            [
                "train: 1 prompts have other positions in states than in schedules, the first of them train/1/0 (0 and "
                "12).",
                "train has 2 prompts, not 3 as the manifest says.",
                "train has 24 positions, not 36 as the manifest says.",
            ],
        ),
        (
            SCHEDULES,
            with_value("tokens_left", 7, 3),
            [f"{SCHEDULES}, row 7: 1 rows of prompt train/0/0 have tokens_left that do not end with its 12 positions."],
        ),
    ],
)
def test_each_fault_is_one_sentence(
    folder: Path, name: str, change: Callable[[pa.Table], pa.Table], sentences: list[str]
) -> None:
    rewrite(folder, name, change)
    assert validate_traces(folder)[0] == sentences


def test_faults_are_all_listed(folder: Path) -> None:
    rewrite(folder, STATES, lambda t: with_value("margin_1", 0, float("nan"))(t.drop_columns(["f_call_share"])))
    rewrite(folder, "states/test-00000-of-00001.parquet", cast("layer", pa.int32()))
    (folder / "calibration.json").unlink()
    faults, _ = validate_traces(folder)
    assert len(faults) == 4
    with pytest.raises(UserError, match=r"\(3 more faults\.\) .*`pipeline validate"):
        read_validated(folder)


def test_a_prompt_in_two_splits_is_a_leak(tmp_path: Path) -> None:
    tables = TABLES | {"validation": labelled_tables(0, kind="train")}
    write_folder(tmp_path, tables)
    assert validate_traces(tmp_path)[0] == ["3 prompts are in both train and validation, the first of them train/0."]


def test_other_counts_than_the_manifest_says(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["test"]["positions"] = 30
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert validate_traces(folder)[0] == ["test has 36 positions, not 30 as the manifest says."]


@pytest.mark.parametrize("temperature", [None, "warm", -1, float("nan"), True])
def test_a_temperature_that_is_none(folder: Path, temperature: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | {"temperature": temperature}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json has no usable temperature." in validate_traces(folder)[0][0]


def test_sampled_text_needs_its_means(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | {"temperature": 0.7}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    faults, _ = validate_traces(folder)
    assert len(faults) == 3, "one a split"
    assert all("column mean_accepted: 144 rows have a list of the wrong length" in fault for fault in faults)


def test_lost_changed_and_strange_files(folder: Path) -> None:
    (folder / STATES).unlink()
    shutil.copy(folder / SCHEDULES, folder / "schedules/train-00001-of-00001.parquet")
    data = bytearray((folder / "schedules/test-00000-of-00001.parquet").read_bytes())
    (folder / "schedules/test-00000-of-00001.parquet").write_bytes(data[:-9])
    faults, _ = validate_traces(folder)
    assert f"{STATES} is missing." in faults
    assert "states has no file of the split train." in faults
    assert "schedules/train-00001-of-00001.parquet is not in the manifest." in faults
    assert any(f"is {len(data) - 9} bytes long, not {len(data)}: truncated" in fault for fault in faults)
    assert any("test-00000-of-00001.parquet cannot be read as Parquet" in fault for fault in faults)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "is missing, so the traces are incomplete"),
        ("{", "is damaged"),
        ('{"schema": "0"}', f"manifest.json has schema version 0, not {SCHEMA_VERSION}."),
        (f'{{"schema": "{SCHEMA_VERSION}"}}', "manifest.json has no usable feature_names."),
    ],
)
def test_without_a_manifest_the_rest_is_still_checked(folder: Path, text: str | None, sentence: str) -> None:
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    pq.write_table(with_value("margin_1", 40, float("nan"))(pq.read_table(folder / STATES)), folder / STATES)
    faults, _ = validate_traces(folder)
    assert len(faults) == 2
    assert sentence in faults[0]
    assert "row 40 (prompt train/1/0)" in faults[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_always_a_sentence(whole: Path, data: st.DataObject) -> None:
    """Cut anywhere or flipped anywhere, in any file."""
    name = data.draw(st.sampled_from([STATES, SCHEDULES, "manifest.json", "profile.json"]))
    path = whole / name
    original = path.read_bytes()
    if data.draw(st.booleans()):
        damaged = original[: data.draw(st.integers(0, len(original) - 1))]
    else:
        places = data.draw(st.lists(st.integers(0, len(original) - 1), min_size=1, max_size=8, unique=True))
        if data.draw(st.booleans()):  # most of a file's structure is in its last bytes
            places = [len(original) - 1 - place % min(2000, len(original)) for place in places]
        values = np.frombuffer(original, np.uint8).copy()
        values[np.unique(places)] ^= data.draw(st.integers(1, 255))
        damaged = values.tobytes()
    path.write_bytes(damaged)
    try:
        faults, _ = validate_traces(whole)
    finally:
        path.write_bytes(original)
    if name.endswith(".parquet"):
        assert faults
    for fault in faults:
        assert fault.endswith(".")
        assert fault.isprintable()


def test_only_a_batch_of_rows_is_looked_at_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row group for the whole file, and still batches; faults keep their rows."""
    seen: list[int] = []
    monkeypatch.setattr(validation, "ROW_GROUP", 10)
    real = validation.Rows

    def counted(batch: pa.RecordBatch, *more: Any) -> Any:
        seen.append(len(batch))
        return real(batch, *more)

    monkeypatch.setattr(validation, "Rows", counted)
    rewrite(folder, STATES, with_value("margin_1", 40, float("nan")))
    assert "the first is row 40 (prompt train/1/0)" in validate_traces(folder)[0][0]
    assert max(seen) == 10
