"""The report stage: its files, its page (self-contained, well-formed, legible), and what it refuses."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline import svg
from pipeline.aggregate import build_report
from pipeline.files import read_json
from pipeline.measurements import METHODS, OWN_METHODS, parse_run, parse_summary
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from pipeline.report import metrics, plots, run
from pipeline.report_html import render_html, render_markdown
from pipeline.report_picture import render_picture
from pipeline.report_schema import check_report
from tests.pipeline.test_aggregate import BENCHES, DISTILL, make_rows, make_summary, report_of
from treegraft.errors import UserError

PARAMS = Path(__file__).parents[2] / "params.yaml"
VOID = {"meta", "link", "br", "hr", "img", "input", "col", "wbr"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    """The default pair in an empty working directory that holds what evaluate and distill leave there."""
    config = load_pair("smollm2-135m", ["evaluate.bootstrap=100"], PARAMS)
    monkeypatch.chdir(tmp_path)
    write_inputs(config, make_rows())
    return config


def write_inputs(config: PairConfig, rows: list[dict[str, Any]]) -> None:
    config.paths.evaluation.mkdir(parents=True)
    config.paths.report.mkdir(parents=True)
    (config.paths.evaluation / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (config.paths.evaluation / "summary.json").write_text(json.dumps(make_summary()))
    (config.paths.evaluation / "steps.jsonl").write_text("")
    config.paths.distill_metrics.write_text(json.dumps(DISTILL))


class Page(HTMLParser):
    """Parses a page strictly: every tag is closed in order; keeps ids, attributes and the text outside `<style>`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(make_rows())


@pytest.fixture(scope="module")
def page(report: dict[str, Any]) -> str:
    return render_html(report)


# ------------------------------------------------------------------------------------------------------------ the stage


def test_stage_writes_every_file(config: PairConfig) -> None:
    run(config)
    out = config.paths.report
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        *("report.json", "report.html", "report.md", "speedup.svg", "metrics.json", "distill.json"),
        *("plots/speedup.tsv", "plots/acceptance.tsv"),
    }
    report = json.loads((out / "report.json").read_text())
    check_report(report)
    assert report["pair"] == "smollm2-135m"
    assert report["provenance"]["bootstrap"]["resamples"] == 100
    # The page is made from report.json and from nothing else.
    assert (out / "report.html").read_text() == render_html(report)
    assert (out / "report.md").read_text() == render_markdown(report)


def test_stage_is_reproducible(config: PairConfig) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in config.paths.report.rglob("*") if path.is_file()}

    run(config)
    before = contents()
    run(config)
    assert contents() == before


def test_torn_last_line_asks_for_evaluate_again(config: PairConfig) -> None:
    path = config.paths.evaluation / "runs.jsonl"
    lines = path.read_text().count("\n")
    for cut in (1, 20):
        path.write_text(path.read_text()[:-cut])
        with pytest.raises(UserError, match=f"breaks off in line {lines}.*run `pipeline evaluate smollm2-135m` again"):
            run(config)
    assert not (config.paths.report / "report.json").exists()


def test_malformed_line_is_named(config: PairConfig) -> None:
    path = config.paths.evaluation / "runs.jsonl"
    lines = path.read_text().split("\n")
    lines[4] = "{not json}"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"runs\.jsonl, line 5 is not a run"):
        run(config)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("runs.jsonl", "run `pipeline evaluate smollm2-135m` again"),
        ("summary.json", "evaluate has not finished"),
        ("distill.json", "run `pipeline distill smollm2-135m`"),
    ],
)
def test_missing_input_is_said_in_one_sentence(config: PairConfig, name: str, says: str) -> None:
    folder = config.paths.report if name == "distill.json" else config.paths.evaluation
    (folder / name).unlink()
    with pytest.raises(UserError, match=says) as error:
        run(config)
    assert "is missing" in str(error.value)


@pytest.mark.parametrize("content", ["", "[1]", '{"a": NaN}', '{"a": -Infinity}', "{"])
def test_json_that_is_no_strict_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(content)
    with pytest.raises(UserError, match="mend it"):
        read_json(path, "mend it")


def test_metrics_are_flat_numbers_without_null(report: dict[str, Any]) -> None:
    flat = metrics(report | {"oracle": {"over_best_single": None, "captured": None}})
    assert all(isinstance(value, int | float) for value in flat.values())
    assert "oracle_captured" not in flat
    assert flat["speedup"] == report["overall"]["treegraft"]["speedup"]["mean"]


def test_plots_have_a_row_per_cell(report: dict[str, Any]) -> None:
    tables = plots(report)
    assert len(tables["speedup"]) == len(OWN_METHODS) * (len(BENCHES) + 1)
    assert {row["depth"] for row in tables["acceptance"]} == {1, 2, 3, 4}


# ------------------------------------------------------------------------------------------------------------- the page


