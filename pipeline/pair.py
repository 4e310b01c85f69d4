"""A pair's models in memory, ready to decode: what the stages profile, label and evaluate share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegraft.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.params import PairConfig
    from treegraft.draft_vocabulary import DraftVocabulary
    from treegraft.drafters import Drafter
    from treegraft.models import LanguageModel
    from treegraft.values.calibration import Calibration


@dataclass(frozen=True)
class PairModels:
    """The loaded models; ``drafters`` in order of cost, None for the n-gram drafter."""

    target: "LanguageModel"
    drafters: list["LanguageModel | None"]
    vocabulary: list["DraftVocabulary"]
    """What each drafter can propose, [m]; the target's own vocabulary for the n-gram drafter."""

    def tokenizer_hashes(self) -> dict[str, str]:
        """Of the target and of every drafter model, by name."""
        from treegraft.vocabulary import tokenizer_hash

        models = [self.target, *(drafter for drafter in self.drafters if drafter is not None)]
        return {model.name: tokenizer_hash(model.tokenizer) for model in models}


def load_pair_models(config: "PairConfig") -> PairModels:
    """Load the target and all drafter models on the pair's device; sets the number of CPU threads.

    Raises UserError for a model that has not been fetched or does not fit its target.
    """
    import torch

    from treegraft.draft_vocabulary import DraftVocabulary
    from treegraft.models import load_model, resolve_device, resolve_dtype
    from treegraft.vocabulary import check_vocabularies

    if config.threads != "auto":
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    folders = [config.paths.target, *(config.paths.drafter(d.name) for d in config.drafters if d.kind == "lm")]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is missing: run `pipeline fetch {config.slug}` and `pipeline draft {config.slug}` first."
            )
    target = load_model(config.paths.target, config.target.name, device, dtype, config.device_map)
    drafters = [
        None if entry.kind == "ngram" else load_model(config.paths.drafter(entry.name), entry.name, device, dtype)
        for entry in config.drafters
    ]
    vocabulary = [
        DraftVocabulary(target.vocab_size) if model is None else check_vocabularies(target, model) for model in drafters
    ]
    return PairModels(target, drafters, vocabulary)


def make_drafters(
    models: PairModels, config: "PairConfig", calibration: "Calibration | None", members: Sequence[int] | None = None
) -> list["Drafter"]:
    """Fresh drafters of a decoder; ``members`` picks some of the pair's (indices), which are numbered anew."""
    from treegraft.drafters import LanguageModelDrafter, NgramDrafter

    made: list[Drafter] = []
    for index, member in enumerate(range(len(models.drafters)) if members is None else members):
        model = models.drafters[member]
        if model is None:
            table = None if calibration is None else calibration.ngram_table
            made.append(NgramDrafter(index, config.decoding.settings().ngram, table))
        else:
            temperature = 1.0 if calibration is None else calibration.temperatures[member]
            made.append(LanguageModelDrafter(index, model, models.vocabulary[member], temperature))
    return made


def encode_turns(model: "LanguageModel", turns: Sequence[str], answers: Sequence[str]) -> "np.ndarray":
    """Token ids (int64 [n]) of a chat up to the user's newest turn: turns[0], answers[0], ..., turns[len(answers)].

    The model's chat template is used where it has one; otherwise the turns and answers stand as plain text.
    """
    import numpy as np

    tokenizer = model.tokenizer
    messages = []
    for number, turn in enumerate(turns[: len(answers) + 1]):
        messages.append({"role": "user", "content": turn})
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    if tokenizer.chat_template:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer("\n\n".join(message["content"] for message in messages) + "\n\n").input_ids
    return np.array(ids, np.int64)


def machine(config: "PairConfig", models: PairModels) -> dict[str, Any]:
    """What a measurement depends on besides the code: device, dtype, threads, versions."""
    import os
    import platform
    from importlib.metadata import version

    import torch

    device = models.target.device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name() or platform.processor() or platform.machine()
    return {
        "device": device.type,
        "name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "versions": {package: version(package) for package in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
    }


def _cpu_name() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        return None
