"""Where every file of a pair lives, relative to the repository root (the working directory of every stage)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """The files of one pair; nothing is created here, writers make the folders they need.

    ::

        models/targets/<target>/             a model, ready for transformers.from_pretrained
        models/drafters/<drafter>/
        models/manifests/<slug>/<stage>.json what fetch and draft resolved: names, sources, digests
        models/manifests/<slug>/config/      the resolved parameters, one file per section
        models/schedulers/<slug>/            the scheduler checkpoint
        data/profiles/<slug>.json            measured latencies
        data/outcomes/<slug>/                every schedule at every position
        data/traces/<slug>/                  states and schedules as Parquet
        data/evaluation/<slug>/              measured runs
        reports/<slug>/                      report.{json,md,html}, speedup.svg, metrics.json, traces.json,
                                             distill.json, plots/, tune.{json,html}
        reports/index.html                   the reports of all pairs
        .treegraft/<slug>/<stage>/           half-done work that a killed stage resumes from
    """

    slug: str
    target_name: str

    @property
    def target(self) -> Path:
        """Folder of the target model."""
        return Path("models/targets") / self.target_name

    def drafter(self, name: str) -> Path:
        """Folder of the drafter ``name`` (language-model drafters only)."""
        return Path("models/drafters") / name

    def model(self, name: str) -> Path:
        """Folder of the pair's model ``name``, target or drafter."""
        return self.target if name == self.target_name else self.drafter(name)

    def manifest(self, stage: str) -> Path:
        """What the stage ``stage`` (fetch or draft) resolved."""
        return Path("models/manifests") / self.slug / f"{stage}.json"

    def config(self, section: str) -> Path:
        """The resolved parameters of one section; see ``pipeline.stages.SECTIONS``."""
        return Path("models/manifests") / self.slug / "config" / f"{section}.json"

    @property
    def profile(self) -> Path:
        """Measured latencies of the pair's models on this machine."""
        return Path("data/profiles") / f"{self.slug}.json"

    @property
    def outcomes(self) -> Path:
        """Folder of the labelled outcomes."""
        return Path("data/outcomes") / self.slug

    @property
    def traces(self) -> Path:
        """Folder of the Parquet traces."""
        return Path("data/traces") / self.slug

    @property
    def trace_metrics(self) -> Path:
        """Statistics of the traces: sizes, balance of labels, headroom."""
        return Path("reports") / self.slug / "traces.json"

    @property
    def scheduler(self) -> Path:
        """Folder of the scheduler checkpoint."""
        return Path("models/schedulers") / self.slug

    @property
    def distill_metrics(self) -> Path:
        """What distillation measured: student, baselines, oracle."""
        return Path("reports") / self.slug / "distill.json"

    @property
    def evaluation(self) -> Path:
        """Folder of the measured runs."""
        return Path("data/evaluation") / self.slug

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return Path("reports") / self.slug

    @property
    def tune_report(self) -> Path:
        """What the search of stage tune found; a page of the same name with .html stands beside it."""
        return self.report / "tune.json"

    def scratch(self, stage: str) -> Path:
        """Folder for half-done work of ``stage``; neither git nor dvc looks at it."""
        return Path(".treegraft") / self.slug / stage
