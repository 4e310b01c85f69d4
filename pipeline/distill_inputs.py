"""What distill and tune read: the traces of a pair, checked against the settings of now."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import digest, file_digest, library_code, read_json
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from treegraft.values.tables import OutcomeTables


@dataclass(frozen=True)
class Inputs:
    """Tables and what goes with them."""

    train: "OutcomeTables"
    validation: "OutcomeTables"
    test: "OutcomeTables"
    calibration: dict[str, Any]
    temperature: float
    """Of the labelled answers."""
    new_tokens: int
    """Most tokens of an answer."""
    tokenizer_hashes: dict[str, str]
    best_fixed: tuple[int, ...]
    """Fastest fixed schedule on the validation prompts."""

    def with_features(self, groups: tuple[str, ...]) -> "Inputs":
        """The same with only the published features and those of ``groups`` (``distill.features``)."""
        from treegraft.scheduling.features import feature_groups

        known = feature_groups(self.train.depth, self.train.drafters)
        names = [name for group in known if group in ("published", *groups) for name in known[group]]
        tables = {split: getattr(self, split).with_features(names) for split in ("train", "validation", "test")}
        return replace(self, **tables)


def read_inputs(config: "PairConfig") -> Inputs:
    """Read the traces, with all features, and check that they belong to the settings of now.

    Raises:
        UserError: they are missing, incomplete, not finite, or were made with other drafters, depth or features.
    """
    from treegraft.values.replay import best_fixed
    from treegraft.values.validation import read_validated

    folder, redo = config.paths.traces, f"run `pipeline traces {config.slug}` again"
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; run `pipeline traces {config.slug}` first.")
    tables = read_validated(folder)
    for split, table in tables.items():
        _check_tables(config, table, f"{folder}, {split}", redo)
    manifest = read_json(folder / "manifest.json", redo)
    return Inputs(
        tables["train"],
        tables["validation"],
        tables["test"],
        read_json(folder / "calibration.json", redo),
        manifest["temperature"],
        manifest["max_new_tokens"],
        _tokenizers(folder / "profile.json", redo),
        best_fixed(tables["validation"]),
    )


def _check_tables(config: "PairConfig", tables: "OutcomeTables", where: str, redo: str) -> None:
    """Settings and feature names of one split."""
    from treegraft.scheduling.features import feature_names

    settings, drafters = config.decoding.settings(), len(config.drafters)
    names = feature_names(settings.depth, drafters)
    for what, wanted, found in (
        ("depth", settings.depth, tables.depth),
        ("number of drafters", drafters, tables.drafters),
        ("verified sizes", list(settings.verified_sizes), list(tables.sizes)),
        ("features", names, list(tables.feature_names)),
    ):
        if wanted != found:
            raise UserError(f"{where}: these traces were made with other {what} ({found}, now {wanted}); {redo}.")


def _tokenizers(path: Path, redo: str) -> dict[str, str]:
    """The hashes of the pair's tokenizers, which the profile recorded."""
    hashes = read_json(path, redo).get("tokenizer_hashes")
    if not isinstance(hashes, dict) or not hashes:
        raise UserError(f"{path} has no tokenizer_hashes; {redo}.")
    return hashes


def fits_digest(config: "PairConfig", settings: dict[str, Any]) -> str:
    """Of all that fits depend on, so that none is ever taken for one of other inputs: traces, code, versions, settings.

    ``settings``: those of section distill that count.
    """
    here = Path(__file__).parent
    own = [here / f"{name}.py" for name in ("distill_inputs", "labelled", "student", "students")]
    code = [*own, *library_code()]
    parts = {
        "traces": {str(path): file_digest(path) for path in config.paths.traces.rglob("*") if path.is_file()},
        "code": {f"{path.parent.name}/{path.name}": file_digest(path) for path in code},
        "distill": settings,
        "decoding": config.decoding.model_dump(mode="json"),
        "seed": config.seed,
        "versions": versions(),
    }
    return digest(parts)


def versions() -> dict[str, str]:
    """Of the libraries that fits depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "lightning", "numpy", "scikit-learn")}
