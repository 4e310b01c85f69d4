"""The stages in order: what each is for, reads, writes, and which sections of params.yaml it heeds.

``dvc.yaml`` says the same to dvc; tests/pipeline/test_dvc.py holds the two against each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig

SECTIONS: dict[str, tuple[str, ...]] = {
    "models": ("target", "drafters"),
    "machine": ("device", "device_map", "dtype", "drafter_dtype", "threads"),
    "seed": ("seed",),
    "decoding": ("decoding",),
    "profile": ("profile",),
    "prompts": ("prompts",),
    "label": ("label",),
    "traces": ("traces",),
    "distill": ("distill",),
    "evaluate": ("evaluate",),
}
"""The fields of PairConfig in the groups that stages depend on: a change reruns no stage that it does not concern."""

WHO_WORKS = {"label": {"executor", "workers"}}
"""Fields inside sections that leave results as they are: no stage depends on them."""


@dataclass(frozen=True)
class Stage:
    """One stage; ``<pair>``, ``<target>`` and ``<drafter>`` in the paths stand for names."""

    name: str
    summary: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    sections: tuple[str, ...]

    def run(self) -> "Callable[[PairConfig], None]":
        """The stage's function; the module is imported here, because it may bring in torch."""
        function: Callable[[PairConfig], None] = import_module(f"pipeline.{self.name}").run
        return function


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "fetch",
            "bring in the target and the drafters, compare their vocabularies",
            ("params.yaml", "the models' sources"),
            (
                "models/targets/<target>/",
                "models/drafters/<drafter>/",
                "models/manifests/<pair>/fetch.json",
                "models/manifests/<pair>/config/",
            ),
            tuple(SECTIONS),
        ),
        Stage(
            "draft",
            "put a distilled drafter together from the target and its trained layers (other pairs: nothing to build)",
            ("models/targets/<target>/", "models/manifests/<pair>/fetch.json", "data/drafters/"),
            ("models/drafters/<drafter>/", "models/manifests/<pair>/draft.json"),
            ("models",),
        ),
        Stage(
            "profile",
            "measure the latency of every model on this machine",
            ("models/targets/<target>/", "models/drafters/<drafter>/"),
            ("data/profiles/<pair>.json",),
            ("models", "machine", "seed", "decoding", "profile"),
        ),
        Stage(
            "label",
            "let the target answer the prompts and try every schedule at every position of the answers",
            ("models/targets/<target>/", "models/drafters/<drafter>/", "data/prompts/"),
            ("data/outcomes/<pair>/",),
            ("models", "machine", "seed", "decoding", "prompts", "label"),
        ),
        Stage(
            "traces",
            "turn outcomes and latencies into training tables: features and margins of every scheduling state",
            ("data/outcomes/<pair>/", "data/profiles/<pair>.json"),
            ("data/traces/<pair>/", "reports/<pair>/traces.json"),
            ("models", "machine", "decoding", "traces"),
        ),
        Stage(
            "distill",
            "train the scheduler on the traces, compare it with simpler learners, export the best",
            ("data/traces/<pair>/", "data/profiles/<pair>.json"),
            ("models/schedulers/<pair>/", "reports/<pair>/distill.json"),
            ("models", "seed", "decoding", "distill"),
        ),
        Stage(
            "evaluate",
            "measure the scheduler against plain decoding, each drafter alone and the best fixed schedule",
            (
                "models/targets/<target>/",
                "models/drafters/<drafter>/",
                "models/schedulers/<pair>/",
                "data/traces/<pair>/",
                "data/prompts/",
                "data/profiles/<pair>.json",
            ),
            ("data/evaluation/<pair>/",),
            ("models", "machine", "seed", "decoding", "prompts", "label", "evaluate"),
        ),
        Stage(
            "report",
            "sum the measurements up as JSON, Markdown and one HTML page",
            ("data/evaluation/<pair>/", "reports/<pair>/distill.json"),
            (
                "reports/<pair>/report.json",
                "reports/<pair>/report.md",
                "reports/<pair>/report.html",
                "reports/<pair>/speedup.svg",
                "reports/<pair>/metrics.json",
                "reports/<pair>/plots/",
                "reports/index.html",
            ),
            ("models", "seed", "evaluate"),
        ),
    )
}


def write_sections(config: "PairConfig", sections: tuple[str, ...]) -> None:
    """Write the resolved values of ``sections`` to the files that dvc watches; equal files are not touched.

    ``fetch`` writes all of them; every other stage writes those it heeds once more when it has succeeded. So what dvc
    records for a stage is what it ran with, also after --set or an edit of params.yaml in the middle of a `dvc repro`.
    """
    from pipeline.files import write_json_if_changed

    for section in sections:
        write_json_if_changed(config.paths.config(section), section_values(config, section))


def section_values(config: "PairConfig", section: str) -> dict[str, Any]:
    """The resolved values of one section that results depend on, in JSON's types and without unset options."""
    return config.model_dump(mode="json", include=set(SECTIONS[section]), exclude=WHO_WORKS, exclude_none=True)


def find_stage(name: str) -> Stage:
    """The stage called ``name``."""
    if name not in STAGES:
        raise UserError(f"There is no stage '{name}'; the stages are {', '.join(STAGES)}.")
    return STAGES[name]
