"""Stage label: the target's own answers, and what every schedule would have achieved at every position of them.

Writes data/outcomes/<pair>/::

    <split>/<kind>-<id>-<turn>.npz   the outcomes of one prompt turn
    calibration.json                 n-gram chances and drafter temperatures, fitted on the training answers
    manifest.json                    the list of turns, in order

Answers and outcomes are first kept one file a turn in the scratch folder; a killed run goes on with what is missing.
"""

import dataclasses
import hashlib
import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import read_json, replacing_folder, scratch_folder, write_bytes, write_json
from pipeline.progress import log, progress
from pipeline.prompts import SPLITS, Prompt, select_prompts

if TYPE_CHECKING:
    import numpy as np

    from pipeline.pair import PairModels
    from pipeline.params import PairConfig
    from treegraft.values.calibration import Calibration

SCHEMA = 1
SAFE_NODES = 3  # verified n-gram nodes while answering, before anything is known about the machine
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

    @property
    def id(self) -> str:
        """``<kind>/<question id>/<turn>``."""
        return f"{self.prompt.id}/{self.number}"

    @property
    def file(self) -> str:
        """Its file below the outcomes folder."""
        name = self.id.replace("/", "-")
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
        tag = "" if safe == name else "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{self.split}/{safe}{tag}.npz"


def run(config: "PairConfig") -> None:
    """Answer the prompts, calibrate, evaluate all schedules, publish."""
    from pipeline.pair import load_pair_models

    prompts = select_prompts(config.prompts.sources, config.label)
    models = load_pair_models(config)
    scratch = _scratch(config, prompts)
    turns = answer(config, models, prompts, scratch)
    calibration = calibrate(config, models, turns, scratch)
    evaluate(config, models, calibration, turns, scratch)
    publish(config, turns, calibration, scratch)


def _scratch(config: "PairConfig", prompts: dict[str, list[Prompt]]) -> Path:
    """The scratch folder of exactly this work; what another configuration left is removed."""
    manifests = [
        path.read_text(encoding="utf-8") for path in map(config.paths.manifest, ("fetch", "draft")) if path.exists()
    ]
    parts = {
        "schema": SCHEMA,
        "models": manifests,
        "machine": [config.device, config.dtype, config.threads],
        "decoding": config.decoding.model_dump(mode="json"),
        "label": config.label.model_dump(mode="json"),
        "prompts": {split: [[p.id, list(p.turns)] for p in of_split] for split, of_split in prompts.items()},
        "code": _code_digest(),
    }
    return scratch_folder(config.paths.scratch("label"), parts)


