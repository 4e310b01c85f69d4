"""Two reports against each other: what is beyond noise, what is said first, and the exit codes for CI."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import cli
from pipeline.compare import ALL, FEWEST_PROMPTS, LEAST_CHANGE, Quantity, Row, compare_reports, judge, render
from tests.pipeline.test_aggregate import BENCHES, make_rows, report_of

Rows = list[dict[str, Any]]


def slowed(rows: Rows, factor: float, method: str = "treegraft", bench: str | None = None) -> Rows:
    """The same runs with one method's clock scaled."""
    return [
        row | {"seconds": row["seconds"] * factor} if row["method"] == method and bench in (None, row["bench"]) else row
        for row in rows
    ]


def noisy(rows: Rows, seed: int, spread: float) -> Rows:
    """The same runs on a clock that errs by itself in each run."""
    random = np.random.default_rng(seed)
    return [row | {"seconds": row["seconds"] * random.uniform(1 - spread, 1 + spread)} for row in rows]


def row_of(earlier: dict[str, Any], later: dict[str, Any], bench: str = ALL, method: str = "treegraft") -> Row:
    (row,) = [row for row in compare_reports(earlier, later).rows if (row.bench, row.method) == (bench, method)]
    return row


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(hf=True)


@pytest.fixture(scope="module")
def report(rows: Rows) -> dict[str, Any]:
    return report_of(rows)


def test_a_report_against_itself_is_the_same(report: dict[str, Any]) -> None:
    comparison = compare_reports(report, report)
    assert (comparison.verdict, comparison.differences, comparison.undecidable) == ("same", [], None)
    for row in comparison.rows:
        for change in (row.speedup, row.tokens_per_step, row.over_best_single):
            if change is not None:
                assert (change.ratio, change.low, change.high, change.verdict) == (1, 1, 1, "same")


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_a_change_of_all_prompts_is_seen_through_their_differences(
    rows: Rows, report: dict[str, Any], factor: float, verdict: str
) -> None:
    """The intervals of the two reports overlap, and still nothing is left to chance: each prompt changed alike."""
    later = report_of(slowed(rows, factor))
    before, after = (part["headline"] for part in (report, later))
    assert max(before["low"], after["low"]) < min(before["high"], after["high"])
    comparison = compare_reports(report, later)
    assert comparison.verdict == verdict
    assert f"got {verdict} beyond noise" in comparison.headline
    change = row_of(report, later).speedup
    assert change.ratio == pytest.approx(1 / factor)
    assert (change.low, change.high) == pytest.approx((1 / factor, 1 / factor))
    assert compare_reports(later, report).verdict == {"slower": "faster", "faster": "slower"}[verdict]


def test_the_values_are_those_of_the_reports_where_all_prompts_are_shared(rows: Rows, report: dict[str, Any]) -> None:
    later = report_of(make_rows(5, hf=True))
    for bench in BENCHES:
        for method in ("ngram", "treegraft", "hf_assisted"):
            row = row_of(report, later, bench, method)
            cells = [part["benchmarks"][bench][method] for part in (report, later)]
            assert (row.speedup.earlier, row.speedup.later) == pytest.approx([c["speedup"]["mean"] for c in cells])
            if method != "hf_assisted":
                assert row.tokens_per_step is not None
                assert row.tokens_per_step.later == pytest.approx(cells[1]["tokens_per_step"])
        over = row_of(report, later, bench).over_best_single
        assert over is not None
        assert over.later == pytest.approx(later["over_best_single"][bench]["ratio"])
    over = row_of(report, later).over_best_single
    assert over is not None
    assert (over.earlier, over.later) == pytest.approx([part["over_best_single"]["mean"] for part in (report, later)])


def test_only_what_changed_is_marked(rows: Rows, report: dict[str, Any]) -> None:
    for row in compare_reports(report, report_of(slowed(rows, 1.2, "fixed", "code"))).rows:
        expected = "lower" if row.method == "fixed" and row.bench == "code" else "same"
        if (row.bench, row.method) != (ALL, "fixed"):
            assert row.speedup.verdict == expected, row


def test_noise_of_the_clock_is_seldom_called_a_change(rows: Rows, report: dict[str, Any]) -> None:
    verdicts = [compare_reports(report, report_of(noisy(rows, seed, 0.1))).verdict for seed in range(10)]
    assert verdicts.count("same") >= 8


def test_a_slower_machine_changes_nothing(rows: Rows, report: dict[str, Any]) -> None:
    slow = [row | {"seconds": 3 * row["seconds"]} for row in rows]
    assert compare_reports(report, report_of(slow)).verdict == "same"


def test_a_change_below_the_least_is_none_however_sure(rows: Rows, report: dict[str, Any]) -> None:
    assert compare_reports(report, report_of(slowed(rows, 1 + LEAST_CHANGE / 2))).verdict == "same"
    assert compare_reports(report, report_of(slowed(rows, 1 / (1 - 2 * LEAST_CHANGE)))).verdict == "slower"


@pytest.mark.parametrize("prompts", [1, FEWEST_PROMPTS - 1, FEWEST_PROMPTS])
def test_few_prompts_decide_nothing(prompts: int) -> None:
    rows = make_rows(benches=("code",), prompts=prompts)
    comparison = compare_reports(report_of(rows), report_of(slowed(rows, 2)))
    assert comparison.verdict == ("slower" if prompts >= FEWEST_PROMPTS else "unknown")
    assert (comparison.undecidable is None) == (prompts >= FEWEST_PROMPTS)


