"""What stage evaluate writes and stage report reads: rows of runs.jsonl and summary.json, checked key by key."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.prompts import RESERVED_KINDS
from treegraft.errors import UserError

METHODS = ("plain", "ngram", "strong", "fixed", "treegraft", "hf_prompt_lookup", "hf_assisted")
OWN_METHODS = METHODS[:5]
DRAFTING_METHODS = METHODS[1:5]
SINGLE_METHODS = ("ngram", "strong")
TIME_PARTS = ("draft_light", "draft_strong", "verify", "scheduler", "other")
LABELS = {
    "plain": "plain",
    "ngram": "n-grams only",
    "strong": "strong only",
    "fixed": "best fixed",
    "treegraft": "TreeGraft",
    "hf_prompt_lookup": "HF lookup",
    "hf_assisted": "HF assisted",
    "oracle": "oracle",
    "student": "student (TreeGraft)",
}

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """Keys that are named must be there and of their type; more keys are welcome."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Divergence(Strict):
    """Where a text left plain decoding's: the index of the token and the target's logit gap between the two choices."""

    token: Count
    logit_gap: NotNegative | None = None


class TimeSplit(Strict):
    """Milliseconds by what they were spent on."""

    draft_light: NotNegative
    draft_strong: NotNegative
    verify: NotNegative
    scheduler: NotNegative
    other: NotNegative


class Run(Strict):
    """One line of runs.jsonl: one turn of one prompt, decoded by one method once.

    What only this project's engine can count (steps, layers, acceptance, time split) may be null for hf_* methods;
    acceptance and the time split may be null for plain as well.
    """

    prompt_id: Name
    turn: Count
    bench: Name
    method: Name
    temperature: NotNegative
    repeat: Count
    tokens: Count
    seconds: Positive
    steps: Count | None = None
    calls: list[Count] | None = None
    strong_calls: Count | None = None
    fallbacks: Count | None = None
    accepted_by_depth: list[Count] | None = None
    time_ms: TimeSplit | None = None
    divergence: Divergence | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.method not in METHODS:
            raise ValueError(f"method '{self.method}' is not one of {', '.join(METHODS)}")
        if self.bench in RESERVED_KINDS:
            raise ValueError(f"a benchmark may not be called '{self.bench}', which is a key of over_best_single")
        if self.method in OWN_METHODS and self.steps is None:
            raise ValueError(f"steps is missing, which method '{self.method}' must have")
        if self.method in DRAFTING_METHODS:
            for field in ("strong_calls", "accepted_by_depth", "time_ms"):
                if getattr(self, field) is None:
                    raise ValueError(f"{field} is missing, which method '{self.method}' must have")
        accepted = self.accepted_by_depth or []
        if accepted and self.steps is not None and accepted != sorted(accepted, reverse=True):
            raise ValueError("accepted_by_depth rises with depth")
        if accepted and self.steps is not None and accepted[0] > self.steps:
            raise ValueError("accepted_by_depth counts more steps than there were")
        return self

    @property
    def key(self) -> tuple[str, int, int]:
        """What two methods must share at one temperature to be compared: (prompt, turn, repeat)."""
        return self.prompt_id, self.turn, self.repeat


class ReplayRates(Strict):
    """Modelled tokens per millisecond by method (and "oracle"), over all prompts and by benchmark."""

    tokens_per_ms: dict[str, NotNegative | None] = Field(default_factory=dict)
    benches: dict[str, dict[str, NotNegative | None]] = Field(default_factory=dict)


class CalibrationBin(Strict):
    """Nodes whose predicted probability of acceptance was alike: mean prediction, share accepted, number of nodes."""

    predicted: Annotated[float, Field(ge=0, le=1)]
    observed: Annotated[float, Field(ge=0, le=1)]
    count: Count


class Summary(Strict):
    """summary.json of the evaluate stage."""

    device: dict[str, Any] | Name
    dtype: Name
    settings: dict[str, Any]
    temperatures: Annotated[list[NotNegative], Field(min_length=1)]
    replay: ReplayRates | None = None
    calibration: list[CalibrationBin] | None = None
    started: Name
    ended: Name
    provenance: dict[str, Any] = Field(default_factory=dict)


def parse_run(line: str, where: str) -> Run:
    """One line of runs.jsonl as a `Run`; UserError that names `where` if it is not one."""
    try:
        return Run.model_validate_json(line)
    except ValidationError as error:
        raise UserError(f"{where} is not a run of the evaluate stage: {first_problem(error)}") from error


def parse_summary(data: Any, where: str) -> Summary:
    """summary.json's content as a `Summary`; UserError that names `where` if it is not one."""
    try:
        return Summary.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where} is not a summary of the evaluate stage: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong, with its place, as the end of a sentence."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"].removeprefix("Value error, ")