def test_page_is_well_formed(page: str) -> None:
    Page(page)
    ElementTree.fromstring(page.replace("<!DOCTYPE html>", ""))
    assert page.startswith("<!DOCTYPE html>\n<html")
    assert len(page.encode()) < 1_500_000


def test_page_loads_nothing(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|<script|<iframe|<object|<embed", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {
        f"#pattern-{part}" for part in ("draft_light", "draft_strong", "verify", "scheduler", "other")
    }
    for tag, attributes in Page(page).tags:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        if "href" in attributes:
            allowed = "data:" if tag == "link" else "#"
            assert (attributes["href"] or "").startswith(allowed)


def test_references_inside_the_page_resolve(page: str) -> None:
    tags = Page(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in tags:
        for name in ("aria-labelledby", "href"):
            value = attributes.get(name) or ""
            references = value.split() if name == "aria-labelledby" else [value[1:]] if value.startswith("#") else []
            assert set(references) <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids)


def test_charts_have_titles_and_descriptions(page: str) -> None:
    charts = re.findall(r'<svg[^>]*class="chart".*?</svg>', page, re.DOTALL)
    assert len(charts) == len(BENCHES) + 1 + 5  # acceptance, time, headroom, replay, calibration
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.get("role") == "img"
        assert root.findtext("title")
        assert root.findtext("desc")


def test_page_says_what_matters(report: dict[str, Any], page: str) -> None:
    text = " ".join(Page(page).text.split())
    assert report["headline"]["text"] in text
    assert report["headline"]["over_best_single"]["text"] in text
    assert "Tokens per step include the bonus token" in text
    assert "pipeline all toy" in text
    assert "dvc repro" in text
    for fact in ("0123abc", "2.13.0", "bfloat16", "decoding.depth", "memory_gib", "params_digest"):
        assert fact in text
    # The baselines of the ecosystem were not asked for.
    assert re.search("HF assisted not measured", text)
    assert "HF assisted | not measured" in render_markdown(report)


def test_measured_ecosystem_baselines_are_shown() -> None:
    report = report_of(make_rows(hf=True))
    shown = f"{report['benchmarks']['code']['hf_assisted']['speedup']['mean']:.2f}\N{MULTIPLICATION SIGN}"
    assert f"<td>{shown}</td>" in render_html(report)
    assert f"HF assisted | {shown}" in render_markdown(report)


def test_slower_is_said_to_be_slower() -> None:
    slow = [row | {"seconds": row["seconds"] * 9} if row["method"] == "treegraft" else row for row in make_rows()]
    page = render_html(report_of(slow))
    heading = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)
    assert heading is not None
    assert "is slower than plain decoding" in heading[1]
    assert 'class="verdict slower"' in page


def test_unmeasured_parts_are_said_to_be_unmeasured() -> None:
    summary = make_summary()
    del summary["replay"], summary["calibration"]
    runs = [parse_run(json.dumps(row), "line") for row in make_rows(benches=("code",), prompts=1)]
    page = render_html(build_report("toy", runs, parse_summary(summary, "summary.json"), None))
    text = " ".join(Page(page).text.split())
    for sentence in (
        "The oracle was not measured.",
        "Calibration was not measured.",
        "Replay of the test prompts was not measured.",
    ):
        assert sentence in text
    assert "one prompt decides nothing" in text
    assert "None" not in text
    assert "nan" not in text.lower().split()


def test_text_from_outside_is_escaped() -> None:
    rows = [row | {"bench": "<b>&\"'|", "prompt_id": "<b>/" + row["prompt_id"]} for row in make_rows(benches=("code",))]
    report = report_of(rows)
    report["settings"] = {"<script>": "</style><script>alert(1)</script>"}
    page = render_html(report)
    Page(page)
    ElementTree.fromstring(page.replace("<!DOCTYPE html>", ""))
    assert "<script" not in page
    assert "<b>" not in page
    assert "\\|" in render_markdown(report)


def test_page_does_not_depend_on_the_order_of_keys(report: dict[str, Any], page: str) -> None:
    assert render_html(json.loads(json.dumps(report, sort_keys=True))) == page


def test_markdown_tables_are_rectangular(report: dict[str, Any]) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", render_markdown(report), re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


# -------------------------------------------------------------------------------------------------------------- colours