def test_only_shared_prompts_are_compared(rows: Rows, report: dict[str, Any]) -> None:
    """Two prompts of each benchmark are new and ten times as slow; on the others nothing changed."""
    new = {f"{bench}/{number}" for bench in BENCHES for number in (0, 1)}
    later = report_of(
        [
            row | {"prompt_id": row["prompt_id"] + "-new", "seconds": row["seconds"] * 10 ** (row["method"] != "plain")}
            if row["prompt_id"] in new
            else row
            for row in rows
        ]
    )
    comparison = compare_reports(report, later)
    assert comparison.verdict == "same"
    assert {row.speedup.ratio for row in comparison.rows} == {1.0}
    assert "Different prompts: 12 in both, 6 only in the earlier, 6 only in the later." in comparison.differences


@pytest.mark.parametrize(
    ("earlier", "later", "verdict"),
    [((1.0, 1.2), (1.3, 1.5), "higher"), ((1.3, 1.5), (1.0, 1.2), "lower"), ((1.0, 1.4), (1.3, 1.5), "same")],
)
def test_without_shared_prompts_intervals_must_not_overlap(
    earlier: tuple[float, float], later: tuple[float, float], verdict: str
) -> None:
    quantities = [Quantity(sum(bounds) / 2, None, *bounds) for bounds in (earlier, later)]
    assert judge(quantities[0], quantities[1], 0).verdict == verdict
    assert judge(quantities[0], Quantity(9.0, None), 0).verdict == "unknown"


def test_every_temperature_counts(rows: Rows) -> None:
    from tests.pipeline.test_aggregate import hotter, report_at

    earlier = report_at([*rows, *hotter(rows)], [0.0, 1.0])
    later = report_at([*rows, *hotter(slowed(rows, 1.3))], [0.0, 1.0])
    comparison = compare_reports(earlier, later)
    assert comparison.verdict == "slower"
    assert "at temperature 1 " in comparison.headline
    assert {row.temperature for row in comparison.rows} == {0.0, 1.0}
    assert compare_reports(report_at(rows, [0.0]), report_at(hotter(rows), [1.0])).verdict == "unknown"


def test_what_differs_is_said_first(report: dict[str, Any]) -> None:
    other = copy.deepcopy(report)
    other["pair"] = "toy-2"
    other["hardware"]["threads"] = 8
    other["settings"]["evaluate"]["max_new_tokens"] = 256
    other["provenance"]["git_revision"] = "4567def"
    other["warnings"] = ["The code changed."]
    comparison = compare_reports(report, other)
    lines = render(comparison).splitlines()
    assert (
        lines[: len(comparison.differences)]
        == comparison.differences
        == [
            "Different pair: toy, now toy-2.",
            "Different hardware: threads 2, now 8.",
            "Different settings: evaluate.max_new_tokens 64, now 256.",
            "Different code: 0123abc, now 4567def.",
            "Warning of the later report: The code changed.",
        ]
    )
    assert lines[len(comparison.differences)] == comparison.headline
    assert comparison.undecidable is not None


def test_the_table_has_a_line_for_each_cell_in_columns(rows: Rows, report: dict[str, Any]) -> None:
    text = render(compare_reports(report, report_of(slowed(rows, 1.3))))
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 1 + 6 * (1 + len(BENCHES))
    starts = [table[0].index(name) for name in ("method", "speed-up", "later/earlier", "captured", "divergences")]
    for line in table[1:]:
        assert all(line.ljust(200)[start - 1] == " " for start in starts)
    ours = [line for line in table if "TreeGraft" in line]
    assert all(" -  " in line for line in ours)
    captured = report["oracle"]["captured"]
    assert f"{captured:.0%} -> {captured:.0%}" in ours[0]


# ----------------------------------------------------------------------------------------------------------- exit codes


def written(path: Path, report: dict[str, Any]) -> str:
    path.write_text(json.dumps(report))
    return str(path)


def test_exit_codes(tmp_path: Path, rows: Rows, report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    earlier = written(tmp_path / "earlier.json", report)
    slower = written(tmp_path / "slower.json", report_of(slowed(rows, 1.3)))
    elsewhere = written(tmp_path / "elsewhere.json", report | {"hardware": report["hardware"] | {"name": "another"}})
    few = written(tmp_path / "few.json", report_of(make_rows(benches=("code",), prompts=2)))
    for later, plainly, failing in ((earlier, 0, 0), (slower, 0, 1), (elsewhere, 0, 2), (few, 0, 2)):
        assert cli.main(["compare", earlier, later]) == plainly
        assert cli.main(["compare", earlier, later, "--fail-if-slower"]) == failing
        out, err = capsys.readouterr()
        assert out.count("benchmark ") == 2
        assert err.count("\n") == (1 if failing == 2 else 0)
    assert cli.main(["compare", slower, earlier, "--fail-if-slower"]) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        ("", "is damaged"),
        ("[1]", "does not hold an object"),
        ('{"a": NaN}', "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("{}", "is not a report of this version"),
        ('{"schema": "treegraft-report/1"}', "is not a report of this version"),
    ],
)
def test_wrong_files_are_one_sentence(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str], content: str | None, says: str
) -> None:
    good, bad = written(tmp_path / "good.json", report), tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    for arguments in ([good, str(bad)], [str(bad), good]):
        assert cli.main(["compare", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert f"{bad} {says}" in err
    assert cli.main(["compare", good, str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "path", ["by_prompt", "overall", "hardware", "provenance", "warnings", "other_temperatures", "temperature"]
)
def test_a_report_without_what_is_compared_is_refused(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str], path: str
) -> None:
    partial = {key: value for key, value in report.items() if key != path}
    assert cli.main(["compare", written(tmp_path / "a.json", report), written(tmp_path / "b.json", partial)]) == 2
    assert path in capsys.readouterr().err
