"""Changing params.yaml by program: some keys of one pair's section, with all comments and the order kept."""

import io
from pathlib import Path
from typing import Any

import yaml

from pipeline.files import locked, write_text
from pipeline.params_file import PARAMS_FILE, read_params, resolve_pair

LOCK = Path(".treegraft/params.lock")  # two searches may end at once


def write_distill(slug: str, values: dict[str, Any]) -> list[str]:
    """Set ``values`` in pairs.<slug>.distill of params.yaml; returns ``key old -> new`` for each that changes.

    The file is replaced in one step, and only by one that is valid and differs in nothing but ``values``.
    """
    with locked(LOCK):
        before = read_params()
        resolved = resolve_pair(before, slug).distill.model_dump(mode="json")
        changes = {key: value for key, value in values.items() if resolved[key] != value}
        if changes:
            text = _edited(PARAMS_FILE.read_text(encoding="utf-8"), slug, values)
            # ruamel speaks YAML 1.2, params.py 1.1: what the second reads decides.
            after = yaml.safe_load(text)
            own = before["pairs"][slug]
            own["distill"] = own.get("distill", {}) | values
            if after != before:
                raise RuntimeError(f"rewriting {PARAMS_FILE} would change more than pairs.{slug}.distill")
            write_text(PARAMS_FILE, text)
    return [f"{key} {_plain(resolved[key])} -> {_plain(value)}" for key, value in changes.items()]


def _edited(text: str, slug: str, values: dict[str, Any]) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 4096  # no line is broken anew
    editor.indent(mapping=2, sequence=4, offset=2)
    content = editor.load(text)
    pair = content["pairs"][slug]
    section = pair.get("distill")
    if section is None:
        section = CommentedMap()
        # Before the last key, because the comment that follows a pair hangs on what stands last in it.
        pair.insert(max(len(pair) - 1, 0), "distill", section)
    elif section.yaml_anchor() is not None:  # shared with other pairs, which keep the values they have
        section = pair["distill"] = CommentedMap(section)
    for key, value in values.items():
        if isinstance(value, list):
            value = CommentedSeq(value)
            value.fa.set_flow_style()
        section[key] = value
    changed = io.StringIO()
    editor.dump(content, changed)
    return changed.getvalue()


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
