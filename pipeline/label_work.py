"""What labelling computes: the target's answers, the calibration fitted on them, all schedules at every position.

Each function writes shared files whose bytes depend on its input alone, so any worker may call it for any piece; who
does what is in ``pipeline.label``.
"""

import dataclasses
import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.files import json_text, write_shared
from pipeline.progress import progress
from pipeline.prompts import Prompt
from treegraft.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.params import PairConfig
    from treegraft.pair import PairModels
    from treegraft.values.calibration import Calibration

SAFE_NODES = 3  # verified while answering, before anything is known about the machine
CALIBRATION_TURNS = 48  # training answers that the calibration is fitted on, spread over the kinds


@dataclasses.dataclass(frozen=True)
class Turn:
    """One user turn with the answer that the target gave to it."""

    split: str
    prompt: Prompt
    number: int
    text: "np.ndarray"
    """int64 [S]: prompt and answer."""
    prompt_tokens: int
    alternatives: "np.ndarray"
    """int64 [S - prompt_tokens, r]: the target's likeliest tokens in place of each answer token."""
    confidence: "np.ndarray"
    """float64 [S - prompt_tokens]: the probability that the target gave to each answer token."""

    @property
    def id(self) -> str:
        """``<kind>/<question id>/<turn>``."""
        return f"{self.prompt.id}/{self.number}"

    @property
    def file(self) -> str:
        """Its file below the outcomes folder."""
        safe = "".join(c if c.isalnum() or c in "_." else "-" for c in self.id)
        plain = safe.replace("-", "/") == self.id  # no other id has this name
        tag = "" if plain else "-" + hashlib.sha256(self.id.encode()).hexdigest()[:8]
        return f"{self.split}/{safe}{tag}.npz"


def answer(config: "PairConfig", models: "PairModels", prompt: Prompt, files: list[Path]) -> None:
    """The target's answers to a prompt's turns; one call of the cheapest drafter model a step speeds it up."""
    from treegraft.decoder import Decoder
    from treegraft.pair import encode_turns, make_drafters
    from treegraft.sampling import SamplingSettings, prompt_seed
    from treegraft.scheduling.policy import FixedSchedule

    some = tuple(range(min(2, len(models.drafters))))
    settings = dataclasses.replace(config.decoding.settings(), verified_sizes=(SAFE_NODES,))
    answers: list[str] = []
    for path in files:
        if not path.exists():
            # A decoder of its own: buffers grown by earlier turns would make results depend on who did what before.
            drafters = make_drafters(models, settings.ngram, None, some)
            decoder = Decoder(models.target, drafters, FixedSchedule(some[1:]), settings)
            tokens = encode_turns(models.target, prompt.turns, answers)
            sampling = SamplingSettings(config.label.temperature, seed=prompt_seed(config.seed, tokens))
            try:
                generated = decoder.generate(tokens.tolist(), config.label.max_new_tokens, sampling)
            except UserError as error:  # too long for the context
                raise UserError(f"prompt {prompt.id}: {error}") from error
            stored = {
                "prompt": tokens,
                "answer": generated.tokens,
                "alternatives": generated.alternatives,
                "confidence": generated.confidence,
                "text": generated.text,
            }
            write_shared(path, json_text(stored).encode())
        answers.append(json.loads(path.read_text(encoding="utf-8"))["text"])


def calibrate(config: "PairConfig", models: "PairModels", turns: list[Turn], path: Path) -> None:
    """Fit the scores' calibration on training answers only and write it to ``path``."""
    from treegraft.runner import ModelRunner
    from treegraft.values.calibration import Calibration, ModelFit, NgramFit

    training = [turn for turn in turns if turn.split == "train"]
    ngrams = NgramFit(config.decoding.settings().ngram)
    for turn in training:
        ngrams.add(turn.text, turn.prompt_tokens, turn.alternatives)
    some = training[:: max(1, len(training) // CALIBRATION_TURNS)]
    fits = []
    for model, vocabulary in zip(models.drafters, models.vocabulary, strict=True):
        fit = ModelFit(config.decoding.width)
        if model is not None:
            runner = ModelRunner(model)
            for turn in progress(some, desc=f"label, calibration of {model.name}", unit="turn"):
                text = turn.text[: model.context_limit]
                if len(text) > turn.prompt_tokens:
                    runner.reset(len(text))
                    logits = runner.prefill(text[:-1], turn.prompt_tokens - 1)
                    fit.add(logits[:, : vocabulary.size], vocabulary.columns_of(text[turn.prompt_tokens :]))
        fits.append(fit)
    calibration = Calibration(
        ngrams.table().round(6), tuple(fit.temperature() for fit in fits), tuple(fit.hits() for fit in fits)
    )
    write_shared(path, json_text(calibration.to_json()).encode())


def evaluate(
    config: "PairConfig",
    models: "PairModels",
    calibration: "Calibration",
    turns: list[Turn],
    files: list[Path],
) -> None:
    """All schedules at every position of some answers, one file a turn; those that are there are left alone."""
    from treegraft.sampling import SamplingSettings
    from treegraft.scheduling.features import RequestCosts
    from treegraft.values.lattice import Lattice, Outcomes
    from treegraft.values.sampled import SampledTarget

    label = config.label
    for turn, path in zip(turns, files, strict=True):
        if path.exists():
            continue
        # One of its own for each turn, for the same reason as the decoder's above.
        target = None
        if label.temperature > 0:
            target = SampledTarget(models.target, SamplingSettings(label.temperature), label.tokens_per_forward)
        lattice = Lattice(
            config.decoding.settings(),
            models.drafters,
            models.vocabulary,
            calibration,
            label.tokens_per_forward,
            target,
        )
        # Outcomes do not depend on the machine's speed: stage traces puts the measured costs into the features.
        unit = RequestCosts(turn.prompt_tokens, 1.0, (1.0,) * (len(models.drafters) - 1))
        limit = min(label.max_new_tokens, models.target.context_limit - turn.prompt_tokens)
        outcomes = lattice.evaluate(turn.text, turn.prompt_tokens, turn.alternatives, turn.confidence, limit, unit)
        arrays = {name: getattr(outcomes, name) for name in Outcomes.__dataclass_fields__}
        write_shared(path, npz_bytes(arrays))


def npz_bytes(arrays: "dict[str, np.ndarray]") -> bytes:
    """Compressed arrays, the same bytes for the same values (numpy's own writer stamps nothing)."""
    import numpy as np

    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
