"""Stage label: the target's own answers, and what every schedule would have achieved at every position of them.

Writes data/outcomes/<pair>/::

    <split>/<kind>-<id>-<turn>.npz   the outcomes of one prompt turn
    calibration.json                 n-gram chances and drafter temperatures, fitted on the training answers
    manifest.json                    the list of turns, in order

The work is split into claims of one prompt each, which any number of workers share through the scratch folder
(``pipeline.claims``, ``pipeline.executors``)::

    .treegraft/<pair>/label/<digest of all that results depend on>/
        machine.json                 what the workers' machines must have in common
        answers/<turn>.json          the target's answer to one turn
        calibration.json
        outcomes/<split>/<file>.npz  one turn, as it will be published
        claims/                      who is at what

Whoever wrote a file there, its bytes are the same, so a killed run goes on with what is missing. Beside that folder
.treegraft/<pair>/labelled.json says what the published outcomes were made of, so that a second run has nothing to do.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.claims import Piece, Share, work_through
from pipeline.executors import execute
from pipeline.files import (
    file_digest,
    json_text,
    library_code,
    read_json,
    replacing_folder,
    scratch_folder,
    scratch_name,
    write_bytes,
    write_json,
    write_shared,
)
from pipeline.label_work import Turn, answer, calibrate, evaluate
from pipeline.progress import Meter, log
from pipeline.prompts import SPLITS, Prompt, select_prompts
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from treegraft.pair import PairModels
    from treegraft.values.calibration import Calibration

SCHEMA = 2
ALIKE = ("device", "name", "threads", "dtype", "drafter_dtype", "versions")  # of machines that round alike


def run(config: "PairConfig") -> None:
    """Answer the prompts, calibrate, evaluate all schedules, publish; who works is up to ``label.executor``.

    Nothing is done where the outcomes of equal work on a like machine have been published and are still there.
    """
    job = make_job(config)
    if job.is_published():
        log(f"label: {config.paths.outcomes} holds the outcomes of this work already; remove it to do it again")
    else:
        execute(job)


def make_job(config: "PairConfig") -> "LabelJob":
    """The labelling that ``config`` asks for; nothing is done yet."""
    prompts = select_prompts(config.prompts.sources, config.label)
    manifests = [
        path.read_text(encoding="utf-8") for path in map(config.paths.manifest, ("fetch", "draft")) if path.exists()
    ]
    parts = {
        "schema": SCHEMA,
        "models": manifests,
        "machine": [config.device, config.dtype, config.drafter_dtype, config.threads],
        "decoding": config.decoding.model_dump(mode="json"),
        "seed": config.seed,
        "label": config.label.model_dump(mode="json", exclude={"executor", "workers"}),
        "prompts": {split: [[p.id, list(p.turns)] for p in of_split] for split, of_split in prompts.items()},
        "code": _code_digest(),
    }
    return LabelJob(config, [(split, prompt) for split in SPLITS for prompt in prompts[split]], parts)


def _code_digest() -> str:
    """Of the source of the library and of labelling: half-done work of other code is not continued."""
    here = Path(__file__)
    files = [*library_code(), here, here.with_name("label_work.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@dataclasses.dataclass(frozen=True)
class LabelJob:
    """One labelling, as ``pipeline.executors`` wants it."""

    config: "PairConfig"
    prompts: list[tuple[str, Prompt]]
    """With their splits, training first."""
    parts: dict[str, Any]
    """All that results depend on."""

    @property
    def scratch(self) -> Path:
        """Folder of half-done work."""
        return self.config.paths.scratch("label") / scratch_name(self.parts)

    def begin(self) -> None:
        """Make the scratch folder; what another configuration left is removed, and nothing counts as done."""
        self.record.unlink(missing_ok=True)
        scratch = scratch_folder(self.config.paths.scratch("label"), self.parts)
        for folder in ("answers", *(f"outcomes/{split}" for split in SPLITS)):
            (scratch / folder).mkdir(parents=True, exist_ok=True)
        claims = scratch / "claims"  # the last one: it tells other workers that all is ready
        claims.mkdir(exist_ok=True)
        for old in claims.glob("arrived-*"):
            old.unlink(missing_ok=True)

    def work(self, share: Share, device: str, *, shown: bool) -> None:
        """Answers, then the calibration on them, then all schedules."""
        config = self.config.model_copy(update={"device": device})

        @functools.cache
        def models() -> "PairModels":
            return load_alike(config, self.scratch, share)

        def meter(desc: str) -> Callable[[int, int], None]:
            return Meter(f"label, {desc}") if shown else lambda done, total: None

        work_through(self.answer_pieces(models), share, meter("answers"))
        turns = [turn for split, prompt in self.prompts for turn in self.turns_of(split, prompt)]
        work_through([self.calibration_piece(models, turns)], share)
        work_through(self.schedule_pieces(models, turns), share, meter("schedules"))

    def answer_file(self, prompt: Prompt, number: int) -> Path:
        """Where the answer to one turn is kept."""
        return self.scratch / "answers" / (hashlib.sha256(f"{prompt.id}/{number}".encode()).hexdigest()[:24] + ".json")

    def outcomes_file(self, turn: Turn) -> Path:
        """Where the outcomes of one turn are kept."""
        return self.scratch / "outcomes" / turn.file

    def answer_pieces(self, models: "Callable[[], PairModels]") -> list[Piece]:
        """One a prompt: the target's answers to its turns."""

        def piece(split: str, prompt: Prompt) -> Piece:
            files = [self.answer_file(prompt, number) for number in range(len(prompt.turns))]
            return Piece(
                name="answers-" + files[0].stem,
                is_done=lambda: all(path.exists() for path in files),
                work=lambda: answer(self.config, models(), prompt, files),
                size=lambda: sum(len(turn.alternatives) for turn in self.turns_of(split, prompt)),
                most=len(files) * self.config.label.max_new_tokens,
            )

        return [piece(split, prompt) for split, prompt in self.prompts]

    def turns_of(self, split: str, prompt: Prompt) -> list[Turn]:
        """The answered turns of a prompt."""
        return [self.turn_of(split, prompt, number) for number in range(len(prompt.turns))]

    def turn_of(self, split: str, prompt: Prompt, number: int) -> Turn:
        """One turn that ``answer`` has answered."""
        import numpy as np

        stored = json.loads(self.answer_file(prompt, number).read_text(encoding="utf-8"))
        text = np.array(stored["prompt"] + stored["answer"], np.int64)
        alternatives = np.array(stored["alternatives"], np.int64).reshape(len(stored["answer"]), -1)
        confidence = np.array(stored["confidence"], np.float64)
        return Turn(split, prompt, number, text, len(stored["prompt"]), alternatives, confidence)

    def calibration_piece(self, models: "Callable[[], PairModels]", turns: list[Turn]) -> Piece:
        """Fitted once, by the first worker that comes to it."""
        path = self.scratch / "calibration.json"
        return Piece("calibration", path.exists, lambda: calibrate(self.config, models(), turns, path))

    def schedule_pieces(self, models: "Callable[[], PairModels]", turns: list[Turn]) -> list[Piece]:
        """One a prompt: all schedules at every position of its answers."""
        of_prompt: dict[str, list[Turn]] = {}
        for turn in turns:
            of_prompt.setdefault(turn.prompt.id, []).append(turn)

        def piece(turns: list[Turn]) -> Piece:
            files = [self.outcomes_file(turn) for turn in turns]
            positions = sum(len(turn.alternatives) for turn in turns)
            return Piece(
                name="schedules-" + self.answer_file(turns[0].prompt, 0).stem,
                is_done=lambda: all(path.exists() for path in files),
                work=lambda: evaluate(self.config, models(), self.calibration(), turns, files),
                size=lambda: positions,
                most=positions,
            )

        return [piece(turns) for turns in of_prompt.values()]

    def calibration(self) -> "Calibration":
        """The calibration that was fitted."""
        from treegraft.values.calibration import Calibration

        return Calibration.from_json(json.loads((self.scratch / "calibration.json").read_text(encoding="utf-8")))

    def publish(self) -> None:
        """Put the finished outcomes in place of the earlier ones."""
        config = self.config
        turns = [turn for split, prompt in self.prompts for turn in self.turns_of(split, prompt)]
        entries: list[dict[str, Any]] = [
            {
                "id": turn.id,
                "kind": turn.prompt.kind,
                "split": turn.split,
                "file": turn.file,
                "prompt_tokens": turn.prompt_tokens,
                "answer_tokens": len(turn.text) - turn.prompt_tokens,
                "sha256": file_digest(self.outcomes_file(turn)),
            }
            for turn in turns
        ]
        manifest = {
            "schema": SCHEMA,
            "pair": config.slug,
            "drafters": [drafter.name for drafter in config.drafters],
            "decoding": config.decoding.model_dump(mode="json"),
            "max_new_tokens": config.label.max_new_tokens,
            "temperature": config.label.temperature,
            "turns": entries,
        }
        with replacing_folder(config.paths.outcomes) as folder:
            for turn in turns:
                write_bytes(folder / turn.file, self.outcomes_file(turn).read_bytes())
            write_json(folder / "calibration.json", self.calibration().to_json())
            write_json(folder / "manifest.json", manifest)

    @property
    def record(self) -> Path:
        """What the published outcomes were made of; not among them, since equal outcomes are to have equal bytes."""
        return self.config.paths.scratch("label").with_name("labelled.json")

    def made_of(self, machine: dict[str, Any]) -> dict[str, Any]:
        """What would have to change for the outcomes on disk not to be this job's."""
        manifest = file_digest(self.config.paths.outcomes / "manifest.json")
        return {"work": self.scratch.name, "machine": {key: machine[key] for key in ALIKE}, "manifest": manifest}

    def is_published(self) -> bool:
        """Whether the outcomes on disk are this job's, so that there is nothing to do."""
        from pipeline.pair import machine

        outcomes = self.config.paths.outcomes
        if not (self.record.exists() and (outcomes / "manifest.json").exists()):
            return False
        if read_json(self.record, f"remove {self.record}") != self.made_of(machine(self.config)):
            return False
        manifest = read_json(outcomes / "manifest.json", f"remove {self.record}")
        return all((outcomes / turn["file"]).is_file() for turn in manifest["turns"])

    def retire(self) -> None:
        """Note that all is done, then remove the scratch folder, for other workers in one step.

        Not noted earlier: a worker that comes while the leader waits for it must still arrive.
        """
        machine = json.loads((self.scratch / "machine.json").read_text(encoding="utf-8"))
        write_json(self.record, self.made_of(machine))
        gone = self.scratch.with_name(self.scratch.name + ".old")
        self.scratch.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # what is left of it goes when the next work begins


def load_alike(config: "PairConfig", scratch: Path, share: Share) -> "PairModels":
    """The pair's models; UserError on a machine that could round otherwise than the one that began the work."""
    from pipeline.pair import load_pair_models, machine

    here = machine(config)
    path = scratch / "machine.json"
    work_through([Piece("machine", path.exists, lambda: write_shared(path, json_text(here).encode()))], share)
    there = json.loads(path.read_text(encoding="utf-8"))
    for key in ALIKE:
        if there[key] != here[key]:
            raise UserError(
                f"The work in {scratch} was begun with {key} {there[key]}, but this worker has {here[key]}, so its "
                "results could differ in the last digits: use equal workers, or remove that folder to begin anew."
            )
    return load_pair_models(config)


def read_manifest(config: "PairConfig") -> dict[str, Any]:
    """The outcomes' manifest; UserError where the stage has not finished."""
    return read_json(config.paths.outcomes / "manifest.json", f"run `pipeline label {config.slug}`")
