"""The page over all pairs: what it lists, that it loads nothing, and that a broken report harms no other."""

import copy
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.report_index import write_index
from tests.pipeline.test_aggregate import make_rows, report_of
from tests.pipeline.test_report import Page


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(make_rows())


def written(folder: Path, report: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))


def slower(report: dict[str, Any], pair: str) -> dict[str, Any]:
    """Another pair's report, of a scheduler that does harm, on another machine, with a warning."""
    other = copy.deepcopy(report)
    other["pair"] = pair
    other["hardware"]["name"] = "Another <CPU>"
    other["warnings"] = ["The code changed."]
    other["headline"]["over_best_single"] |= {"ratio": 0.61, "low": 0.5, "high": 0.7, "verdict": "slower"}
    other["oracle"] |= {"captured": None}
    return other


def test_every_pair_is_listed_with_its_figures(tmp_path: Path, report: dict[str, Any]) -> None:
    written(tmp_path / "toy", report)
    written(tmp_path / "b-1.5", slower(report, "b-1.5"))
    (tmp_path / "unfinished").mkdir()
    page = write_index(tmp_path).read_text()
    ElementTree.fromstring(page.replace("<!DOCTYPE html>", ""))
    parsed = Page(page)
    links = [attributes["href"] for tag, attributes in parsed.tags if tag == "a"]
    assert links == ["b-1.5/report.html", "toy/report.html"]
    text = " ".join(parsed.text.split())
    times = "\N{MULTIPLICATION SIGN}"
    for part in (
        report["headline"]["text"],
        report["headline"]["over_best_single"]["text"],
        f"{report['headline']['ratio']:.2f}{times}",
        f"{report['oracle']['captured']:.0%}",
        f"{report['oracle']['over_best_single']:.2f}{times}",
        *("2026-11-29 18:21 UTC", "Another <CPU>", "The code changed.", f"0.61{times}", "not measured", "2 pairs"),
    ):
        assert part in text, part
    assert 'class="verdict slower">0.61' in page


def test_it_loads_nothing_and_has_both_themes(tmp_path: Path, report: dict[str, Any]) -> None:
    written(tmp_path / "toy", report)
    page = write_index(tmp_path).read_text()
    assert not re.search(r"https?:|//[a-z]|@import|<script|<iframe|url\(", page)
    assert "prefers-color-scheme: dark" in page
    for tag, attributes in Page(page).tags:
        assert "src" not in attributes
        if "href" in attributes and tag == "link":
            assert (attributes["href"] or "").startswith("data:")


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "treegraft-report/1"}', "[]"])
def test_a_report_that_cannot_be_read_is_said_and_harms_no_other(
    tmp_path: Path, report: dict[str, Any], content: str
) -> None:
    written(tmp_path / "toy", report)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/report.json").write_text(content)
    text = " ".join(Page(write_index(tmp_path).read_text()).text.split())
    assert "old cannot be read: run `pipeline report old` again" in text
    assert report["headline"]["text"] in text


def test_names_of_folders_become_addresses(tmp_path: Path, report: dict[str, Any]) -> None:
    written(tmp_path / 'a b"<&#?', report)
    page = write_index(tmp_path).read_text()
    assert 'href="a%20b%22%3C%26%23%3F/report.html"' in page


def test_equal_reports_give_equal_bytes(tmp_path: Path, report: dict[str, Any]) -> None:
    written(tmp_path / "toy", report)
    first = write_index(tmp_path).read_bytes()
    assert write_index(tmp_path).read_bytes() == first
