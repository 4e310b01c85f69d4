"""Traces as files: they come back as they were, describe themselves, and file boundaries change nothing."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.treegraft.values.toy import labelled_tables, write_folder
from treegraft.errors import UserError
from treegraft.scheduling.features import feature_names
from treegraft.values import traces
from treegraft.values.replay import best_fixed, fixed_actions
from treegraft.values.schema import SCHEMA_VERSION, TraceLayout, data_card, schedules_schema, states_schema
from treegraft.values.statistics import split_statistics
from treegraft.values.tables import OutcomeTables
from treegraft.values.traces import read_object, read_traces, write_parts
from treegraft.values.validation import validate_traces

ARRAYS = (
    *("prompt_ids", "kinds", "prompt_tokens", "prompt_of", "position", "left", "features", "accepted", "mass", "nodes"),
    *("layer_tokens", "path_processed", "mean_accepted", "margins", "visits"),
)


def assert_equal(back: OutcomeTables, tables: OutcomeTables) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(back, name), getattr(tables, name), err_msg=name)
    assert (back.depth, back.drafters, back.sizes) == (tables.depth, tables.drafters, tables.sizes)


def splits(m: int = 2, sampled: bool = False) -> dict[str, OutcomeTables]:
    return {
        split: labelled_tables(i, m, kind=split, sampled=sampled)
        for i, split in enumerate(("train", "validation", "test"))
    }


@pytest.mark.parametrize(("m", "sampled"), [(1, False), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize(("group", "file"), [(32_768, 1_000_000), (7, 50), (1, 10)])
def test_traces_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m: int, group: int, file: int, sampled: bool
) -> None:
    """Whatever the sizes of row groups and files."""
    monkeypatch.setattr(traces, "ROW_GROUP", group)
    monkeypatch.setattr(traces, "ROWS_PER_FILE", file)
    tables = splits(m, sampled)
    write_folder(tmp_path, tables)
    assert validate_traces(tmp_path)[0] == []
    for split, part in tables.items():
        assert_equal(read_traces(tmp_path, split), part)
    names = {path.name for path in (tmp_path / "states").glob("train-*")}
    assert names == {f"train-{i:05d}-of-{len(names):05d}.parquet" for i in range(len(names))}
    assert (len(names) > 1) == (file < 1000)


def test_parts_give_the_files_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "ROWS_PER_FILE", 40)
    tables = splits()
    write_folder(tmp_path, tables)
    whole = tables["train"]
    parts = [whole.select(np.array(prompts)) for prompts in ([0], [1, 2])]
    write_parts(tmp_path, "train", parts, len(whole))
    assert_equal(read_traces(tmp_path, "train"), whole)


@pytest.mark.parametrize(("depth", "m"), [(2, 2), (5, 2), (4, 3)])
def test_every_column_has_unit_and_meaning_and_stands_in_the_card(depth: int, m: int) -> None:
    names = feature_names(depth, m)
    manifest = {
        "schema": SCHEMA_VERSION,
        "feature_names": names,
        "drafters": [f"d{j}" for j in range(m)],
        "depth": depth,
        "verified_sizes": [0, 4],
        "temperature": 0.7,
        "splits": {"train": {"prompts": 1, "positions": 2, "states": 6, "schedules": 8}},
    }
    card = data_card("pair", manifest)
    for schema in (states_schema(names, m), schedules_schema((0, 4))):
        assert schema.metadata[b"treegraft.schema"].decode() == SCHEMA_VERSION
        for field in schema:
            unit, meaning = (field.metadata[key].decode() for key in (b"unit", b"description"))
            assert unit not in ("", "unknown"), field.name
            assert meaning
            assert f"| {field.name} | {field.type} | {unit} | {meaning} |" in card
    assert TraceLayout.from_manifest(manifest).feature_names == names
    assert "Temperature of the answers 0.7." in card


def test_the_files_carry_the_metadata(tmp_path: Path) -> None:
    write_folder(tmp_path, splits())
    found = pq.read_schema(next((tmp_path / "states").iterdir()))
    assert found.field("margin_1").metadata[b"unit"] == b"tokens"
    assert found.metadata[b"treegraft.schema"].decode() == SCHEMA_VERSION


def test_another_version_is_one_sentence(tmp_path: Path) -> None:
    write_folder(tmp_path, splits())
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"schema": "{SCHEMA_VERSION}"', '"schema": "0"'))
    with pytest.raises(UserError, match=f"schema version 0, not {SCHEMA_VERSION}"):
        read_traces(tmp_path, "train")
    manifest.write_text("[]")
    with pytest.raises(UserError, match="does not hold an object"):
        read_object(manifest)


def test_statistics_say_what_there_is_to_win() -> None:
    tables = labelled_tables(3)
    schedule = best_fixed(tables)
    found = split_statistics(tables, ["ngram", "strong"], schedule, fixed_actions(tables, schedule))
    assert found["size"] == {"prompts": 3, "positions": 36, "states": 108, "schedules": 144}
    assert 0 < found["labels"]["strong"]["pays"] < 1
    assert found["labels"]["strong"]["pays"] == (tables.margins > 0).mean()
    rates = found["tokens_per_s"]
    assert set(rates) == {"plain", "always_ngram", "always_strong", "fixed", "policy", "oracle"}
    assert rates["oracle"] >= max(rates.values())
    assert found["headroom"]["oracle_over_best_single"] >= found["headroom"]["oracle_over_fixed"] >= 1
