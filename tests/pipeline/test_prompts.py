import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.params import LabelParams, PromptSource
from pipeline.prompts import Prompt, load_prompts, select_prompts, split_prompts, take
from treegraft.errors import UserError

ROOT = Path(__file__).parents[2]
GOOD = {"question_id": 1, "category": "c", "turns": ["Hello?"]}


def lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def of_kind(kind: str, count: int) -> list[Prompt]:
    return [Prompt(f"{kind}/{index}", kind, ("x",)) for index in range(count)]


def test_both_layouts_are_read_in_file_and_line_order(tmp_path: Path) -> None:
    lines(tmp_path / "maths.jsonl", GOOD | {"question_id": "b"}, GOOD | {"question_id": "a", "turns": ["Hi!"]})
    lines(tmp_path / "chat" / "question.jsonl", GOOD | {"turns": ["One.", "Two."], "reference": ["ignored"]})
    (tmp_path / "README.md").write_text("not a prompts file")
    assert load_prompts([tmp_path]) == [
        Prompt("chat/1", "chat", ("One.", "Two.")),
        Prompt("maths/b", "maths", ("Hello?",)),
        Prompt("maths/a", "maths", ("Hi!",)),
    ]


def test_line_separators_inside_texts_do_not_end_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\x85c"
    row = json.dumps(GOOD | {"turns": [text]}, ensure_ascii=False)
    (tmp_path / "chat.jsonl").write_bytes(b"\xef\xbb\xbf" + row.encode() + b"\r\n\r\n")
    assert load_prompts([tmp_path])[0].turns == (text,)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be an object"),
        ({"turns": ["x"]}, "'question_id' is missing"),
        ({"question_id": 2}, "'turns' is missing"),
        (GOOD | {"question_id": True}, "'question_id' must be"),
        (GOOD | {"question_id": ""}, "'question_id' must be"),
        (GOOD | {"turns": "x"}, "'turns' must be a non-empty list"),
        (GOOD | {"turns": []}, "'turns' must be a non-empty list"),
        (GOOD | {"turns": ["x", " "]}, "turn 2 of 'turns' must be a non-empty text"),
        (GOOD | {"turns": [3]}, "turn 1 of 'turns' must be a non-empty text"),
        ('{"question_id": 2, "turns": ["\\ud800"]}', "surrogate"),
        (GOOD | {"turns": ["x"]}, "the id 'chat/1' was given before at .*line 1"),
        (GOOD | {"turns": ["x"], "question_id": "1"}, "the id 'chat/1' was given before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    path = lines(tmp_path / "chat.jsonl", GOOD, "", bad)
    with pytest.raises(UserError, match=f"{path}, line 3: .*{says}") as caught:
        load_prompts([tmp_path])
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n")
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        load_prompts([tmp_path])


def test_empty_file_and_empty_folder_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_prompts([tmp_path / "none"])
    with pytest.raises(UserError, match="holds neither"):
        load_prompts([tmp_path])
    (tmp_path / "chat.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"chat\.jsonl is empty"):
        load_prompts([tmp_path])


def test_the_same_id_in_two_sources_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "a" / "chat.jsonl", GOOD)
    lines(tmp_path / "b" / "chat" / "question.jsonl", GOOD | {"turns": ["Hi!"]})
    with pytest.raises(UserError, match=r"b/chat/question\.jsonl, line 1: .* before at .*a/chat\.jsonl, line 1"):
        load_prompts([tmp_path / "a", tmp_path / "b"])


def test_a_kind_that_reports_need_for_themselves_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "a" / "mean.jsonl", GOOD)
    with pytest.raises(UserError, match=r"mean\.jsonl, line 1: a kind cannot be called mean"):
        load_prompts([tmp_path / "a"])


def test_split_rule() -> None:
    splits = split_prompts([*of_kind("a", 18), *of_kind("b", 3)])
    ids = {split: [prompt.id for prompt in prompts] for split, prompts in splits.items()}
    assert ids["validation"] == ["a/3", "a/7"]
    assert ids["train"] == ["a/0", "a/1", "a/2", "a/4", "a/5", "a/6", "a/8", "b/0", "b/1"]
    assert ids["test"] == [*(f"a/{index}" for index in range(9, 18)), "b/2"]


