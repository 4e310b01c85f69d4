"""Single steps: what is recorded is what the decoder did, what is drawn is what was recorded, and no text is markup."""

import itertools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.prompts import Prompt
from pipeline.recorded_steps import RecordedStep, parse_prompt
from pipeline.report_html import render_html
from pipeline.report_schema import check_report
from pipeline.step_explorer import BOX, COLUMNS, CUT, Box, columns, lay_out, shortened, visible
from pipeline.step_recorder import (
    CONTEXT,
    NODES,
    PROMPTS,
    RANKS,
    Decision,
    ObservedStep,
    TokenTexts,
    WatchedScheduler,
    choose_prompts,
    choose_steps,
    observe,
    recorded,
)
from tests.pipeline.test_aggregate import make_rows, report_of
from tests.pipeline.test_report import Page, contrast, themes
from tests.treegraft.reference import plain
from tests.treegraft.tiny import tiny_language_model
from treegraft.decoder import Decoder
from treegraft.drafters import Drafter, LanguageModelDrafter, NgramDrafter
from treegraft.errors import UserError
from treegraft.sampling import SamplingSettings
from treegraft.scheduling.admission import Saving
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.scheduling.policy import LearnedScheduler, never
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.tree import DraftTree
from treegraft.vocabulary import check_vocabularies

HOSTILE = [
    "<script>",
    "&",
    '"',
    "</text>",
    "]]>",
    "\n",
    "\t",
    " ",
    "\x1b",
    "\u202e",
    "",
    "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 30,
]
DRAFTERS = ["ngram", "<b>&", "third"]
VOCAB = 24
SETTINGS = DraftSettings(
    depth=4, width=4, look_back=4, verified_sizes=(0, 1, 2, 4, 8, 16), ngram=NgramSettings(3, 2, 2, 3)
)
TOKENS = 40
TARGET = tiny_language_model(vocab_size=VOCAB, seed=1, name="target")
NEAR = tiny_language_model(vocab_size=VOCAB, seed=1, layers=1, name="near")
PROMPT = [3, 7, 3, 7, 5, 9, 3, 7, 5, 11, 3, 7, 9, 5]
GREEDY = SamplingSettings()


def observed(schedule: str, sampling: SamplingSettings = GREEDY, saving: Saving | None = None) -> list[ObservedStep]:
    """All steps of an answer of a tiny pair, whose scheduler calls late in each step or as random weights say."""
    names = feature_names(SETTINGS.depth, 2)
    # Random, but of a kind whose steps show all that is looked for below, which the drafter's hits would upset.
    drawn = np.insert(np.random.default_rng(1).normal(size=len(names) - 1), names.index("drafter1_hits"), 0.0)
    weights = [drawn[:, None].astype(np.float32)]
    bias = 0.0
    if schedule == "late":
        weights[0][:] = 0
        weights[0][names.index("layer_share")] = 1.0
        bias = -0.6  # layers 3 and 4 of 4
    zeros, ones = np.zeros(len(names), np.float32), np.ones(len(names), np.float32)
    network = MarginNetwork(weights, [np.array([bias], np.float32)], zeros, ones)
    watched = WatchedScheduler(LearnedScheduler(network, names, names, saving), never())
    drafters: list[Drafter] = [
        NgramDrafter(0, SETTINGS.ngram),
        LanguageModelDrafter(1, NEAR, check_vocabularies(TARGET, NEAR)),
    ]
    decoder = Decoder(TARGET, drafters, watched, SETTINGS, ignore_eos=True)
    steps = observe(decoder, watched, PROMPT, TOKENS, sampling)
    expected = plain(TARGET, PROMPT, TOKENS, sampling, eos=False)
    emitted = [token for step in steps for token in emitted_by(step)]
    assert emitted == expected
    return steps


def emitted_by(step: ObservedStep) -> list[int]:
    return step.tree.token[step.accepted].tolist() + ([] if step.bonus is None else [step.bonus])