def _code_digest() -> str:
    """Of the library's and this module's source: half-done work of other code is not continued."""
    import treegraft

    files = [*sorted(Path(treegraft.__path__[0]).rglob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def answer(config: "PairConfig", models: "PairModels", prompts: dict[str, list[Prompt]], scratch: Path) -> list[Turn]:
    """The target's greedy answer to every turn; the n-gram drafter speeds it up without changing it."""
    import numpy as np

    from pipeline.pair import encode_turns, make_drafters
    from treegraft.decoder import Decoder
    from treegraft.scheduling.policy import never

    light = [i for i, model in enumerate(models.drafters) if model is None]
    drafters = make_drafters(models, config, None, light)
    settings = dataclasses.replace(config.decoding.settings(), verified_sizes=(SAFE_NODES,))
    decoder = Decoder(models.target, drafters, never(), settings)
    turns: list[Turn] = []
    work = [(split, prompt) for split in SPLITS for prompt in prompts[split]]
    for split, prompt in progress(work, desc="label, answers", unit="prompt"):
        answers: list[str] = []
        for number in range(len(prompt.turns)):
            path = scratch / "answers" / (hashlib.sha256(f"{prompt.id}/{number}".encode()).hexdigest()[:24] + ".json")
            if path.exists():
                stored = json.loads(path.read_text(encoding="utf-8"))
            else:
                tokens = encode_turns(models.target, prompt.turns, answers)
                generated = decoder.generate(tokens.tolist(), config.label.max_new_tokens)
                stored = {
                    "prompt": tokens.tolist(),
                    "answer": generated.tokens,
                    "alternatives": generated.alternatives.tolist(),
                    "text": generated.text,
                }
                write_json(path, stored)
            answers.append(stored["text"])
            text = np.array(stored["prompt"] + stored["answer"], np.int64)
            alternatives = np.array(stored["alternatives"], np.int64).reshape(len(stored["answer"]), -1)
            turns.append(Turn(split, prompt, number, text, len(stored["prompt"]), alternatives))
    return turns


def calibrate(config: "PairConfig", models: "PairModels", turns: list[Turn], scratch: Path) -> "Calibration":
    """Fit the scores' calibration on training answers only."""
    from treegraft.runner import ModelRunner
    from treegraft.values.calibration import Calibration, NgramFit, TemperatureFit

    path = scratch / "calibration.json"
    if path.exists():
        return Calibration.from_json(json.loads(path.read_text(encoding="utf-8")))
    training = [turn for turn in turns if turn.split == "train"]
    ngrams = NgramFit(config.decoding.settings().ngram)
    for turn in training:
        ngrams.add(turn.text, turn.prompt_tokens, turn.alternatives)
    some = training[:: max(1, len(training) // CALIBRATION_TURNS)]
    temperatures = []
    for model, vocabulary in zip(models.drafters, models.vocabulary, strict=True):
        fit = TemperatureFit()
        if model is not None:
            runner = ModelRunner(model)
            for turn in progress(some, desc=f"label, calibration of {model.name}", unit="turn"):
                text = turn.text[: model.context_limit]
                if len(text) > turn.prompt_tokens:
                    runner.reset(len(text))
                    logits = runner.prefill(text[:-1], turn.prompt_tokens - 1)
                    fit.add(logits[:, : vocabulary.size], vocabulary.columns_of(text[turn.prompt_tokens :]))
        temperatures.append(fit.temperature())
    calibration = Calibration(ngrams.table().round(6), tuple(temperatures))
    write_json(path, calibration.to_json())
    return calibration


def evaluate(
    config: "PairConfig",
    models: "PairModels",
    calibration: "Calibration",
    turns: list[Turn],
    scratch: Path,
) -> None:
    """All schedules at every position of every answer, one scratch file a turn."""
    from treegraft.scheduling.features import RequestCosts
    from treegraft.values.lattice import Lattice, Outcomes

    lattice = Lattice(
        config.decoding.settings(),
        models.drafters,
        models.vocabulary,
        calibration.temperatures,
        calibration.ngram_table,
        config.label.tokens_per_forward,
    )
    missing = [turn for turn in turns if not (scratch / "outcomes" / turn.file).exists()]
    done = len(turns) - len(missing)
    if done:
        log(f"label: {done} of {len(turns)} turns were evaluated by an earlier run")
    for turn in progress(missing, total=len(turns), desc="label, schedules", initial=done, unit="turn"):
        # Outcomes do not depend on the machine's speed: stage traces puts the measured costs into the features.
        unit = RequestCosts(turn.prompt_tokens, 1.0, (1.0,) * (len(models.drafters) - 1))
        limit = min(config.label.max_new_tokens, models.target.context_limit - turn.prompt_tokens)
        outcomes = lattice.evaluate(turn.text, turn.prompt_tokens, turn.alternatives, limit, unit)
        arrays = {name: getattr(outcomes, name) for name in Outcomes.__dataclass_fields__}
        write_bytes(scratch / "outcomes" / turn.file, npz_bytes(arrays))


def npz_bytes(arrays: "dict[str, np.ndarray]") -> bytes:
    """Compressed arrays, the same bytes for the same values (numpy's own writer stamps nothing)."""
    import numpy as np

    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def publish(config: "PairConfig", turns: list[Turn], calibration: "Calibration", scratch: Path) -> None:
    """Put the finished outcomes in place of the earlier ones; the scratch folder is done with."""
    entries: list[dict[str, Any]] = [
        {
            "id": turn.id,
            "kind": turn.prompt.kind,
            "split": turn.split,
            "file": turn.file,
            "prompt_tokens": turn.prompt_tokens,
            "answer_tokens": len(turn.text) - turn.prompt_tokens,
        }
        for turn in turns
    ]
    manifest = {
        "schema": SCHEMA,
        "pair": config.slug,
        "drafters": [drafter.name for drafter in config.drafters],
        "decoding": config.decoding.model_dump(mode="json"),
        "max_new_tokens": config.label.max_new_tokens,
        "turns": entries,
    }
    with replacing_folder(config.paths.outcomes) as folder:
        for turn in turns:
            write_bytes(folder / turn.file, (scratch / "outcomes" / turn.file).read_bytes())
        write_json(folder / "calibration.json", calibration.to_json())
        write_json(folder / "manifest.json", manifest)
    shutil.rmtree(scratch)


def read_manifest(config: "PairConfig") -> dict[str, Any]:
    """The outcomes' manifest; UserError where the stage has not finished."""
    return read_json(config.paths.outcomes / "manifest.json", f"run `pipeline label {config.slug}`")
