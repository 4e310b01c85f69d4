"""Scheduler checkpoints: three files that hold everything a decoder needs to schedule one pair of models.

::

    <folder>/
        model.safetensors   layers.<i>.weight [inputs, outputs] and layers.<i>.bias [outputs], float32
        config.json         SchedulerConfig; names the weights it belongs to by their SHA-256
        README.md           the card, written from config.json alone
        model.onnx          only if `pipeline onnx` was run: the network for other runtimes; never read here

Equal weights and configuration give equal bytes. All is checked once, on loading; the decoder trusts it afterwards.
A kill while saving leaves a whole export: the files are written beside their places first and renamed into them at the
end, config.json last, and should the kill fall between two renames, loading takes the configuration that was about to
be renamed, because its digest is the one that fits the weights.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pydantic
import safetensors
import safetensors.numpy

from treegraft.errors import UserError
from treegraft.scheduling.admission import Saving
from treegraft.scheduling.card import card
from treegraft.scheduling.features import feature_groups, feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.settings import DraftSettings, NgramSettings

SCHEMA = "treegraft.scheduler/1"
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
ONNX_FILE = "model.onnx"
_UNFINISHED = ".tmp"  # suffix of a file that is not in its place yet; .dvcignore and .gitignore know it


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """All of a scheduler but its weights. Dictionaries hold JSON types only; numbers are finite."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid")

    pair: str
    """Slug of the model pair."""
    drafters: tuple[str, ...]
    """Names of the drafters in order of cost: action i calls drafter i, and 0 is the light one."""
    feature_names: tuple[str, ...]
    """Inputs in order: the published features and some or all of the others."""
    means: tuple[float, ...]
    """Mean of each input over the training states."""
    scales: tuple[float, ...]
    """Standard deviation of each input (1 where it does not vary)."""
    hidden: tuple[int, ...]
    """Widths of the hidden layers."""
    depth: int
    """D: layers a step."""
    width: int
    """k: nodes in a frontier."""
    look_back: int
    """L: layers from which a call reselects its frontier."""
    ngram: NgramSettings
    """Limits of the light drafter."""
    verified_sizes: tuple[int, ...]
    """Numbers of nodes that verification may choose from."""
    rate_tokens_per_ms: float
    """Replayed speed of this scheduler's steps (prefill left out) on its training and validation prompts."""
    saving: Saving
    """What calls save on each token once a drafter knows the prompt: what admits requests to calling."""
    best_fixed: tuple[int, ...]
    """Best fixed schedule: one action a layer."""
    calibration: dict[str, Any]
    """Tables that turn drafters' scores into probabilities: ``treegraft.values.calibration.Calibration.to_json``."""
    cost_model: dict[str, Any]
    """Latency curves of the pair's models, in milliseconds: ``treegraft.costs.CostModel.to_json``."""
    cost_model_digest: str
    """What ``CostModel.digest`` gives for it."""
    tokenizer_hashes: dict[str, str]
    """Hash of each model's tokenizer, by model name."""
    replay: dict[str, dict[str, float | None]]
    """Replayed tokens per ms by split and method; null where it was not computed."""
    provenance: dict[str, Any]
    """What it was trained on and with: data, settings, versions. No times or host names: equal inputs, equal bytes."""
    weights_sha256: str = ""
    """Digest of model.safetensors; ``save_scheduler`` fills it in."""
    schema: str = SCHEMA
    """Version of this format."""

    @property
    def target(self) -> str:
        """Name of the target: of the models with a tokenizer the one that is no drafter."""
        return next(name for name in self.tokenizer_hashes if name not in self.drafters)

    @property
    def model_drafters(self) -> tuple[str, ...]:
        """Names of the drafters that are models, in order of cost."""
        return tuple(name for name in self.drafters if name in self.tokenizer_hashes)

    @property
    def draft_settings(self) -> DraftSettings:
        """The limits under which the scheduler was trained."""
        return DraftSettings(self.depth, self.width, self.look_back, self.verified_sizes, self.ngram)


