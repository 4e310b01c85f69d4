"""From measured runs to the report: pure functions, no files.

`build_report` turns the rows of runs.jsonl, summary.json and distill.json into the dictionary that becomes report.json;
`pipeline.report_schema.check_report` has the last word on it.

Counting. A token is a token that was emitted. A step is one forward of the target that emits; its tokens are the
accepted draft tokens and the one bonus token, so tokens per step of plain decoding is 1. Sums are divided once, at the
end: the speed-up of a method is (its tokens / its seconds) / (plain's tokens / plain's seconds), no mean of ratios.

Intervals are 95% percentile bootstrap intervals over prompts. They are paired: a drawn prompt brings all its turns and
repeats of every method. Fewer than FEWEST_FOR_INTERVAL prompts have no interval (null).

Temperatures. All of the above is made for each temperature alone. The first of evaluate.temperatures has the report's
own keys, the others stand in `other_temperatures` under the same names.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.bootstrap import FEWEST_FOR_INTERVAL, Sums, draw_prompts, drawn_ratios, percentile_interval
from pipeline.headline import doubts, headline
from pipeline.measurements import (
    DRAFTING_METHODS,
    METHODS,
    OWN_METHODS,
    SINGLE_METHODS,
    TIME_PARTS,
    ReplayRates,
    Run,
    Summary,
    TimeSplit,
)
from pipeline.recorded_steps import RecordedPrompt
from pipeline.report_schema import SCHEMA, check_report
from treegraft.errors import UserError

# ---------------------------------------------------------------------------------------------------------- aggregation


def group_runs(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """Runs by benchmark (in order of name) and method.

    UserError if a run is there twice, if a method of this project is missing from a benchmark, or if a method lacks a
    prompt, turn or repeat that plain has: rates over different prompts must not be compared.
    """
    if not runs:
        raise UserError("runs.jsonl holds no run: run evaluate again")
    groups: dict[str, dict[str, list[Run]]] = {}
    seen = set()
    for run in runs:
        if (run.method, run.bench, run.key) in seen:
            raise UserError(
                f"runs.jsonl holds prompt {run.prompt_id}, turn {run.turn}, repeat {run.repeat} twice for "
                f"{run.method}: delete the evaluation's folder and run evaluate again"
            )
        seen.add((run.method, run.bench, run.key))
        groups.setdefault(run.bench, {}).setdefault(run.method, []).append(run)
    for bench, methods in groups.items():
        for method in OWN_METHODS:
            if method not in methods:
                raise UserError(f"runs.jsonl has no run of {method} on {bench}: run evaluate again")
        expected = {run.key for run in methods["plain"]}
        for method, rows in methods.items():
            differing = expected ^ {run.key for run in rows}
            if differing:
                prompt, turn, repeat = min(differing)
                raise UserError(
                    f"runs.jsonl has prompt {prompt}, turn {turn}, repeat {repeat} of {bench} for only one of "
                    f"plain and {method}: run evaluate again"
                )
        for method in OWN_METHODS:
            if not sum(run.tokens for run in methods[method]):
                raise UserError(f"{method} emitted no token on {bench}: look at its prompts, then run evaluate again")
    return dict(sorted(groups.items()))


def sum_by_prompt(rows: Iterable[Run], prompts: Sequence[str]) -> Sums:
    """Sums of one method's rows, one entry per prompt in the order of `prompts`."""
    place = {prompt: index for index, prompt in enumerate(prompts)}
    tokens, seconds = np.zeros(len(prompts)), np.zeros(len(prompts))
    # In the order of the key, so that the sums do not depend on the shuffled order in which methods were run.
    for run in sorted(rows, key=lambda run: run.key):
        tokens[place[run.prompt_id]] += run.tokens
        seconds[place[run.prompt_id]] += run.seconds
    return Sums(tokens, seconds)


