"""What a report must hold: every key of the report format, with null only where something was not measured."""

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.measurements import Count, Finite, Name, NotNegative, Positive, Strict, TimeSplit
from pipeline.recorded_steps import RecordedPrompt

Schema = Literal["treegraft-report/3"]
SCHEMA: Schema = "treegraft-report/3"


class _Interval(Strict):
    mean: Finite
    low: Finite | None
    high: Finite | None


class _Ratio(Strict):
    ratio: Finite
    low: Finite | None
    high: Finite | None


class _OverBestBench(_Ratio):
    best: Literal["ngram", "strong"]


class _Method(Strict):
    """What any method has; what only this project's engine counts may be null."""

    tokens: Count
    seconds: Positive
    tokens_per_s: NotNegative
    speedup: _Interval
    tokens_per_step: NotNegative | None
    steps: Count | None
    strong_calls_per_step: NotNegative | None
    acceptance_by_depth: list[NotNegative] | None
    time_split_ms: TimeSplit | None
    divergences: Count | None


class _Plain(_Method):
    tokens_per_step: NotNegative
    steps: Count


class _Drafting(_Plain):
    strong_calls_per_step: NotNegative
    acceptance_by_depth: list[NotNegative]
    time_split_ms: TimeSplit


class _Bench(Strict):
    plain: _Plain
    ngram: _Drafting
    strong: _Drafting
    fixed: _Drafting
    treegraft: _Drafting
    hf_prompt_lookup: _Method | None
    hf_assisted: _Method | None


class _OverBest(Strict):
    mean: Finite
    max: Finite
    min: Finite
    # The benchmarks are the extra keys; pydantic checks each of them against this annotation.
    __pydantic_extra__: dict[str, _OverBestBench]


class _Headroom(Strict):
    over_best_single: Finite | None
    captured: Finite | None


class _Oracle(_Headroom):
    benches: dict[str, _Headroom]


class _Prediction(Strict):
    bench: Name
    method: Name
    predicted_speedup: Finite | None
    measured_speedup: Finite


class _Replay(Strict):
    predicted_speedup: Finite | None
    measured_speedup: Finite
    cells: list[_Prediction]
    speedup: dict[str, Finite | None]


class _Identity(Strict):
    dtype: Name
    compared_tokens: Count
    divergences: Count
    max_logit_gap: NotNegative | None


class _Said(_Ratio):
    text: Name
    verdict: Name


class _Headline(_Said):
    over_best_single: _Said


class _PromptSums(Strict):
    """One method's sums, a number a prompt."""

    tokens: list[Count]
    seconds: list[Positive]
    steps: list[Count | None]


class _ByPrompt(Strict):
    prompts: Annotated[list[Name], Field(min_length=1)]
    methods: dict[str, _PromptSums]

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        for method, sums in self.methods.items():
            if {len(sums.tokens), len(sums.seconds), len(sums.steps)} != {len(self.prompts)}:
                raise ValueError(f"{method} does not have one number for each of {len(self.prompts)} prompts")
        return self


class _Measured(Strict):
    """What was measured at one temperature."""

    temperature: NotNegative
    headline: _Headline
    benchmarks: Annotated[dict[str, _Bench], Field(min_length=1)]
    overall: _Bench
    overall_over_best_single: _OverBestBench
    over_best_single: _OverBest
    identity: _Identity
    by_prompt: dict[str, _ByPrompt]

    @model_validator(mode="after")
    def _same_benchmarks(self) -> Self:
        for name, found in (
            ("over_best_single", self.over_best_single.__pydantic_extra__),
            ("by_prompt", self.by_prompt),
        ):
            if differing := set(self.benchmarks) ^ set(found):
                raise ValueError(f"only one of benchmarks and {name} has {', '.join(sorted(differing))}")
        return self


class _Report(_Measured):
    """The keys of the first temperature stand at the top, those of the others in other_temperatures."""

    schema_: Schema = Field(alias="schema")
    pair: Name
    device: dict[str, Any] | Name
    hardware: dict[str, Any]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    created: Name
    warnings: list[Name]
    other_temperatures: list[_Measured]
    oracle: _Oracle
    replay: _Replay
    steps: list[RecordedPrompt]
    """Single steps of TreeGraft's decoding, drawn in report.html; empty where none was recorded."""


def check_report(report: dict[str, Any]) -> None:
    """ValueError with every problem if `report` lacks a key, is null where it may not be, or is not strict JSON."""
    problems = [f"{path} is {value}" for path, value in _not_finite(report, "")]
    try:
        _Report.model_validate(report)
    except ValidationError as error:
        problems += [
            f"{'.'.join(map(str, problem['loc'])) or 'report'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
    try:
        json.dumps(report, allow_nan=True)
    except TypeError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("not a report: " + "; ".join(problems))


def _not_finite(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Path and value of each NaN or infinity, in extra keys too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _not_finite(inner, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value