def test_take_keeps_the_first_of_each_kind() -> None:
    mixed = [*of_kind("a", 3), *of_kind("b", 1)]
    assert [prompt.id for prompt in take(mixed, 2)] == ["a/0", "a/1", "b/0"]


def label(per_kind: int) -> LabelParams:
    return LabelParams(
        train_per_kind=per_kind,
        validation_per_kind=per_kind,
        test_per_kind=per_kind,
        max_new_tokens=1,
        temperature=0.0,
        tokens_per_forward=1,
        executor="local",
        workers=1,
    )


def test_select_refuses_an_empty_split(tmp_path: Path) -> None:
    lines(tmp_path / "chat.jsonl", *(GOOD | {"question_id": index, "turns": [str(index)]} for index in range(6)))
    with pytest.raises(UserError, match="no prompt for validation"):
        select_prompts([tmp_path], label(2))
    lines(tmp_path / "chat.jsonl", *(GOOD | {"question_id": index, "turns": [str(index)]} for index in range(7)))
    assert {split: len(chosen) for split, chosen in select_prompts([tmp_path], label(2)).items()} == {
        "train": 2,
        "validation": 1,
        "test": 2,
    }


def test_the_projects_own_prompts() -> None:
    prompts = load_prompts([ROOT / "data" / "prompts"])
    assert set(Counter(prompt.kind for prompt in prompts)) == {
        "chat",
        "code",
        "instructions",
        "maths",
        "questions",
        "summaries",
    }
    assert min(Counter(prompt.kind for prompt in prompts).values()) >= 24
    assert all(len(prompt.turns) == 2 for prompt in prompts if prompt.kind == "chat")
    texts = [prompt.turns for prompt in prompts]
    assert len(set(texts)) == len(texts), "a prompt that stands twice could be trained and tested on"


def test_a_repeated_prompt_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "k.jsonl", *({"question_id": i, "turns": ["x" * (1 + i % 2)]} for i in range(5)))
    assert [prompt.id for prompt in load_prompts([tmp_path])] == ["k/0", "k/1"]
    assert f"3 repeat earlier ones and are left out (the first: {path}, line 3)" in capsys.readouterr().err


def test_data_set_of_the_hub(tmp_path: Path) -> None:
    """A local folder of files is what datasets takes in the place of a hub id."""
    lines(tmp_path / "test.jsonl", {"question": "Why?", "talk": ["A", "B"]}, {"question": "How?", "talk": ["C"]})
    by_field = PromptSource(hub=str(tmp_path), split="test[:1]", field="question", kind="why")
    by_turns = PromptSource(hub=str(tmp_path), split="test", turns_field="talk", kind="talk")
    found = load_prompts([by_field, by_turns])
    assert [(prompt.kind, prompt.turns) for prompt in found] == [
        ("why", ("Why?",)),
        ("talk", ("A", "B")),
        ("talk", ("C",)),
    ]
    # In another slice the same row is the same prompt, or what a scheduler was trained on could be measured unnoticed.
    assert load_prompts([by_turns.model_copy(update={"split": "test[1:]"})]) == found[2:]
    with pytest.raises(UserError, match="no column 'nothing'; it has question, talk"):
        load_prompts([PromptSource(hub=str(tmp_path), split="test", field="nothing", kind="k")])
    with pytest.raises(UserError, match="row 0: turn 1 of 'talk' must be"):
        load_prompts([PromptSource(hub=str(tmp_path), split="test", field="talk", kind="k")])
    with pytest.raises(UserError, match="could not be loaded"):
        load_prompts([PromptSource(hub=str(tmp_path / "none"), split="test", field="question", kind="k")])


def test_the_default_drafter_was_taught_nothing_that_schedulers_are_trained_or_tested_on() -> None:
    taught, others = (
        {turn for p in load_prompts([ROOT / "data" / name]) for turn in p.turns}
        for name in ("drafters/prompts", "prompts")
    )
    assert taught
    assert not taught & others