def summarise(rows: Sequence[Run], sums: Sums, plain: Sums, draws: np.ndarray | None) -> dict[str, Any]:
    """One method on one benchmark, with the keys of benchmarks.<bench>.<method>.

    acceptance_by_depth[d] is the share of steps that accepted more than d draft tokens; time_split_ms are sums.
    """
    tokens = sum(run.tokens for run in rows)
    seconds = math.fsum(run.seconds for run in rows)
    steps = _total(run.steps for run in rows)
    strong_calls = _total(run.strong_calls for run in rows)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "speedup": {"mean": sums.rate / plain.rate, **_interval(drawn_ratios(sums, plain, draws), len(sums.tokens))},
        "tokens_per_step": _share(tokens, steps),
        "steps": steps,
        "strong_calls_per_step": _share(strong_calls, steps),
        "acceptance_by_depth": _acceptance([run.accepted_by_depth for run in rows], steps),
        "time_split_ms": _time_split([run.time_ms for run in rows]),
        "calls_per_step": _calls_per_step([run.calls for run in rows], steps),
        "divergences": sum(run.divergence is not None for run in rows),
    }


def _interval(ratios: np.ndarray | None, prompts: int) -> dict[str, float | None]:
    """{low, high} of a ratio's draws; null where it rests on too few prompts."""
    return percentile_interval(ratios if prompts >= FEWEST_FOR_INTERVAL else None)


