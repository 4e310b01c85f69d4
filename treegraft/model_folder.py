"""What a materialised model folder holds, and how one comes to its place whole or not at all.

A folder, written by `treegraft.sources.resolve_model` and read by `locate`, `digest_of` and
`treegraft.models.load_model`:

    models/targets/<name>/
        treegraft.json        the manifest, written last: that it exists means that the folder is complete
        config.json, generation_config.json, tokenizer.json, ..., model.safetensors    of a converted model (GGUF,
        wheel), or nothing more          when the files are in transformers' own format elsewhere: the manifest's `path`
        points there

Nothing is copied that can be pointed at: a 70B model in the hub's cache stays there. A folder becomes visible complete
or not at all (work goes on in <name>.partial), and an earlier good one stays until the new one is ready.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from treegraft.errors import UserError, one_line

MANIFEST = "treegraft.json"
SCHEMA = 1
MODEL_SUFFIXES = {".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken"}
# Files above this size are compared by size alone when a folder is checked: hashing 140 GB at each start would take
# minutes.
HASH_AGAIN_BELOW = 32 * 2**20


def locate(folder: Path) -> Path:
    """The folder that transformers should load for `folder`: itself, or the one that its manifest points to."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("path") is None:
        return folder
    path = Path(manifest["path"])
    if not path.is_dir():
        raise UserError(f"{folder} points to {path}, which is gone: run `pipeline fetch` again")
    return path


def digest_of(folder: Path) -> str:
    """sha256 (hex) over the names and sha256 of a model's files: the manifest's, or computed where there is none.

    Raises:
        UserError: the files are no longer those that the manifest lists.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        return digest_of_files(inventory(folder))
    # A folder of somebody else's may hold other weights of the same size; of a copy of ours sizes say enough.
    noted = manifest["origin"].get("stats") if manifest.get("path") else None
    same = noted is None or noted == stats(locate(folder))
    if not same or not intact(locate(folder), manifest["files"], hash_again=False):
        raise UserError(
            f"the files of {locate(folder)} have changed since {folder} was fetched: run `pipeline fetch` again"
        )
    return str(manifest["digest"])


def check_complete(name: str, folder: Path) -> None:
    """UserError unless a folder has a config, a tokenizer and every safetensors file that it should have."""
    if not (folder / "config.json").is_file():
        raise UserError(f"model '{name}': {folder} has no config.json, so it is not a transformers folder")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            expected = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"model '{name}': {index} is damaged ({one_line(error)})") from error
        missing = [shard for shard in expected if not (folder / shard).is_file()]
        if missing:
            raise UserError(
                f"model '{name}': {folder} lacks {len(missing)} of {len(expected)} weight files, first {missing[0]}; "
                "the download was cut off"
            )
    elif not (folder / "model.safetensors").is_file():
        raise UserError(f"model '{name}': {folder} has no model.safetensors; other weight formats are not read")
    if not any(
        (folder / file).is_file()
        for file in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise UserError(f"model '{name}': {folder} has no tokenizer")


def sha256_of(file: Path) -> str:
    """sha256 of a file's content, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _model_files(folder: Path) -> list[Path]:
    """The files of a folder that make the model, by name."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        file
        for file in files
        if file.suffix in MODEL_SUFFIXES and file.name != MANIFEST and not file.name.startswith(".") and file.is_file()
    ]


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """{file name: {"bytes", "sha256"}} of the files of a model."""
    files = {}
    for file in _model_files(folder):
        # The hub's cache names a big file by its sha256: no need to read 140 GB again.
        blob = file.resolve().name
        known = file.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": blob if known else sha256_of(file)}
    if not files:
        raise UserError(f"{folder} holds no model files: run `pipeline fetch` or correct the path in params.yaml")
    return files


def digest_of_files(files: dict[str, dict[str, Any]]) -> str:
    """sha256 (hex) over the sorted names and sha256 of an inventory."""
    lines = "".join(f"{name} {files[name]['sha256']}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def intact(folder: Path, files: dict[str, dict[str, Any]], *, hash_again: bool) -> bool:
    """Whether the listed files are there in their sizes and, with `hash_again`, the small ones in their contents."""
    for name, expected in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            return False
        if hash_again and expected["bytes"] < HASH_AGAIN_BELOW and sha256_of(file) != expected["sha256"]:
            return False
    return True


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none or it is not one of ours (then the folder is made again)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    keys = {"source": dict, "origin": dict, "files": dict, "digest": str}
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        return None
    return manifest if all(isinstance(manifest.get(key), kind) for key, kind in keys.items()) else None


def stats(path: Path) -> dict[str, str]:
    """{file name: size and modification time} of a file or a model folder: shows changes without reading."""
    files = [path] if path.is_file() else _model_files(path)
    return {file.name: f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in files}


def partial_folder(folder: Path) -> Path:
    """Where a folder is built before it comes to its place."""
    return folder.with_name(folder.name + ".partial")


def _replaced(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced")


def put_in_place(new: Path, folder: Path) -> None:
    """Move a finished folder to its place; an earlier one steps aside first, since a folder cannot be overwritten."""
    aside = _replaced(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    try:
        new.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo what a killed run left: put back an earlier folder that had stepped aside, drop half-written files."""
    if _replaced(folder).exists() and not folder.exists():
        _replaced(folder).rename(folder)
    shutil.rmtree(_replaced(folder), ignore_errors=True)
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


def sync(file: Path) -> None:
    """Force a file's content to the disk, so that a power cut cannot leave a manifest beside empty weights."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
