"""A pair's models in memory, ready to decode: what the library's own interface and the training pipeline share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treegraft.draft_vocabulary import DraftVocabulary
from treegraft.drafters import Drafter, LanguageModelDrafter, NgramDrafter
from treegraft.drafters.ngram import HITS_START
from treegraft.errors import UserError
from treegraft.models import LanguageModel, load_model, resolve_device, resolve_drafter_dtype, resolve_dtype
from treegraft.settings import NgramSettings
from treegraft.tree import IntArray
from treegraft.vocabulary import check_vocabularies, tokenizer_hash

if TYPE_CHECKING:
    from treegraft.values.calibration import Calibration


@dataclass(frozen=True)
class PairModels:
    """The loaded models; ``drafters`` in order of cost, None for the n-gram drafter."""

    target: LanguageModel
    drafters: list[LanguageModel | None]
    vocabulary: list[DraftVocabulary]
    """What each drafter can propose, [m]; the target's own vocabulary for the n-gram drafter."""

    def tokenizer_hashes(self) -> dict[str, str]:
        """Of the target and of every drafter model, by name."""
        models = [self.target, *(drafter for drafter in self.drafters if drafter is not None)]
        return {model.name: tokenizer_hash(model.tokenizer) for model in models}


def load_models(
    target: tuple[str, Path],
    drafters: Sequence[tuple[str, Path | None]],
    device: str = "auto",
    dtype: str = "auto",
    drafter_dtype: str = "auto",
    threads: int | None = None,
    device_map: str | None = None,
) -> PairModels:
    """Load a target and its drafters and check that they share a vocabulary.

    Args:
        target: name and folder; drafters: the same in order of cost, with None as folder of the n-gram drafter.
        device, dtype, drafter_dtype: as ``treegraft.models.resolve_device``, ``resolve_dtype`` and
            ``resolve_drafter_dtype`` take them.
        threads: CPU threads of the whole process; None leaves their number as it is.
        device_map: ``auto`` spreads the target over all GPUs.

    Raises:
        UserError: a model is missing, damaged, cannot be decoded speculatively or does not fit its target.
    """
    if threads is not None:
        if threads < 1:
            raise UserError(f"threads is {threads}; it must be at least 1.")
        torch.set_num_threads(threads)
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    name, folder = target
    loaded = load_model(folder, name, where, kind, device_map)
    if loaded.draft_tokens is not None:
        raise UserError(
            f"model '{name}' in {folder} was made for drafting and can say {len(loaded.draft_tokens)} of its "
            f"{loaded.vocab_size} tokens only; it cannot be a target."
        )
    rounded = resolve_drafter_dtype(drafter_dtype, where, kind)
    models = [None if folder is None else load_model(folder, name, where, rounded) for name, folder in drafters]
    vocabulary = [
        DraftVocabulary(loaded.vocab_size) if model is None else check_vocabularies(loaded, model) for model in models
    ]
    return PairModels(loaded, models, vocabulary)


def make_drafters(
    models: PairModels, ngram: NgramSettings, calibration: "Calibration | None", members: Sequence[int] | None = None
) -> list[Drafter]:
    """Fresh drafters of a decoder; ``members`` picks some of the pair's (indices), which are numbered anew."""
    made: list[Drafter] = []
    for index, member in enumerate(range(len(models.drafters)) if members is None else members):
        model = models.drafters[member]
        if model is None:
            table = None if calibration is None else calibration.ngram_table
            made.append(NgramDrafter(index, ngram, table))
        else:
            temperature = 1.0 if calibration is None else calibration.temperatures[member]
            hits = HITS_START if calibration is None else calibration.hits[member]
            made.append(LanguageModelDrafter(index, model, models.vocabulary[member], temperature, hits))
    return made


def encode_turns(model: LanguageModel, turns: Sequence[str], answers: Sequence[str]) -> IntArray:
    """Token ids (int64 [n]) of a chat up to the user's newest turn: turns[0], answers[0], ..., turns[len(answers)].

    The model's chat template is used where it has one; otherwise the turns and answers stand as plain text.
    """
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