def _total(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _share(count: int | None, steps: int | None) -> float | None:
    return None if count is None or not steps else count / steps


def _acceptance(counts: Sequence[list[int] | None], steps: int | None) -> list[float] | None:
    known = [row for row in counts if row is not None]
    if len(known) < len(counts) or not steps:
        return None
    depth = max(len(row) for row in known)
    return [sum(row[level] for row in known if level < len(row)) / steps for level in range(depth)]


def _calls_per_step(calls: Sequence[list[int] | None], steps: int | None) -> list[float] | None:
    known = [row for row in calls if row is not None]
    if len(known) < len(calls) or not steps:
        return None
    drafters = max(len(row) for row in known)
    return [sum(row[index] for row in known if index < len(row)) / steps for index in range(drafters)]


def _time_split(splits: Sequence[TimeSplit | None]) -> dict[str, float] | None:
    known = [split for split in splits if split is not None]
    if len(known) < len(splits):
        return None
    return {part: math.fsum(getattr(split, part) for split in known) for part in TIME_PARTS}


def _by_method(rows: Mapping[str, Sequence[Run]], sums: Mapping[str, Sums], draws: np.ndarray | None) -> dict[str, Any]:
    return {
        method: summarise(rows[method], sums[method], sums["plain"], draws) if method in rows else None
        for method in METHODS
    }


def build_report(
    pair: str,
    runs: Sequence[Run],
    summary: Summary,
    distill: Mapping[str, Any] | None,
    steps: Sequence[RecordedPrompt] = (),
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """The report of one pair as strict JSON data; the same input gives the same report.

    distill: metrics of the distill stage, or None. steps: to be drawn. resamples, seed: of the bootstrap.
    UserError for runs that cannot be compared (see `group_runs`).
    """
    by_temperature = {
        temperature: group_runs([run for run in runs if run.temperature == temperature])
        for temperature in summary.temperatures
    }
    if strange := {run.temperature for run in runs} - set(by_temperature):
        raise UserError(f"runs.jsonl has temperature {min(strange)}, which summary.json has not: run evaluate again")
    first, *others = (
        {"temperature": temperature, **_measured(temperature, groups, summary.dtype, resamples, seed)}
        for temperature, groups in by_temperature.items()
    )
    groups = by_temperature[first["temperature"]]
    rates = summary.replay or ReplayRates()
    modelled_plain = 1000 * (rates.tokens_per_ms.get("plain") or 0.0)
    report = {
        "schema": SCHEMA,
        "pair": pair,
        "device": summary.device,
        "settings": summary.settings,
        "created": summary.ended,  # of the measurement, not of this file: equal inputs give equal bytes
        "warnings": doubts(
            pair,
            summary.provenance.get("code_changed") or [],
            modelled_plain,
            first["overall"]["plain"]["tokens_per_s"],
            sum(run.fallbacks or 0 for run in runs if run.method == "treegraft"),
        ),
        **first,
        "other_temperatures": others,
        "oracle": _oracle(summary.replay),
        "replay": _replay(rates, first["benchmarks"], first["overall"]),
        "calibration": [
            bin_.model_dump(include={"predicted", "observed", "count"}) for bin_ in summary.calibration or []
        ],
        "baselines": {
            "best_single": {bench: first["over_best_single"][bench]["best"] for bench in groups},
            "schedulers": _schedulers(distill),
        },
        "steps": [prompt.model_dump() for prompt in steps],
        "hardware": _hardware(summary),
        "prompts": {
            bench: {
                "prompts": len(_prompts(methods["plain"])),
                "turns": len({(run.prompt_id, run.turn) for run in methods["plain"]}),
                "repeats": len({run.repeat for run in methods["plain"]}),
            }
            for bench, methods in groups.items()
        },
        "provenance": {
            **summary.provenance,
            "started": summary.started,
            "ended": summary.ended,
            "command": f"dvc repro, or pipeline all {pair}",
            "bootstrap": {"resamples": resamples, "seed": seed, "unit": "prompt"},
        },
    }
    check_report(report)
    return report


def _measured(
    temperature: float, groups: Mapping[str, Mapping[str, Sequence[Run]]], dtype: str, resamples: int, seed: int
) -> dict[str, Any]:
    """Everything that the runs of one temperature show."""
    benchmarks, over_best, over_best_mean = _by_bench(groups, resamples, seed)
    overall, over_best_all = _over_all(groups, resamples, seed)
    if temperature > 0:
        # transformers draws its own random numbers, so its text may be another without being wrong.
        for cells in (*benchmarks.values(), overall):
            for method in set(METHODS) - set(OWN_METHODS):
                if cells[method]:
                    cells[method]["divergences"] = None
    ratios = [entry["ratio"] for entry in over_best.values()]
    return {
        "headline": headline(temperature, overall["treegraft"]["speedup"], over_best_mean, over_best, over_best_all),
        "benchmarks": benchmarks,
        "overall": overall,
        "overall_over_best_single": over_best_all,
        "over_best_single": {**over_best, "mean": over_best_mean["ratio"], "max": max(ratios), "min": min(ratios)},
        "identity": _identity(groups, dtype)
        | {"by_method": {method: overall[method]["divergences"] for method in METHODS if overall[method]}},
        "by_prompt": {bench: _by_prompt(methods) for bench, methods in groups.items()},
    }


def _identity(groups: Mapping[str, Mapping[str, Sequence[Run]]], dtype: str) -> dict[str, Any]:
    """How far the texts of this project's methods equal those that plain decoding has of the same seeds."""
    drafted = [run for methods in groups.values() for method in DRAFTING_METHODS for run in methods[method]]
    apart = [run.divergence for run in drafted if run.divergence is not None]
    return {
        "dtype": dtype,
        "compared_tokens": sum(run.tokens for run in drafted),
        "divergences": len(apart),
        "max_logit_gap": max((place.logit_gap for place in apart if place.logit_gap is not None), default=0.0),
    }


def _by_prompt(methods: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Sums of each prompt, from which a later report can be held against this one prompt by prompt."""
    prompts = _prompts(methods["plain"])
    found: dict[str, Any] = {}
    for method, rows in methods.items():
        sums = sum_by_prompt(rows, prompts)
        steps: dict[str, list[int | None]] = {prompt: [] for prompt in prompts}
        for run in rows:
            steps[run.prompt_id].append(run.steps)
        found[method] = {
            "tokens": sums.tokens.astype(int).tolist(),
            "seconds": sums.taken.tolist(),
            "steps": [_total(counts) for counts in steps.values()],
        }
    return {"prompts": prompts, "methods": dict(sorted(found.items()))}


def _prompts(rows: Iterable[Run]) -> list[str]:
    return sorted({run.prompt_id for run in rows})


def _by_bench(
    groups: Mapping[str, Mapping[str, Sequence[Run]]], resamples: int, seed: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Results by benchmark and method; treegraft over the better single drafter by benchmark; and that on average."""
    benchmarks: dict[str, Any] = {}
    over_best: dict[str, Any] = {}
    drawn: list[np.ndarray] = []
    counted = 0
    for bench, rows in groups.items():
        prompts = _prompts(rows["plain"])
        sums = {method: sum_by_prompt(rows[method], prompts) for method in rows}
        draws = draw_prompts(len(prompts), resamples, seed, bench)
        benchmarks[bench] = _by_method(rows, sums, draws)
        over_best[bench], ratios = _over_best_single(sums, draws)
        drawn += [] if ratios is None else [ratios]
        counted += len(prompts)
    # Their mean may have an interval where none of them has: it rests on the prompts of all.
    mean_drawn = np.stack(drawn).mean(axis=0) if len(drawn) == len(groups) else None
    mean = math.fsum(entry["ratio"] for entry in over_best.values()) / len(over_best)
    return benchmarks, over_best, {"ratio": mean, **_interval(mean_drawn, counted)}


def _over_best_single(sums: Mapping[str, Sums], draws: np.ndarray | None) -> tuple[dict[str, Any], np.ndarray | None]:
    """treegraft over the better single drafter on the same prompts, and that ratio in every draw.

    Which drafter is the better one is settled once, by its rate over all the prompts.
    """
    best = max(SINGLE_METHODS, key=lambda method: sums[method].rate)
    ratios = drawn_ratios(sums["treegraft"], sums[best], draws)
    ratio = sums["treegraft"].rate / sums[best].rate
    return {"ratio": ratio, **_interval(ratios, len(sums[best].tokens)), "best": best}, ratios


def _over_all(
    groups: Mapping[str, Mapping[str, Sequence[Run]]], resamples: int, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Over the prompts of all benchmarks together: results by method (null for those that some benchmark lacks), and
    treegraft over the single drafter that is the better one there."""
    rows = {
        method: [run for methods in groups.values() for run in methods[method]]
        for method in METHODS
        if all(method in methods for methods in groups.values())
    }
    prompts = _prompts(rows["plain"])
    sums = {method: sum_by_prompt(rows[method], prompts) for method in rows}
    draws = draw_prompts(len(prompts), resamples, seed, "")
    return _by_method(rows, sums, draws), _over_best_single(sums, draws)[0]


# --------------------------------------------------------------------------------------------------------------- replay


def _divide(number: float | None, by: float | None) -> float | None:
    return None if number is None or not by else number / by


def _replay(rates: ReplayRates, benchmarks: Mapping[str, Any], overall: Mapping[str, Any]) -> dict[str, Any]:
    """What replay on the tables predicts beside what the clock measured: treegraft overall, and every cell."""

    def cells(name: str, modelled: Mapping[str, float | None], measured: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for method in DRAFTING_METHODS:
            yield {
                "bench": name,
                "method": method,
                "predicted_speedup": _divide(modelled.get(method), modelled.get("plain")),
                "measured_speedup": measured[method]["speedup"]["mean"],
            }

    return {
        "predicted_speedup": _divide(rates.tokens_per_ms.get("treegraft"), rates.tokens_per_ms.get("plain")),
        "measured_speedup": overall["treegraft"]["speedup"]["mean"],
        "cells": [
            cell
            for bench, measured in benchmarks.items()
            for cell in cells(bench, rates.benches.get(bench, {}), measured)
        ],
        "speedup": {
            method: _divide(rate, rates.tokens_per_ms.get("plain")) for method, rate in rates.tokens_per_ms.items()
        },
    }


def headroom(rates: Mapping[str, float | None]) -> dict[str, float | None]:
    """The oracle's speed over the better single drafter, and the share of that headroom which treegraft captured.

    The share is null where the oracle is no faster than that drafter, and below 0 where treegraft is slower than it.
    """
    single = [rate for rate in (rates.get(method) for method in SINGLE_METHODS) if rate is not None]
    best = max(single) if len(single) == len(SINGLE_METHODS) else None
    oracle, ours = rates.get("oracle"), rates.get("treegraft")
    captured = None
    if best is not None and oracle is not None and ours is not None and oracle > best:
        captured = (ours - best) / (oracle - best)
    return {"over_best_single": _divide(oracle, best), "captured": captured}


def _oracle(rates: ReplayRates | None) -> dict[str, Any]:
    rates = rates or ReplayRates()
    return {**headroom(rates.tokens_per_ms), "benches": {bench: headroom(row) for bench, row in rates.benches.items()}}


def _schedulers(distill: Mapping[str, Any] | None) -> dict[str, Any]:
    """Replayed tokens/ms of each scheduler on validation and test prompts, as the distill stage compared them."""
    replayed = (distill or {}).get("replay", {})
    splits = {split: replayed.get(split) or {} for split in ("validation", "test")}
    names = list(dict.fromkeys(name for rates in splits.values() for name in rates))
    return {name: {split: rates.get(name) for split, rates in splits.items()} for name in names}


def _hardware(summary: Summary) -> dict[str, Any]:
    device = summary.device if isinstance(summary.device, dict) else {"name": summary.device}
    return {**device, "dtype": summary.dtype}
