"""Stage fetch: every model of the pair in its folder, checked to fit its target, and a manifest that says what came.

Distilled drafters are not fetched; stage draft puts them together.
"""

from typing import TYPE_CHECKING, Any

from pipeline.files import write_json
from pipeline.params import ModelEntry, PairConfig
from pipeline.progress import log

if TYPE_CHECKING:
    from treegraft.models import LanguageModel

SCHEMA = 1


def run(config: PairConfig) -> None:
    """Materialise the models and write models/manifests/<pair>/fetch.json, last.

    A model folder that holds what its source says already is left alone. Raises UserError for a source that is missing
    or damaged, a model that cannot be rolled back, and a drafter with another vocabulary than its target.
    """
    from treegraft.sources import resolve_model
    from treegraft.vocabulary import check_vocabularies

    entries = [entry for entry in (config.target, *config.drafters) if entry.source is not None]
    for entry in entries:
        source = entry.source
        if source is not None:
            resolve_model(entry.name, source, config.paths.model(entry.name), progress=log)
    target = _without_weights(config, config.target)
    models = {target.name: _description(config.target, target)}
    for entry in entries[1:]:
        drafter = _without_weights(config, entry)
        shared = check_vocabularies(target, drafter)
        models[entry.name] = _description(entry, drafter) | {"shared_vocabulary": shared.size}
    write_json(config.paths.manifest("fetch"), {"schema": SCHEMA, "pair": config.slug, "models": models})


def _without_weights(config: PairConfig, entry: ModelEntry) -> "LanguageModel":
    """The model with its tokenizer and shapes but no weights: a 70B model costs no memory here."""
    import torch

    from treegraft.models import load_model

    return load_model(
        config.paths.model(entry.name), entry.name, torch.device("meta"), torch.bfloat16, device_map={"": "meta"}
    )


def _description(entry: ModelEntry, model: "LanguageModel") -> dict[str, Any]:
    """What later stages depend on: if none of this changes, neither do their results."""
    from treegraft.model_folder import digest_of
    from treegraft.vocabulary import tokenizer_hash

    return {
        "source": entry.source.as_dict() if entry.source else None,
        "digest": digest_of(model.folder),
        "tokenizer_hash": tokenizer_hash(model.tokenizer),
        "vocab_size": model.vocab_size,
        "context_limit": model.context_limit,
    }
