"""params.yaml, typed and strictly checked: one class for each of its sections.

There are no defaults in code: what is not in params.yaml is missing, and a reader of params.yaml sees every knob.
How the file is read, and what is said of a fault, is in ``pipeline.params_file``.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.paths import Paths

if TYPE_CHECKING:
    from treegraft.settings import DraftSettings
    from treegraft.sources import ModelSource

# A value table has one column per schedule: m^depth of them. Beyond this the tables of a default run outgrow memory.
MAX_SCHEDULES = 4096


def _text(pattern: str, description: str) -> AfterValidator:
    """A check that a text matches ``pattern`` as a whole, which ``description`` puts into words."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f'must be {description}, not "{value}"')
        return value

    return AfterValidator(check)


def _threads(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"must be auto or a whole number of at least 1, not {json.dumps(value)}")
    return value


Name = Annotated[str, _text(r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, '.', '_' and '-'")]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0)]
Sha256 = Annotated[str, _text("[0-9a-f]{64}", "64 hexadecimal digits in lower case")]
Device = Annotated[str, _text("auto|cpu|cuda(:[0-9]+)?", "auto, cpu, cuda or cuda:<number>")]
Threads = Annotated[Literal["auto"] | int, BeforeValidator(_threads)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DrafterDtype = Literal["auto", "int8", "float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of every part of params.yaml: unknown keys are refused and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class NgramParams(Section):
    """The light drafter's limits (``treegraft.settings.NgramSettings``)."""

    max_match: Positive
    branches: Positive
    recycled: Count
    path: Positive


class DecodingParams(Section):
    """How the shared tree is drafted and verified (``treegraft.settings.DraftSettings``)."""

    depth: Positive
    width: Positive
    look_back: Positive
    verified_sizes: tuple[Count, ...]
    ngram: NgramParams

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.settings()  # the library's own check of what belongs together
        return self

    def settings(self) -> "DraftSettings":
        """The library's settings of these values."""
        from treegraft.settings import DraftSettings, NgramSettings

        return DraftSettings(
            depth=self.depth,
            width=self.width,
            look_back=self.look_back,
            verified_sizes=self.verified_sizes,
            ngram=NgramSettings(**self.ngram.model_dump()),
        )


class ProfileParams(Section):
    """The grid of new tokens and context lengths on which latencies are measured."""

    new_tokens: Annotated[tuple[Positive, ...], Field(min_length=2)]
    context_lengths: Annotated[tuple[Positive, ...], Field(min_length=1)]
    repeats: Positive

    @field_validator("new_tokens", "context_lengths")
    @classmethod
    def _rising(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if list(values) != sorted(set(values)):
            raise ValueError("must be a rising list, each number once")
        return values


class LabelParams(Section):
    """How many prompts of each kind are labelled, how far the target decodes each, and who does the work."""

    train_per_kind: Positive
    validation_per_kind: Positive
    test_per_kind: Positive
    max_new_tokens: Positive
    temperature: Temperature
    """Of the target's answers: 0 is greedy, above it they are sampled with a seed for each prompt."""
    tokens_per_forward: Positive
    executor: Literal["local", "torchrun", "ray"]
    workers: Positive
    """Actors of the executor ray; the others have as many workers as processes were started."""


class TracesParams(Section):
    """Policy iteration on the tables."""

    policy_iterations: Positive


def _distinct(values: tuple[object, ...], info: ValidationInfo) -> tuple[object, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"names a {str(info.field_name).removesuffix('s')} twice")
    return values


class DistillParams(Section):
    """The student network and its training."""

    features: tuple[Literal["text", "tree"], ...]
    """Groups beside the published features (``treegraft.scheduling.features.feature_groups``)."""
    hidden: tuple[Positive, ...]
    learning_rate: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    epochs: Positive
    batch_size: Positive
    patience: Positive
    visit_exponent: Annotated[float, Field(ge=0)]
    """Of the visit weights in the loss."""
    policy_iterations: Positive
    seeds: Annotated[tuple[Count, ...], Field(min_length=1)]

    _names_each_once = field_validator("features", "seeds")(_distinct)


class TuneParams(Section):
    """The search of stage tune."""

    trials: Positive
    """Finished ones; those that are pruned do not count."""
    workers: Positive
    """Processes that one command starts, itself included."""


class EvaluateParams(Section):
    """The measured comparison on the label section's test prompts."""

    max_new_tokens: Positive
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)]
    """The report's headline is about the first."""
    repeats: Positive
    bootstrap: Positive
    hf_baselines: bool

    _names_each_once = field_validator("temperatures")(_distinct)


class PromptSource(Section):
    """Where prompts come from: a folder, or a data set of the hub. A bare text in params.yaml is a folder.

    ``folder``: holds ``<kind>.jsonl`` files, or ``<kind>/question.jsonl`` as the published benchmarks do.
    ``hub``: a data set id; ``split`` may be a slice (``test[:80]``); ``name`` is its configuration; exactly one of
    ``field`` (a text column: one turn) and ``turns_field`` (a column of lists of texts); ``kind`` is what the report
    calls it.
    """

    folder: Path | None = None
    hub: str | None = None
    name: str | None = None
    split: str | None = None
    field: str | None = None
    turns_field: str | None = None
    kind: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.folder is None) == (self.hub is None):
            raise ValueError("needs exactly one of 'folder' and 'hub'")
        of_hub = (self.name, self.split, self.field, self.turns_field, self.kind)
        if self.folder is not None and any(value is not None for value in of_hub):
            raise ValueError("is a folder: 'name', 'split', 'field', 'turns_field' and 'kind' belong to 'hub' only")
        if self.hub is not None:
            if self.split is None or self.kind is None:
                raise ValueError("is a data set of the hub: it needs 'split' and 'kind'")
            if (self.field is None) == (self.turns_field is None):
                raise ValueError("needs exactly one of 'field' and 'turns_field'")
        return self


def _as_prompt_source(value: object) -> object:
    return {"folder": value} if isinstance(value, str) else value


class PromptsParams(Section):
    """Where the prompts come from, in order."""

    sources: Annotated[tuple[Annotated[PromptSource, BeforeValidator(_as_prompt_source)], ...], Field(min_length=1)]


class WheelParams(Section):
    """One file inside a wheel of the package index, with the wheel's digest."""

    package: str
    version: str
    file: str
    sha256: Sha256


class ModelEntry(Section):
    """A model by name, with exactly one source."""

    name: Name
    hub: str | None = None
    revision: str | None = None
    folder: Path | None = None
    gguf: Path | None = None
    wheel: WheelParams | None = None

    def _sources(self) -> list[str]:
        keys = ("hub", "folder", "gguf", "wheel", "distilled")
        return [key for key in keys if getattr(self, key, None) is not None]

    def _check_source(self) -> None:
        if len(self._sources()) != 1:
            found = " and ".join(f"'{key}'" for key in self._sources()) or "none"
            raise ValueError(f"needs exactly one source ('hub', 'folder', 'gguf' or 'wheel'); it has {found}")
        if self.revision is not None and self.hub is None:
            raise ValueError("has a 'revision', which belongs to 'hub' only")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_source()
        return self

    @property
    def source(self) -> "ModelSource | None":
        """The source that ``treegraft.sources.resolve_model`` takes; None where there is nothing to resolve."""
        from treegraft.downloads import WheelFile
        from treegraft.sources import ModelSource

        if not set(self._sources()) & {"hub", "folder", "gguf", "wheel"}:
            return None
        wheel = WheelFile(**self.wheel.model_dump()) if self.wheel else None
        return ModelSource(hub=self.hub, revision=self.revision, folder=self.folder, gguf=self.gguf, wheel=wheel)


class DrafterEntry(ModelEntry):
    """A drafter: ``ngram`` (no model) or ``lm`` with a source, which may be ``distilled`` (layers of the target)."""

    kind: Literal["ngram", "lm"]
    distilled: Path | None = None

    def _check_source(self) -> None:
        if self.kind == "lm":
            super()._check_source()
        elif self._sources() or self.revision is not None:
            raise ValueError("is of kind ngram, which needs no model: remove its source")


class PairConfig(Section):
    """Everything a stage needs to know about one pair."""

    slug: Name
    target: ModelEntry
    drafters: Annotated[tuple[DrafterEntry, ...], Field(min_length=1)]
    """In order of cost; index 0 is the light drafter."""
    device: Device
    device_map: Literal["auto"] | None = None
    """``auto`` spreads the target over all GPUs; None puts it on ``device``."""
    dtype: Dtype
    drafter_dtype: DrafterDtype
    threads: Threads
    seed: Count
    decoding: DecodingParams
    profile: ProfileParams
    prompts: PromptsParams
    label: LabelParams
    traces: TracesParams
    distill: DistillParams
    tune: TuneParams
    evaluate: EvaluateParams

    @property
    def paths(self) -> Paths:
        """Where the pair's files live."""
        return Paths(self.slug, self.target.name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [self.target.name, *(drafter.name for drafter in self.drafters)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the pair has two models named '{name}'; give each its own name")
        if sum(drafter.kind == "ngram" for drafter in self.drafters) > 1:
            raise ValueError("the pair has two drafters of kind ngram; they would draft the same, so remove one")
        if self.drafters[0].kind != "ngram":
            raise ValueError("the first drafter must be of kind ngram, which acts wherever no other is called")
        if len(self.drafters) == 1:
            raise ValueError("the pair has one drafter, so there is nothing to schedule; add a dearer one")
        if len(self.drafters) ** self.decoding.depth > MAX_SCHEDULES:
            raise ValueError(
                f"{len(self.drafters)} drafters at decoding.depth {self.decoding.depth} make "
                f"{len(self.drafters) ** self.decoding.depth} schedules, more than the {MAX_SCHEDULES} that fit in "
                "memory; lower decoding.depth"
            )
        if self.device_map is not None and self.device == "cpu":
            raise ValueError("device_map is set but device is cpu; remove one of them")
        return self


class ParamsFile(Section):
    """The top level of params.yaml. The pairs are checked one by one, when they are asked for."""

    run: Annotated[tuple[str, ...], Field(min_length=1)]
    device: object
    dtype: object
    drafter_dtype: object
    threads: object
    seed: object
    decoding: dict[str, object]
    profile: dict[str, object]
    prompts: dict[str, object]
    label: dict[str, object]
    traces: dict[str, object]
    distill: dict[str, object]
    tune: dict[str, object]
    evaluate: dict[str, object]
    pairs: dict[Name, dict[str, object]]
