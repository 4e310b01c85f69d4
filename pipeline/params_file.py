"""Reads params.yaml: the view of one pair that every stage gets, or one sentence about the first fault.

``load_pair`` is the way in. It takes the sections that hold for all pairs, lays the pair's own entry over them, then
the ``--set`` overrides of the command line, and checks the result against ``pipeline.params``.
"""

import difflib
import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.params import PairConfig, ParamsFile
from treegraft.errors import UserError

PARAMS_FILE = Path("params.yaml")

M = TypeVar("M", bound=BaseModel)


def load_pair(slug: str, overrides: Sequence[str] = (), path: Path = PARAMS_FILE) -> PairConfig:
    """The checked configuration of the pair ``slug``.

    ``overrides``: texts ``key.sub=value`` with the value in YAML; each takes the place of what the key had.
    Raises UserError, naming the key and the file, for anything that params.yaml must not hold.
    """
    return resolve_pair(read_params(path), slug, overrides, where=str(path))


def read_params(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """The content of params.yaml with its top level checked."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no {path} here; run this in the repository's root folder.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    raw = _parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold keys and values.")
    checked = _validate(ParamsFile, raw, str(path))
    for slug in checked.run:
        _check_slug(slug, checked.pairs, f"{path}: run names")
    return dict(raw)


def resolve_pair(
    params: Mapping[str, Any], slug: str, overrides: Sequence[str] = (), *, where: str = "params.yaml"
) -> PairConfig:
    """The configuration of one pair out of the content of params.yaml (see ``load_pair``)."""
    _check_slug(slug, params["pairs"], f"{where} has no pair")
    own = params["pairs"][slug]
    shared = {key: value for key, value in params.items() if key not in ("run", "pairs")}
    merged = _merge(shared, own)
    typed: dict[str, Any] = {}
    for override in overrides:
        parts, value = _parse_override(override)
        merged, typed = _set(merged, parts, value), _set(typed, parts, value)
    return _validate(PairConfig, merged | {"slug": slug}, where, own=(f"pairs.{slug}", own), typed=typed)


def _check_slug(slug: str, pairs: Mapping[str, Any], problem: str) -> None:
    if slug not in pairs:
        near = _suggestion(slug, list(pairs))
        raise UserError(f"{problem} '{slug}'{near or '; the pairs are ' + ', '.join(sorted(pairs)) + '.'}")


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on top, key by key down to what is not a mapping on both sides."""
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        merged[key] = _merge(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return merged


def _set(base: Mapping[str, Any], parts: Sequence[str], value: object) -> dict[str, Any]:
    """``base`` with ``value`` in the place of whatever stood at the nested key ``parts``."""
    if len(parts) > 1:
        inner = base.get(parts[0])
        value = _set(inner if isinstance(inner, Mapping) else {}, parts[1:], value)
    return {**base, parts[0]: value}


def _parse_override(override: str) -> tuple[list[str], Any]:
    """``a.b=1`` as ``(["a", "b"], 1)``."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {override} is not of the form key.sub=value, such as distill.epochs=10.")
    return parts, _parse_yaml(text, f"--set {key}")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, which the standard loader settles in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key}' stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)  # a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from None


def _validate(
    model: type[M],
    raw: Mapping[str, Any],
    where: str,
    *,
    own: tuple[str, Mapping[str, Any]] = ("", {}),
    typed: Mapping[str, Any] | None = None,
) -> M:
    """``raw`` as ``model``, or a UserError about its first fault.

    Goes by JSON because only there "strict" still takes a list for a tuple and a text for a path.
    """
    try:
        return model.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        # An unknown key first: it is the usual reason why another one is missing.
        faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        raise UserError(_sentence(model, faults[0], where, own, typed or {})) from None


def _sentence(
    model: type[BaseModel],
    fault: ErrorDetails,
    where: str,
    own: tuple[str, Mapping[str, Any]],
    typed: Mapping[str, Any],
) -> str:
    """One sentence about ``fault``: which key, in which file or option, what is wrong with it."""
    loc = tuple(part for part in fault["loc"] if part != "[key]")
    key = ".".join(str(part) for part in loc)
    if loc and _holds(typed, loc):
        where = "--set"
    elif loc and _holds(own[1], loc):
        key = f"{own[0]}.{key}"
    if fault["type"] == "extra_forbidden":
        known = _fields_at(model, loc[:-1])
        hint = _suggestion(str(loc[-1]), known) or f"; known are {', '.join(sorted(known))}."
        return f"{where}: unknown key '{key}'{hint}"
    if fault["type"] == "missing":
        return f"{where}: '{key}' is missing."
    if fault["type"] == "value_error":
        message = str(fault["ctx"]["error"]).rstrip(".")
        return f"{where}: {message}." if not key or message.startswith(f"{loc[0]}.") else f"{where}: '{key}' {message}."
    if fault["type"] == "too_short":
        return f"{where}: '{key}' must not be empty."
    message = fault["msg"].replace("Input should be", "must be").rstrip(".")
    for pydantic_word, word in {"a valid integer": "a whole number", "an object": "keys and values"}.items():
        message = message.replace(pydantic_word, word)
    given = fault["input"]
    shown = json.dumps(given, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    hint = ""
    if isinstance(given, str) and "a valid number" in message and _is_number(given):
        hint = "; write it without quotes and with a decimal point, such as 0.001 or 1.0e-3"
    return f"{where}: '{key}' {message}, not {shown}{hint}."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _holds(raw: object, loc: tuple[str | int, ...]) -> bool:
    """Whether the nested mappings and lists of ``raw`` have a place ``loc`` (or a value where ``loc`` would go on)."""
    for part in loc:
        inside = part in raw if isinstance(raw, Mapping) else isinstance(raw, list) and part in range(len(raw))
        if not inside:
            return isinstance(raw, list)
        raw = raw[part]  # type: ignore[index]
    return True


def _fields_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """The keys that ``model`` knows at the nested place ``loc``."""
    annotation: object = model
    for part in loc:
        if isinstance(part, int):
            annotation = _models_in(annotation)
            continue
        owner = _models_in(annotation)
        annotation = owner.model_fields[part].annotation if owner and part in owner.model_fields else None
    owner = _models_in(annotation)
    return [key for key in owner.model_fields if key != "slug"] if owner else []


def _models_in(annotation: object) -> type[BaseModel] | None:
    """The first model class inside an annotation such as ``tuple[Annotated[Model, ...], ...]`` or ``Model | None``."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if found := _models_in(argument):
            return found
    return None


def _suggestion(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
