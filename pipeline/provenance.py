"""Where figures come from: the code, the parameters, the data, and whether the code stayed the same while it ran.

Python reads a module when it is first imported. If a file is edited while a stage runs, the stage may have used either
version or, with imports inside functions, both; and dvc records the version that it finds at the end. So every stage
compares the files of its code at its end with those at its start.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import digest, file_digest

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from pipeline.prompts import Prompt

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "treegraft")


def source_digests() -> dict[str, str]:
    """Digest of every file of this project's packages, compiled files left out, by its path below ``ROOT``."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*")) if path.is_file()]
    return {
        path.relative_to(ROOT).as_posix(): file_digest(path)
        for path in files
        if path.suffix != ".tmp" and "__pycache__" not in path.parts
    }


def changed_code(before: Mapping[str, str]) -> list[str]:
    """The files of this process's own code that are not as ``source_digests`` found them earlier.

    Own code: the modules that this process has imported by now, and what is no module (templates). A file that was
    edited and is imported by nobody here makes no difference.
    """
    after = source_digests()
    imported = {Path(file).resolve() for module in list(sys.modules.values()) if (file := _file_of(module))}
    return [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and (not name.endswith(".py") or ROOT / name in imported)
    ]


def code_changed(stage: str, pair: str, files: Sequence[str]) -> str:
    """The warning about code that changed while ``stage`` ran."""
    return (
        f"The code changed while stage {stage} ran ({', '.join(files)}), so its results may be of either version: "
        f"run `pipeline {stage} {pair}` again (with dvc: `dvc repro -f -s {stage}@{pair}`)."
    )


def code_provenance(before: Mapping[str, str]) -> dict[str, Any]:
    """Which code ran: git revision, digest of the files at the start, and which of them changed since.

    git_revision and dirty are null where the code is not tracked in a git checkout.
    """
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    # dvc.lock changes while `dvc repro` runs; it says nothing about the code.
    status = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)dvc.lock")
    return {
        "git_revision": _git("rev-parse", "HEAD") if tracked else None,
        "dirty": bool(status) if tracked and status is not None else None,
        "code_digest": digest(before),
        "code_changed": changed_code(before),
    }


def input_digests(config: "PairConfig", prompts: "Sequence[Prompt]") -> dict[str, str | None]:
    """Digests of what stage evaluate reads: null for a file that this pair does not have.

    A manifest holds the digests of the files that it lists, and a scheduler's config.json that of its weights.
    """
    paths = config.paths
    files = {
        "fetch": paths.manifest("fetch"),
        "draft": paths.manifest("draft"),
        "profile": paths.profile,
        "scheduler": paths.scheduler / "config.json",
        "traces": paths.traces / "manifest.json",
    }
    return {
        "prompts": digest([[prompt.id, *prompt.turns] for prompt in prompts]),
        **{name: file_digest(path) if path.exists() else None for name, path in files.items()},
    }


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else None


def _git(*arguments: str) -> str | None:
    """What git says in the folder of this file; None where it fails or is not installed."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