def digest_of(value: Any) -> str:
    """SHA-256 of ``value`` as JSON with sorted keys, as ``CostModel.digest`` has it; ValueError for NaN or infinity."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def save_scheduler(folder: Path, network: MarginNetwork, config: SchedulerConfig) -> SchedulerConfig:
    """Write a checkpoint that ``load_scheduler`` accepts, replacing an earlier one at the very end.

    ``network``'s means and scales must be those of ``config``. Returns the configuration as stored (with the digest of
    the weights). A model.onnx of an earlier scheduler is removed; one beside these very files stays.

    Raises:
        UserError: the network does not fit the configuration, or a number is not finite; nothing is written.
    """
    tensors = _tensors(network)
    # One metadata key at most: safetensors writes several in random order.
    data = safetensors.numpy.save(tensors, metadata={"schema": SCHEMA})
    config = replace(config, weights_sha256=hashlib.sha256(data).hexdigest())
    _check_config(config, folder)
    _check_tensors(tensors, config, folder / WEIGHTS_FILE)
    for name, stored in (("means", network.means), ("scales", network.scales)):
        if not np.array_equal(stored, np.array(getattr(config, name), dtype=np.float32)):
            raise UserError(f"The {name} of the network to be saved in {folder} are not those of its configuration.")
    files = {WEIGHTS_FILE: data, CARD_FILE: card(config).encode(), CONFIG_FILE: _config_text(config).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        _write_flushed(folder / (name + _UNFINISHED), content)
    if not all(_holds(folder / name, content) for name, content in files.items()):
        # Before the renames: a kill then leaves none, never another scheduler's. It cannot be renewed without onnx.
        (folder / ONNX_FILE).unlink(missing_ok=True)
    for name in files:  # config.json last
        os.replace(folder / (name + _UNFINISHED), folder / name)
    _flush_folder(folder)
    return config


def load_scheduler(folder: Path) -> tuple[MarginNetwork, SchedulerConfig]:
    """Read and check a checkpoint.

    Raises:
        UserError: a file is missing or damaged, or its content does not fit this version of TreeGraft; one sentence.
    """
    data = _read(folder / WEIGHTS_FILE)
    config = _read_config(folder, hashlib.sha256(data).hexdigest())
    path = folder / WEIGHTS_FILE
    try:
        tensors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); run `pipeline distill {config.pair}`.") from error
    _check_tensors(tensors, config, path)
    if hashlib.sha256(data).hexdigest() != config.weights_sha256:
        raise UserError(f"{path} is not the file that {CONFIG_FILE} beside it was written with; export the pair again.")
    layers = range(len(config.hidden) + 1)
    network = MarginNetwork(
        [tensors[f"layers.{layer}.weight"] for layer in layers],
        [tensors[f"layers.{layer}.bias"] for layer in layers],
        np.array(config.means),
        np.array(config.scales),
    )
    return network, config


def check_fits(
    config: SchedulerConfig, *, tokenizer_hashes: dict[str, str], depth: int, width: int, drafters: list[str]
) -> None:
    """Check that a checkpoint was made for the live models and settings.

    Args:
        tokenizer_hashes: of the live target and drafter models, by name (treegraft.vocabulary.tokenizer_hash).
        depth: layers a step of the live decoder.
        width: its frontier width.
        drafters: names of its drafters in order of cost.

    Raises:
        UserError: one sentence that names the first thing that differs.
    """
    made = f"The scheduler of {config.pair} was made for"
    redo = f"use these or run the pipeline again for {config.pair}."
    if list(drafters) != list(config.drafters):
        raise UserError(f"{made} the drafters {_listed(config.drafters)}, not {_listed(drafters)}; {redo}")
    for name, wanted, live in (("depth", config.depth, depth), ("width", config.width, width)):
        if live != wanted:
            raise UserError(f"{made} {name} {wanted}, not {live}; set {name} to {wanted} or run the pipeline again.")
    if missing := sorted(config.tokenizer_hashes.keys() ^ tokenizer_hashes.keys()):
        have, given = _listed(sorted(config.tokenizer_hashes)), _listed(sorted(tokenizer_hashes))
        raise UserError(f"{made} the models {have}, not {given} ({_listed(missing)} differ); {redo}")
    for name, wanted_hash in sorted(config.tokenizer_hashes.items()):
        if tokenizer_hashes[name] != wanted_hash:
            raise UserError(
                f"The tokenizer of {name} (hash {tokenizer_hashes[name][:12]}) is not the one that the scheduler of "
                f"{config.pair} was made with (hash {wanted_hash[:12]}); load that model or run the pipeline again."
            )


def _listed(names: Any) -> str:
    return ", ".join(str(name) for name in names) or "none"


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; `pipeline distill` writes it.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _read_config(folder: Path, weights_sha256: str) -> SchedulerConfig:
    """The configuration that belongs to the weights; config.json if none does (later checks then say why)."""
    path = folder / CONFIG_FILE
    pending = folder / (CONFIG_FILE + _UNFINISHED)
    text = _read(pending if pending.exists() and not path.exists() else path)
    if pending.exists() and not _names_weights(text, weights_sha256):
        # A save was killed between its renames; what it was about to rename is whole, because it was flushed before.
        candidate = _read(pending)
        text = candidate if _names_weights(candidate, weights_sha256) else text
    return _parse_config(text, path)


def _names_weights(text: bytes, weights_sha256: str) -> bool:
    try:
        return json.loads(text).get("weights_sha256") == weights_sha256
    except (ValueError, AttributeError):
        return False


def _parse_config(text: bytes, path: Path) -> SchedulerConfig:
    def refuse_constant(name: str) -> float:
        raise UserError(f"{path} holds {name}, which JSON does not have; export the pair again.")

    try:
        values = json.loads(text, parse_constant=refuse_constant)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); export the pair again.") from error
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise UserError(
            f"{path} has schema {schema!r}, but this version of TreeGraft reads {SCHEMA!r}; export it again."
        )
    try:
        # Strict: "4" is not 4. From JSON text, where strictness still takes an array for a tuple.
        config = _ADAPTER.validate_json(text, strict=True)
    except UserError as error:  # of the settings and the saving in it
        raise UserError(f"{path}: {error}") from error
    except pydantic.ValidationError as error:
        first, more = error.errors()[0], error.error_count() - 1
        where = ".".join(str(part) for part in first["loc"])
        others = f" (and {more} more)" if more else ""
        raise UserError(f"{path}: {where}: {first['msg']}{others}; export the pair again.") from error
    _check_config(config, path)
    return config


_ADAPTER = pydantic.TypeAdapter(SchedulerConfig)


def _config_text(config: SchedulerConfig) -> str:
    return json.dumps(asdict(config), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


# --- checks, the same on saving and loading --------------------------------------------------------------------------


def _check_config(config: SchedulerConfig, where: Path) -> None:
    """Everything that config.json can tell by itself."""
    for path, number in _numbers(asdict(config)):
        if not math.isfinite(number):
            raise UserError(f"{where}: {path} is {number}; every number of a scheduler must be finite.")
    if len(config.drafters) < 2 or len(set(config.drafters)) != len(config.drafters):
        raise UserError(f"{where}: drafters are {_listed(config.drafters)}; at least two different ones are needed.")
    try:
        config.draft_settings  # noqa: B018  (its own checks of depth, width, sizes)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if len(config.tokenizer_hashes.keys() - set(config.drafters)) != 1:
        raise UserError(f"{where}: tokenizer_hashes must name the target and the drafters that are models.")
    _check_features(config, where)
    if bad := [width for width in config.hidden if width < 1]:
        raise UserError(f"{where}: hidden has a layer of width {bad[0]}; widths are 1 or more.")
    actions = range(len(config.drafters))
    if len(config.best_fixed) != config.depth or any(action not in actions for action in config.best_fixed):
        raise UserError(
            f"{where}: best_fixed is {list(config.best_fixed)}; depth {config.depth} needs that many actions, "
            f"each from 0 to {len(actions) - 1}."
        )
    if config.rate_tokens_per_ms <= 0:
        raise UserError(f"{where}: rate_tokens_per_ms is {config.rate_tokens_per_ms}; a speed is above 0.")
    if digest_of(config.cost_model) != config.cost_model_digest:
        raise UserError(f"{where}: cost_model is not the one that cost_model_digest was computed from; export again.")


def _check_features(config: SchedulerConfig, where: Path) -> None:
    known = list(feature_names(config.depth, len(config.drafters)))
    published = feature_groups(config.depth, len(config.drafters))["published"]
    names = list(config.feature_names)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{where}: this version of TreeGraft does not know the feature(s) {_listed(unknown)}.")
    if missing := [name for name in published if name not in names]:
        raise UserError(f"{where}: the feature(s) {_listed(missing)}, which every scheduler has, are not in it.")
    if names != [name for name in known if name in names]:
        raise UserError(f"{where}: feature_names are not in this version's order, which is {_listed(known)}.")
    for name in ("means", "scales"):
        values = getattr(config, name)
        if len(values) != len(names):
            raise UserError(f"{where}: {name} has {len(values)} numbers for {len(names)} features.")
    for name, scale in zip(names, config.scales, strict=True):
        if not np.float32(scale) > 0:
            raise UserError(f"{where}: the scale of feature {name} is {scale}; it must be above 0.")


def _check_tensors(tensors: dict[str, np.ndarray], config: SchedulerConfig, path: Path) -> None:
    """Names, types, shapes and values of the weights."""
    sizes = [len(config.feature_names), *config.hidden, len(config.drafters) - 1]
    expected: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        expected[f"layers.{layer}.weight"] = (inputs, outputs)
        expected[f"layers.{layer}.bias"] = (outputs,)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{path} lacks the tensor(s) {_listed(missing)}.")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{path} has the tensor(s) {_listed(extra)}, which {CONFIG_FILE} does not call for.")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise UserError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}.")
        if tensor.dtype != np.float32:
            raise UserError(f"{path}: tensor {name} is {tensor.dtype}, expected float32.")
        if bad := int((~np.isfinite(tensor)).sum()):
            where = [int(index) for index in np.argwhere(~np.isfinite(tensor))[0]]
            raise UserError(
                f"{path}: tensor {name} has {bad} of {tensor.size} values that are NaN or infinite, "
                f"the first at {where}."
            )


def _tensors(network: MarginNetwork) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        tensors[f"layers.{layer}.weight"] = weight
        tensors[f"layers.{layer}.bias"] = bias
    return tensors


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every float inside JSON-like data, with the path that leads to it."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_flushed(path: Path, data: bytes) -> None:
    # pipeline.files does the same, but this library does not depend on the pipeline.
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
