"""What a report must hold: every key of the report format, with null only where something was not measured."""

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.measurements import Count, Finite, Identity, Name, NotNegative, Positive, Strict, TimeSplit
from pipeline.recorded_steps import RecordedPrompt

SCHEMA = "treegraft-report/1"


class _Interval(Strict):
    mean: Finite
    low: Finite | None
    high: Finite | None


class _Ratio(Strict):
    ratio: Finite
    low: Finite | None
    high: Finite | None


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
    __pydantic_extra__: dict[str, _Ratio]


class _Oracle(Strict):
    over_best_single: Finite | None
    captured: Finite | None


class _Replay(Strict):
    predicted_speedup: Finite | None
    measured_speedup: Finite


class _Report(Strict):
    schema_: Name = Field(alias="schema")
    pair: Name
    device: dict[str, Any] | Name
    settings: dict[str, Any]
    created: Name
    benchmarks: Annotated[dict[str, _Bench], Field(min_length=1)]
    over_best_single: _OverBest
    oracle: _Oracle
    replay: _Replay
    identity: Identity
    steps: list[RecordedPrompt]
    """Single steps of TreeGraft's decoding, drawn in report.html; empty where none was recorded."""

    @model_validator(mode="after")
    def _same_benchmarks(self) -> Self:
        differing = set(self.benchmarks) ^ set(self.over_best_single.__pydantic_extra__)
        if differing:
            raise ValueError(f"only one of benchmarks and over_best_single has {', '.join(sorted(differing))}")
        return self


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