def grown(seed: int, nodes: int) -> dict[str, Any]:
    """A recorded step with a random tree, hostile texts, three drafters and an accepted path as deep as it goes."""
    random = np.random.default_rng(seed)
    parent = [0, *(int(random.integers(max(0, node - 6), node)) for node in range(1, nodes + 1))]
    chance = [1.0]
    for above in parent[1:]:
        chance.append(round(chance[above] * float(random.uniform(0.3, 1)), 4))
    accepted: list[int] = []
    while below := [node for node in range(1, nodes + 1) if parent[node] == (accepted or [0])[-1]]:
        accepted.append(below[int(random.integers(len(below)))])
    accepted = accepted[: int(random.integers(len(accepted) + 1))]
    verified = sorted({*accepted, *range(1, nodes // 2)})
    verified = [node for node in verified if node in accepted or parent[node] in (0, *verified)]
    return {
        "step": 3,
        "position": 9,
        "why": list(RANKS)[seed % len(RANKS)],
        "before": ["a ", *HOSTILE],
        "layers": [{"action": layer % 3, "margins": [0.25, -0.5], "added": nodes // 3} for layer in range(3)],
        "text": [HOSTILE[node % len(HOSTILE)] for node in range(nodes + 1)],
        "parent": parent,
        "layer": [0, *([1] * nodes)],
        "drafter": [-1, *(node % 3 for node in range(nodes))],
        "scorer": [-1, *(max(node % 3, node % 2) for node in range(nodes))],
        "probability": chance,
        "verified": verified,
        "accepted": accepted,
        "recovered": [node for node in range(1, nodes + 1) if node % 5 == 0],
        "bonus": None if seed % 3 == 0 else "<script>",
        "drafted": nodes + 7,
        "checked": len(verified),
    }


def page_with(*steps: dict[str, Any]) -> str:
    row = {"prompt_id": "<b>/1", "bench": "<b>", "drafters": DRAFTERS, "total": 9, "steps": list(steps)}
    report = report_of(make_rows()) | {"steps": [row]}
    check_report(report)
    return render_html(report)


def trees(page: str) -> list[ElementTree.Element]:
    """The drawn trees, parsed as XML."""
    return [ElementTree.fromstring(found) for found in re.findall(r'<svg class="tree" .*?</svg>', page, re.DOTALL)]


# ------------------------------------------------------------------------------------------------------------ recording


@pytest.mark.parametrize("sampling", [GREEDY, SamplingSettings(temperature=0.8, seed=5)])
@pytest.mark.parametrize("schedule", ["late", "random"])
def test_a_recorded_step_holds_what_the_decoder_emitted_there(schedule: str, sampling: SamplingSettings) -> None:
    steps = observed(schedule, sampling)
    text = list(PROMPT)
    for step in steps:
        row = RecordedStep.model_validate(recorded(step, "longest", str))
        assert step.position == len(text) - len(PROMPT)
        assert row.before == list(map(str, text[-CONTEXT:]))
        assert row.text[0] == row.before[-1]
        said = [row.text[node] for node in row.accepted] + ([] if row.bonus is None else [row.bonus])
        assert said == list(map(str, emitted_by(step)))
        assert len(row.layers) in (0, SETTINGS.depth)
        assert row.drafted == sum(layer.added for layer in row.layers) == len(row.text) - 1
        assert row.checked == len(row.verified)
        for number, layer in enumerate(row.layers, 1):
            assert (layer.action == 1) == (layer.margins[0] > 0)
            drafters = {drafter for drafter, at in zip(row.drafter, row.layer, strict=True) if at == number}
            assert drafters <= {layer.action}
        text += emitted_by(step)


def test_no_margin_is_shown_where_the_request_calls_nothing() -> None:
    layers = [layer for step in observed("late", saving=Saving((1,), (-1.0,))) for layer in step.decisions]
    assert {(layer.action, *layer.margins) for layer in layers} == {(0,)}
    assert {len(layer.margins) for step in observed("late") for layer in step.decisions} == {1}


def test_a_large_tree_keeps_its_likeliest_nodes_and_the_accepted_path() -> None:
    random = np.random.default_rng(0)
    tree = DraftTree(5, 2)
    for node in range(3 * NODES):
        tree.append([int(random.integers(node + 1))], [node], [float(np.log(random.uniform(0.2, 1)))], 0, 1)
    worst = int(tree.score[: tree.size].argmin())
    path = tree.path(worst)
    verified = np.union1d(tree.best(np.arange(1, tree.size), NODES), path)
    step = ObservedStep(1, 0, [5], tree, verified, path, 7, [Decision(0, [-1.0], np.zeros(1, np.int64))])
    row = RecordedStep.model_validate(recorded(step, "longest", str))
    assert [row.text[node] for node in row.accepted] == list(map(str, tree.token[path].tolist()))
    assert NODES < len(row.text) <= 1 + NODES + len(path)
    assert row.drafted == 3 * NODES
    assert row.checked == len(verified)
    left_out = np.setdiff1d(np.arange(tree.size), step.kept)
    assert tree.score[left_out].max() <= tree.score[np.setdiff1d(step.kept, path)].min()


def test_recovered_is_a_branch_that_no_frontier_node_is_in() -> None:
    tree = DraftTree(0, 2)
    tree.append([0, 1, 0, 3], [1, 2, 3, 4], [-0.1, -0.1, -2.0, -0.1], 0, 1)  # branches 1-2 and 3-4
    frontier = np.array([2])
    tree.append([1, 2, 3, 4, 0], [5, 6, 7, 8, 9], [-1.0] * 5, 1, 2)
    empty = np.zeros(0, np.int64)
    decisions = [Decision(0, [-1.0], np.zeros(1, np.int64)), Decision(1, [1.0], frontier)]
    step = ObservedStep(1, 0, [0], tree, np.arange(1, 10), np.array([3, 7]), 1, decisions)
    assert RANKS["shared"](step) == 1  # 3 is the light drafter's, 7 is not
    assert step.recovered.tolist() == [3, 4]  # 1 and 2 lead to the frontier, and nobody proposed the root
    assert RANKS["recovered"](step) > RANKS["recovered"](ObservedStep(1, 0, [0], tree, empty, empty, 1, decisions)) > 0
    skipped = [decisions[0], Decision(0, [-1.0], frontier)]
    assert ObservedStep(1, 0, [0], tree, empty, empty, 1, skipped).recovered.tolist() == []


def test_prompts_with_most_calls_are_chosen_one_a_kind() -> None:
    prompts = [Prompt(f"{kind}/{number}", kind, ("w3",)) for kind in "abcd" for number in range(3)]
    calls = {prompt.id: (7 * place) % 12 for place, prompt in enumerate(prompts)}
    runs = [
        {"prompt_id": name, "turn": turn, "method": method, "strong_calls": 99 if method == "strong" or turn else count}
        for name, count in calls.items()
        for turn in range(2)
        for method in ("strong", "treegraft")
    ]
    chosen = choose_prompts(prompts, runs)
    assert len({prompt.kind for prompt in chosen}) == len(chosen) == PROMPTS
    left_out = {prompt.kind for prompt in prompts} - {prompt.kind for prompt in chosen}
    for prompt in chosen:
        rivals = [other for other in prompts if other.kind in {prompt.kind, *left_out}]
        assert calls[prompt.id] == max(calls[rival.id] for rival in rivals)


@pytest.mark.parametrize(("schedule", "shown"), [("late", "recovered"), ("random", "shared")])
def test_chosen_steps_show_what_they_are_chosen_for(schedule: str, shown: str) -> None:
    steps = observed(schedule)
    chosen = choose_steps(steps)
    assert shown in dict(chosen)
    assert len({step.number for _, step in chosen}) == len({why for why, _ in chosen}) == len(chosen)
    by_reason = dict(chosen)
    for why, step in chosen:
        assert RANKS[why](step) > 0
        taken = {by_reason[other].number for other in itertools.takewhile(why.__ne__, RANKS) if other in by_reason}
        assert RANKS[why](step) == max(RANKS[why](other) for other in steps if other.number not in taken)
    if "shared" in by_reason:
        step = by_reason["shared"]
        assert set(step.tree.source[step.accepted].tolist()) == {0, 1}
    if "rejected" in by_reason:
        assert len(by_reason["rejected"].accepted) == 0 < len(by_reason["rejected"].verified)
    if "skips" in by_reason:
        assert set(by_reason["skips"].tree.source[1 : by_reason["skips"].tree.size].tolist()) == {0}


def test_token_texts_keep_the_space_that_a_text_would_lose() -> None:
    class Stripping:
        """Decodes as SentencePiece does: the first space of a text is dropped."""

        def decode(self, tokens: list[int], clean_up_tokenization_spaces: bool) -> str:
            return "".join(f" w{token}" for token in tokens).removeprefix(" ")

    assert TokenTexts(Stripping())(3) == " w3"  # type: ignore[arg-type]
    assert TokenTexts(tiny_language_model().tokenizer)(3) == " w3"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parent": [0, 0, 2]}, "before its parent"),
        ({"accepted": [2]}, "no path from the root"),
        ({"accepted": [1, 2], "verified": [1]}, "was not verified"),
        ({"recovered": [3]}, "not recorded"),
        ({"text": ["a", "b"]}, "differ in length"),
        ({"probability": [1.0, 0.5, 1.5]}, "less than or equal to 1"),
        ({"why": "whim"}, "recovered"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    good = grown(1, 2) | {"parent": [0, 0, 1], "verified": [1, 2], "accepted": [1], "recovered": []}
    RecordedStep.model_validate(good)
    with pytest.raises(ValidationError, match=says):
        RecordedStep.model_validate(good | changes)


@pytest.mark.parametrize(
    ("changes", "drafters"),
    [
        ({"accepted": [2]}, 3),
        ({"layers": [{"action": 0, "margins": [0.1], "added": 2}]}, 3),
        ({"layers": [{"action": 3, "margins": [0.1, 0.2], "added": 2}]}, 3),
        ({"drafter": [-1, 0, 3]}, 3),
        ({}, 2),
    ],
)
def test_a_line_that_contradicts_itself_is_named(changes: dict[str, Any], drafters: int) -> None:
    def line(step: dict[str, Any], names: list[str]) -> str:
        return json.dumps({"prompt_id": "a", "bench": "b", "drafters": names, "total": 1, "steps": [step]})

    good = grown(1, 2) | {"parent": [0, 0, 1], "verified": [1, 2], "accepted": [1], "recovered": []}
    assert parse_prompt(line(good, DRAFTERS), "line 1").steps[0].accepted == [1]
    with pytest.raises(UserError, match=r"steps\.jsonl, line 1 does not hold steps"):
        parse_prompt(line(good | changes, DRAFTERS[:drafters]), "steps.jsonl, line 1")


# -------------------------------------------------------------------------------------------------------------- drawing


def overlap(first: Box, second: Box) -> bool:
    return (
        first.x < second.x + second.width
        and second.x < first.x + first.width
        and first.y < second.y + BOX
        and second.y < first.y + BOX
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("nodes", [0, 1, 9, 64])
def test_boxes_are_inside_apart_and_as_many_as_nodes(seed: int, nodes: int) -> None:
    step = grown(seed, nodes)
    drawing = lay_out(step, DRAFTERS)
    emitted = len(step["accepted"]) + (step["bonus"] is not None)
    assert len(drawing.boxes) == nodes + 1 + (step["bonus"] is not None)
    assert len(drawing.links) == len(drawing.boxes) - 1
    assert not any(itertools.starmap(overlap, itertools.combinations(drawing.boxes, 2)))
    assert all(box.x >= 0 and box.x + box.width <= drawing.width for box in drawing.boxes)
    assert all(box.y >= 0 and box.y + BOX <= drawing.height for box in drawing.boxes)
    # The emitted tokens stand in the root's row, one behind the other, and their links are drawn last.
    line = sorted((box for box in drawing.boxes if {"accepted", "bonus"} & set(box.css.split())), key=lambda box: box.x)
    assert len(line) == emitted
    assert {box.y for box in line} <= {drawing.boxes[0].y}
    assert [link.css for link in drawing.links].count("emitted") == emitted
    assert all(link.css == "emitted" for link in drawing.links[len(drawing.links) - emitted :])


@pytest.mark.parametrize("seed", range(12))
def test_no_link_runs_through_a_box(seed: int) -> None:
    drawing = lay_out(grown(seed, 64), DRAFTERS)
    for link in drawing.links:
        x, y = map(int, re.findall(r"M(\d+) (\d+)", link.path)[0])
        for kind, number in re.findall(r"([HV])(\d+)", link.path):
            end = int(number)
            low, high = sorted(((x, y), (end, y) if kind == "H" else (x, end)))
            for box in drawing.boxes:
                beside = high[0] <= box.x or low[0] >= box.x + box.width
                assert beside or high[1] < box.y or low[1] > box.y + BOX
            x, y = (end, y) if kind == "H" else (x, end)


def test_drawn_counts_are_the_recorded_ones() -> None:
    steps = [grown(seed, 5 * seed + 1) | {"step": seed + 1} for seed in range(6)]
    drawn = trees(page_with(*steps))
    assert len(drawn) == len(steps)
    for step, drawing in zip(steps, drawn, strict=True):
        css = [(group.get("class") or "").split() for group in drawing.iter("g")]
        count = {state: sum(state in names for names in css) for state in ("verified", "accepted", "recovered")}
        assert count == {state: len(step[state]) for state in count}
        assert sum("unverified" in names for names in css) == len(step["text"]) - 1 - len(step["verified"])
        assert sum("bonus" in names for names in css) == (step["bonus"] is not None)
        signs = [use.get("href") for use in drawing.iter("use")]
        assert signs == [f"#drafter-{drafter}" for drafter in step["drafter"][1:]]


def test_every_text_is_escaped() -> None:
    page = page_with(*(grown(seed, 40) | {"step": seed} for seed in range(1, 4)))
    ElementTree.fromstring(page.replace("<!DOCTYPE html>", ""))
    parsed = Page(page)
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    for text in ("<b>&", "<script>", "]]>", "\\x1b", "\\u202e"):
        assert text in parsed.text
    assert not {"\x1b", "\u202e", "\t"} & set(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {str(attributes["href"])[1:] for tag, attributes in parsed.tags if tag == "use"} <= set(ids)


def test_a_report_full_of_large_trees_stays_small() -> None:
    steps = [grown(seed, NODES + 8) | {"step": seed} for seed in range(3 * len(RANKS))]
    page = page_with(*steps)
    assert len(page.encode()) < 1_500_000
    assert "7 less likely nodes are not drawn" in page


def test_a_report_without_steps_says_so() -> None:
    assert "No step was recorded." in render_html(report_of(make_rows()))


@pytest.mark.parametrize("text", [*HOSTILE, "plain", "two words", " \n\n", "e\u0301" * 20, "x" * 100])
def test_visible_text_is_never_blank_and_fits(text: str) -> None:
    pieces = visible(text)
    assert pieces
    assert all(piece.isprintable() and " " not in piece for _, piece in pieces)
    assert "".join(piece for mark, piece in pieces if not mark) == "".join(
        character for character in text if character.isprintable() and character != " "
    )
    cut = shortened(pieces)
    assert sum(columns(piece) for _, piece in cut) <= COLUMNS
    assert (cut == pieces) == (cut[-1][1] != CUT)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_the_bonus_token_is_legible(theme: str) -> None:
    colours = themes(page_with(grown(1, 3)))[theme]
    assert contrast(colours["on-fill"], colours["accent"]) >= 4.5


# ------------------------------------------------------------------------------------------------------------ the stage


def test_a_missing_file_of_steps_asks_for_evaluate_again(tmp_path: Path) -> None:
    from pipeline.report import read_rows

    with pytest.raises(UserError, match="is missing: again"):
        read_rows(tmp_path / "steps.jsonl", parse_prompt, "again")
