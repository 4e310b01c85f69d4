"""Prompts: read strictly from JSONL files or data sets of the hub, split by prompt into train, validation and test.

A line of a prompts file is ``{"question_id": 7, "category": "ratios", "turns": ["...", "..."]}``; ``category`` and
further keys are free. The kind of a prompt (what a report calls a benchmark) is the name of its file ``<kind>.jsonl``,
or of the folder in ``<kind>/question.jsonl``.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import digest
from pipeline.progress import log
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import LabelParams, PromptSource

SPLITS = ("train", "validation", "test")
RESERVED_KINDS = ("mean", "max", "min")
"""What a report says of all kinds together."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of one or more user turns."""

    id: str
    """``<kind>/<question_id>``, unique."""
    kind: str
    turns: tuple[str, ...]


def load_prompts(sources: "Iterable[str | Path | PromptSource]") -> list[Prompt]:
    """All prompts of ``sources``, in the order of the sources, then of file names, then of lines.

    A source is a folder or an entry of params.yaml's ``prompts.sources``. Raises UserError, with file and line, for
    anything malformed, for an empty file or source, and for an id given twice. A prompt that says what an earlier one
    says is left out, or it could be trained and measured on.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    known: set[tuple[str, ...]] = set()
    repeats: list[str] = []
    for source in sources:
        for prompt, place in _read_source(source):
            if prompt.kind in RESERVED_KINDS:
                raise UserError(f"{place}: a kind cannot be called {prompt.kind}, which a report says of all together.")
            if prompt.turns in known:
                repeats.append(place)
                continue
            if prompt.id in places:
                raise UserError(f"{place}: the id '{prompt.id}' was given before at {places[prompt.id]}.")
            known.add(prompt.turns)
            places[prompt.id] = place
            prompts.append(prompt)
    if repeats:
        log(f"prompts: {len(repeats)} repeat earlier ones and are left out (the first: {repeats[0]})")
    return prompts


def split_prompts(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each split, by a rule that needs no random numbers and no list of ids.

    Per kind, in the given order, the second half is for testing (the smaller one of an odd number); in the first half
    every fourth prompt (the 4th, 8th, ...) is for validation and the rest for training.
    """
    splits: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    for of_kind in by_kind.values():
        half = (len(of_kind) + 1) // 2
        for index, prompt in enumerate(of_kind):
            splits["test" if index >= half else "validation" if index % 4 == 3 else "train"].append(prompt)
    return splits


def take(prompts: Iterable[Prompt], per_kind: int) -> list[Prompt]:
    """The first ``per_kind`` prompts of each kind, in order."""
    taken: dict[str, int] = {}
    result = []
    for prompt in prompts:
        taken[prompt.kind] = taken.get(prompt.kind, 0) + 1
        if taken[prompt.kind] <= per_kind:
            result.append(prompt)
    return result


def select_prompts(sources: "Iterable[str | Path | PromptSource]", label: "LabelParams") -> dict[str, list[Prompt]]:
    """The prompts that the stages work on: loaded, split, and cut to the numbers per kind of the label section.

    Raises UserError if a split stays empty; a kind with fewer prompts than asked for gives what it has.
    """
    splits = split_prompts(load_prompts(sources))
    numbers = {
        "train": label.train_per_kind,
        "validation": label.validation_per_kind,
        "test": label.test_per_kind,
    }
    chosen = {split: take(splits[split], numbers[split]) for split in SPLITS}
    for split, of_split in chosen.items():
        if not of_split:
            raise UserError(f"prompts.sources leave no prompt for {split}; a kind needs 7 prompts to fill all splits.")
    return chosen


def _read_source(source: "str | Path | PromptSource") -> Iterator[tuple[Prompt, str]]:
    """Each prompt of one source with the place it comes from, in words."""
    if isinstance(source, str | Path):
        yield from _read_folder(Path(source))
    elif source.folder is not None:
        yield from _read_folder(source.folder)
    else:
        yield from _read_hub(source)


def _read_folder(folder: Path) -> Iterator[tuple[Prompt, str]]:
    if not folder.is_dir():
        raise UserError(f"The prompts folder {folder} does not exist.")
    files = {path: path.stem for path in folder.glob("*.jsonl")}
    files |= {path: path.parent.name for path in folder.glob("*/question.jsonl")}
    if not files:
        raise UserError(f"The prompts folder {folder} holds neither <kind>.jsonl nor <kind>/question.jsonl files.")
    for path in sorted(files):
        yield from _read_file(path, files[path])


def _read_file(path: Path, kind: str) -> Iterator[tuple[Prompt, str]]:
    count = 0
    # Not str.splitlines: that also splits at U+2028 and its kin, which JSON texts may hold as they are.
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            count += 1
            place = f"{path}, line {number}"
            yield _parse_line(raw, kind, place), place
    if count == 0:
        raise UserError(f"The prompts file {path} is empty.")


def _parse_line(raw: bytes, kind: str, place: str) -> Prompt:
    try:
        row = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise UserError(f"{place}: not UTF-8 text.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise UserError(f"{place}: JSON nested too deeply.") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: must be an object with question_id and turns, not {_what(row)}.")
    for field in ("question_id", "turns"):
        if field not in row:
            raise UserError(f"{place}: the field '{field}' is missing.")
    identity = row["question_id"]
    if not (isinstance(identity, int) and not isinstance(identity, bool)) and not (
        isinstance(identity, str) and identity and identity.isprintable()
    ):
        raise UserError(f"{place}: 'question_id' must be a whole number or a non-empty text, not {_what(identity)}.")
    return Prompt(f"{kind}/{identity}", kind, _check_turns(row["turns"], "turns", place))


def _check_turns(turns: Any, field: str, place: str) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: '{field}' must be a non-empty list of texts, not {_what(turns)}.")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise UserError(f"{place}: turn {number} of '{field}' must be a non-empty text, not {_what(turn)}.")
        try:
            turn.encode()
        except UnicodeEncodeError:
            problem = f"turn {number} of '{field}' holds half a surrogate pair, which is no text"
            raise UserError(f"{place}: {problem}.") from None
    return tuple(turns)


def _what(value: Any) -> str:
    """A short name of a wrong value for a message."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f'the text "{value[:40]}"' if value.strip() else "an empty text"
    if isinstance(value, list | dict) and not value:
        return "an empty list" if isinstance(value, list) else "an empty object"
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _read_hub(source: "PromptSource") -> Iterator[tuple[Prompt, str]]:
    """The rows of a data set of the hub (or of its cache, or of a local data set folder).

    Named by what they say, so that a row is the same prompt in whatever slice of the data set.
    """
    import datasets

    name = f"The data set {source.hub}"
    kind, column = source.kind, source.field or source.turns_field
    if source.hub is None or kind is None or column is None:  # PromptSource has checked it
        raise ValueError("not a checked source of the hub")
    try:
        rows = datasets.load_dataset(source.hub, source.name, split=source.split)
    except Exception as error:  # a dozen types of five packages: offline, misspelt, gated, ...
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} could not be loaded ({type(error).__name__}: {reason}).") from error
    if column not in rows.column_names:
        raise UserError(f"{name} has no column '{column}'; it has {', '.join(rows.column_names)}.")
    if len(rows) == 0:
        raise UserError(f"{name} has no rows in the split {source.split}.")
    for index, value in enumerate(rows[column]):
        place = f"{source.hub}, {source.split}, row {index}"
        turns = _check_turns([value] if source.field is not None else value, column, place)
        name = digest(turns)[:12]
        yield Prompt(f"{kind}/{name}", kind, turns), place