def themes(page: str) -> dict[str, dict[str, str]]:
    """Colour variables of light, dark and print."""
    blocks = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    names = ("light", "dark", "print")
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for name, block in zip(names, blocks, strict=True)
    }


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours after WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_contrast_is_sufficient(page: str, theme: str) -> None:
    colours = themes(page)[theme]
    for text in ("ink", "soft", "accent", "good", "bad", "unsure"):
        for ground in ("page", "card", "wash"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for shape in (*METHODS, "draft_light", "draft_strong", "verify", "scheduler", "other"):
        assert contrast(colours[shape], colours["card"]) >= 3, shape


def test_themes_define_the_same_colours(page: str) -> None:
    light, dark, print_ = (set(theme) for theme in themes(page).values())
    assert light == dark == print_


# --------------------------------------------------------------------------------------------------------------- charts


def test_bar_lengths_are_proportional() -> None:
    rows = [svg.Bar("a", "ngram", 1.0), svg.Bar("b", "strong", 2.0), svg.Bar("c", "fixed", None)]
    drawing = svg.bars("x", "t", rows, high=2.0, reference=1.0, reference_label="one")
    widths = [float(bar.get("width", 0)) for bar in ElementTree.fromstring(drawing).iter("rect")]
    assert widths[1] == pytest.approx(2 * widths[0])
    assert len(widths) == 2
    assert "not measured" in drawing


def test_the_picture_has_a_panel_for_all_prompts_and_every_benchmark() -> None:
    report = report_of(make_rows())
    picture = render_picture(report)
    assert "url(" not in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    name = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(picture)
    assert [text.text for text in root.findall(f"{name}text")] == ["All prompts", *sorted(report["benchmarks"])]
    groups = [report["overall"], *(report["benchmarks"][bench] for bench in sorted(report["benchmarks"]))]
    frames = []
    for panel, group in zip(root.findall(f"{name}svg"), groups, strict=True):
        shown = "".join(panel.itertext())
        assert all(f"{group[method]['speedup']['mean']:.2f}" in shown for method in METHODS[1:] if group[method])
        frames.append([float(panel.get(key, 0)) for key in ("x", "y", "width", "height")])
    for x, y, width, height in frames:
        assert x + width <= float(root.get("width", 0))
        assert y + height <= float(root.get("height", 0))
    for (x, y, width, height), (left, top, _, _) in itertools.combinations(frames, 2):
        assert left >= x + width or top >= y + height  # panels come row by row


@pytest.mark.parametrize("depth", [1, 5, 16, 40])
def test_the_labels_of_lines_keep_apart(depth: int) -> None:
    drawing = svg.lines("x", "t", [svg.Line("a", "plain", [0.5] * depth)], x_title="so many")
    labels = [text for text in ElementTree.fromstring(drawing).iter() if (text.text or "").isdigit()]
    assert labels[0].text == "1"
    digits = 7  # units of width of one, at least, at the text size of charts
    for left, right in itertools.pairwise(labels):
        widths = [digits * len(label.text or "") for label in (left, right)]
        assert float(right.get("x", 0)) - float(left.get("x", 0)) > sum(widths) / 2


def test_stacked_parts_fill_the_bar() -> None:
    rows = [svg.Stack("a", "plain", [("verify", 3.0), ("other", 1.0)]), svg.Stack("b", "ngram", [("verify", 2.0)])]
    drawing = svg.stacks("x", "t", rows, unit="ms", names={"verify": "verify", "other": "rest"}, prefix="p")
    fills = [rect for rect in ElementTree.fromstring(drawing).iter("rect") if "fill c-" in (rect.get("class") or "")]
    assert [float(rect.get("width", 0)) for rect in fills] == pytest.approx(
        [svg.WIDTH * 0.75, svg.WIDTH * 0.25, svg.WIDTH * 0.5]
    )


@pytest.mark.parametrize("high", [0.013, 0.3, 1.0, 2.37, 7.0, 99.9, 1e6])
def test_ticks_cover_the_range_in_even_steps(high: float) -> None:
    values = svg.ticks(high)
    assert values[0] == 0
    assert values[-2] < high <= values[-1] * (1 + 1e-9)
    assert values[1] * (len(values) - 1) == pytest.approx(values[-1])


def test_spread_labels_keep_order_gap_and_bounds() -> None:
    positions = [50.0, 51.0, 10.0, 199.0, 199.5]
    placed = svg.spread(positions, 15, 0, 200)
    assert sorted(range(5), key=lambda index: placed[index]) == sorted(range(5), key=lambda index: positions[index])
    ordered = sorted(placed)
    assert min(b - a for a, b in itertools.pairwise(ordered)) >= 15 - 1e-9
    assert ordered[0] >= 0
    assert ordered[-1] <= 200
    assert svg.spread([], 15, 0, 200) == []
    assert svg.spread([5.0] * 3, 100, 0, 10) == [0.0, 5.0, 10.0]


@pytest.mark.parametrize("ours", [0.8, 1.2, 1.5, 2.5])
def test_span_marks_stay_inside(ours: float) -> None:
    drawing = svg.span(
        "x",
        "t",
        svg.Bar("n-grams only", "ngram", 1.2),
        svg.Bar("oracle", "oracle", 1.9),
        svg.Bar("TreeGraft", "treegraft", ours),
        [svg.Bar("best fixed", "fixed", 1.3)],
    )
    for line in ElementTree.fromstring(drawing).iter("line"):
        assert 0 <= float(line.get("x1", -1)) <= svg.WIDTH
    assert ("c-loss" in drawing) == (ours < 1.2)
