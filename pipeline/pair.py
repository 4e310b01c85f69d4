"""The models of a pair of params.yaml, and the machine they run on: for the stages profile, label and evaluate."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import read_json
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from treegraft.pair import PairModels


def load_pair_models(config: "PairConfig") -> "PairModels":
    """Load the target and all drafter models on the pair's device; sets the number of CPU threads.

    Raises UserError for a model that has not been fetched or does not fit its target.
    """
    from treegraft.model_folder import digest_of
    from treegraft.pair import load_models

    again = f"run `pipeline fetch {config.slug}` and `pipeline draft {config.slug}`"
    known: dict[str, dict[str, Any]] = {}
    for path in map(config.paths.manifest, ("fetch", "draft")):
        known |= read_json(path, f"{again} first")["models"]
    folders = {d.name: config.paths.drafter(d.name) for d in config.drafters if d.kind == "lm"}
    for name, folder in {config.target.name: config.paths.target, **folders}.items():
        if not folder.is_dir() or name not in known:
            raise UserError(f"{folder} is missing: {again} first.")
        if digest_of(folder) != known[name]["digest"]:
            raise UserError(f"{folder} holds another model than this pair fetched (a pair that shares it?): {again}.")
    return load_models(
        (config.target.name, config.paths.target),
        [(drafter.name, folders.get(drafter.name)) for drafter in config.drafters],
        config.device,
        config.dtype,
        config.drafter_dtype,
        None if config.threads == "auto" else config.threads,
        config.device_map,
    )


def machine(config: "PairConfig") -> dict[str, Any]:
    """What a measurement of this pair depends on here, besides the code: device, dtypes, threads, versions."""
    import os
    import platform
    from importlib.metadata import version

    import torch

    from treegraft.models import resolve_device, resolve_drafter_dtype, resolve_dtype

    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name() or platform.processor() or platform.machine()
    return {
        "device": device.type,
        "name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if config.threads == "auto" else config.threads,
        "dtype": str(dtype).removeprefix("torch."),
        "drafter_dtype": str(resolve_drafter_dtype(config.drafter_dtype, device, dtype)).removeprefix("torch."),
        "versions": {package: version(package) for package in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
    }


def _cpu_name() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        return None
