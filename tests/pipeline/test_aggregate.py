"""Identities of the aggregation: equal rows, scaled clocks, paired resamples; and a validator that lets none pass."""

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

from pipeline.aggregate import build_report, headroom
from pipeline.bootstrap import FEWEST_FOR_INTERVAL, Sums, draw_prompts, drawn_ratios, percentile_interval
from pipeline.headline import speed_phrase, verdict
from pipeline.measurements import DRAFTING_METHODS, METHODS, OWN_METHODS, parse_run, parse_summary
from pipeline.report_schema import check_report
from treegraft.errors import UserError

BENCHES = ("chat", "code", "maths")
# What each method is like: (ms per step, mean accepted tokens per step).
CHARACTER = {
    "plain": (40.0, 0.0),
    "ngram": (44.0, 0.5),
    "strong": (120.0, 1.9),
    "fixed": (70.0, 1.4),
    "treegraft": (60.0, 1.3),
    "hf_prompt_lookup": (47.0, 0.45),
    "hf_assisted": (130.0, 1.6),
}


def make_row(prompt: str, method: str, *, turn: int = 0, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of runs.jsonl of 60 tokens in 2 seconds and 30 steps, with `changes`."""
    row: dict[str, Any] = {
        "prompt_id": prompt,
        "turn": turn,
        "bench": prompt.split("/")[0],
        "method": method,
        "temperature": 0.0,
        "repeat": repeat,
        "prompt_tokens": 57,
        "tokens": 60,
        "seconds": 2.0,
        "steps": 30,
        "calls": [80, 40],
        "strong_calls": 40,
        "verified_nodes": 100,
        "accepted_by_depth": [20, 8, 2, 0],
        "time_ms": {"draft_light": 5.0, "draft_strong": 900.0, "verify": 1000.0, "scheduler": 5.0, "other": 90.0},
        "processed": {"target": 160, "drafter": 120},
        "finish": "length",
        "divergence": None,
    }
    return row | changes


def make_rows(
    seed: int = 0, benches: tuple[str, ...] = BENCHES, prompts: int = 6, hf: bool = False
) -> list[dict[str, Any]]:
    """Rows as evaluate writes them, in a shuffled order: speeds differ by method, benchmark and prompt."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for bench_index, bench in enumerate(benches):
        for prompt in range(prompts):
            ease = random.uniform(0.5, 1.5) * (0.7 + 0.4 * bench_index)
            for turn in range(1 + prompt % 2):
                methods = METHODS if hf else OWN_METHODS
                rows += [_random_row(random, f"{bench}/{prompt}", turn, method, ease) for method in methods]
    return [rows[index] for index in random.permutation(len(rows))]


def _random_row(random: np.random.Generator, prompt: str, turn: int, method: str, ease: float) -> dict[str, Any]:
    step_ms, mean = CHARACTER[method]
    reach = 0.0 if method == "plain" else min(0.9, mean * ease / 2.6)
    accepted: list[int] = []
    while sum(accepted) + len(accepted) < 64:
        length = 0
        while length < 4 and random.random() < reach * 0.93**length:
            length += 1
        accepted.append(length)
    steps, tokens = len(accepted), sum(accepted) + len(accepted)
    strong_share = {"strong": 4.0, "fixed": 2.0, "treegraft": 1.4}.get(method, 0.0)
    ms = steps * step_ms * random.uniform(0.95, 1.05)
    strong_ms = ms * strong_share * 18 / step_ms
    if method == "plain":
        ngram_ms, scheduler_ms = 0.0, 0.0
    else:
        ngram_ms, scheduler_ms = 0.4 * steps, (0.1 * steps if method == "treegraft" else 0.0)
    other_ms = 0.03 * ms
    changes: dict[str, Any] = {
        "tokens": tokens,
        "seconds": ms / 1000,
        "steps": steps,
        "calls": [round(steps * (4 - strong_share)), round(steps * strong_share)] if method != "plain" else [0, 0],
        "strong_calls": round(steps * strong_share),
        "accepted_by_depth": [sum(length > depth for length in accepted) for depth in range(4)],
        "time_ms": {
            "draft_light": ngram_ms,
            "draft_strong": strong_ms,
            "verify": ms - strong_ms - ngram_ms - scheduler_ms - other_ms,
            "scheduler": scheduler_ms,
            "other": other_ms,
        },
    }
    if method.startswith("hf"):
        changes |= dict.fromkeys(("steps", "calls", "strong_calls", "accepted_by_depth", "time_ms", "verified_nodes"))
    return make_row(prompt, method, turn=turn, **changes)


def make_summary(benches: tuple[str, ...] = BENCHES, **changes: Any) -> dict[str, Any]:
    """summary.json as evaluate writes it."""
    rates = {"plain": 0.025, "ngram": 0.034, "strong": 0.024, "fixed": 0.033, "treegraft": 0.039, "oracle": 0.046}
    summary: dict[str, Any] = {
        "device": {"name": "CPU", "threads": 2, "memory_gib": 7.7},
        "settings": {
            "decoding": {"depth": 4, "width": 4, "verified_sizes": [0, 1, 2, 4]},
            "evaluate": {"max_new_tokens": 64, "temperatures": [0.0]},
        },
        "dtype": "bfloat16",
        "temperatures": [0.0],
        "replay": {
            "tokens_per_ms": rates,
            "benches": {
                bench: {name: rate * (0.9 + 0.1 * index) for name, rate in rates.items()}
                for index, bench in enumerate(benches)
            },
        },
        "calibration": [
            {"predicted": 0.1 * index + 0.05, "observed": min(1.0, 0.09 * index + 0.08), "count": 900 - 80 * index}
            for index in range(10)
        ],
        "started": "2026-11-29T18:00:00Z",
        "ended": "2026-11-29T18:21:07Z",
        "provenance": {
            "git_revision": "0123abc",
            "dirty": False,
            "params_digest": "77aa",
            "versions": {"torch": "2.13.0"},
        },
    }
    return summary | changes


DISTILL = {
    "replay": {
        "validation": {"plain": 0.025, "ngram": 0.033, "student": 0.038, "linear": 0.036, "oracle": 0.045},
        "test": {"plain": 0.025, "ngram": 0.034, "student": 0.039, "linear": 0.037, "oracle": 0.046},
    }
}


def report_of(rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The report of `rows` with the synthetic summary and distillation."""
    runs = [parse_run(json.dumps(row), f"line {number}") for number, row in enumerate(rows, 1)]
    summary = parse_summary(make_summary(tuple(sorted({run.bench for run in runs}))), "summary.json")
    return build_report("toy", runs, summary, DISTILL, **({"resamples": 200} | options))


def equal_rows(prompts: int = 5, **changes: Any) -> list[dict[str, Any]]:
    """Every method has the very same runs."""
    return [
        make_row(f"code/{prompt}", method, tokens=60 + prompt, seconds=2.0 + 0.37 * prompt, **changes)
        for prompt in range(prompts)
        for method in OWN_METHODS
    ]


# ----------------------------------------------------------------------------------------------------------- identities


def test_a_method_that_equals_plain_has_speedup_exactly_one() -> None:
    report = report_of(equal_rows(), resamples=500)
    for method in OWN_METHODS:
        assert report["benchmarks"]["code"][method]["speedup"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert report["over_best_single"]["code"] == {"ratio": 1.0, "low": 1.0, "high": 1.0, "best": "ngram"}
    assert {report["over_best_single"][key] for key in ("mean", "max", "min")} == {1.0}


def test_doubling_the_seconds_of_a_method_halves_its_speedup_and_interval() -> None:
    rows = make_rows()
    slower = [row | {"seconds": row["seconds"] * 2} if row["method"] == "treegraft" else row for row in rows]
    before, after = report_of(rows), report_of(slower)
    for bench in BENCHES:
        for method in OWN_METHODS:
            factor = 0.5 if method == "treegraft" else 1.0
            for key in ("mean", "low", "high"):
                expected = before["benchmarks"][bench][method]["speedup"][key] * factor
                assert after["benchmarks"][bench][method]["speedup"][key] == pytest.approx(expected, rel=1e-12)
        assert after["over_best_single"][bench]["ratio"] == pytest.approx(
            before["over_best_single"][bench]["ratio"] / 2
        )


def test_the_clock_of_the_machine_cancels() -> None:
    rows = make_rows()
    halved = [row | {"seconds": row["seconds"] / 2} for row in rows]
    assert report_of(rows)["over_best_single"] == report_of(halved)["over_best_single"]


def test_speedup_is_a_ratio_of_sums() -> None:
    rows = [make_row("code/0", method, tokens=10, seconds=1.0) for method in OWN_METHODS] + [
        make_row("code/1", method, tokens=30, seconds=1.0 if method == "treegraft" else 9.0) for method in OWN_METHODS
    ]
    # 40 tokens in 2 s against 40 tokens in 10 s, whatever the mean of 1 and 9 is.
    assert report_of(rows)["benchmarks"]["code"]["treegraft"]["speedup"]["mean"] == pytest.approx(5.0)


def test_one_slow_prompt_widens_the_interval() -> None:
    def width(rows: list[dict[str, Any]]) -> float:
        speedup = report_of(rows)["benchmarks"]["code"]["treegraft"]["speedup"]
        return float(speedup["high"] - speedup["low"])

    rows = equal_rows(8)
    slow = copy.deepcopy(rows)
    next(row for row in slow if row["method"] == "treegraft")["seconds"] *= 5
    assert width(rows) == 0.0
    assert width(slow) > 0.1


def test_turns_and_repeats_of_a_prompt_are_drawn_together() -> None:
    """Splitting each prompt's run into turns and repeats of the same total changes nothing."""
    whole = [
        make_row(f"code/{prompt}", method, tokens=64, seconds=float(1 + prompt + len(method) * (prompt % 3)))
        for prompt in range(5)
        for method in OWN_METHODS
    ]
    parts = [
        row | {"turn": turn, "repeat": repeat, "tokens": 16, "seconds": row["seconds"] / 4}
        for row in whole
        for turn in range(2)
        for repeat in range(2)
    ]
    expected, actual = report_of(whole), report_of(parts)
    for method in OWN_METHODS:
        assert actual["benchmarks"]["code"][method]["speedup"] == expected["benchmarks"]["code"][method]["speedup"]
    assert actual["prompts"]["code"] == {"prompts": 5, "turns": 10, "repeats": 2}


def test_intervals_are_paired() -> None:
    """Prompts of very unequal speed, but every method a constant factor of plain: no uncertainty about the factor."""
    rows = [
        make_row(f"code/{prompt}", method, seconds=10.0**prompt * (0.5 if method == "treegraft" else 1.0))
        for prompt in range(5)
        for method in OWN_METHODS
    ]
    speedup = report_of(rows)["benchmarks"]["code"]["treegraft"]["speedup"]
    assert speedup == {"mean": 2.0, "low": 2.0, "high": 2.0}


@pytest.mark.parametrize("prompts", [2, 3, 10])
def test_draws_spread_as_much_as_the_mean_of_the_prompts_does(prompts: int) -> None:
    tokens = np.random.default_rng(prompts).uniform(1, 9, prompts)
    draws = draw_prompts(prompts, 50_000, 0, "code")
    assert draws is not None
    means = Sums(tokens, np.ones(prompts)).drawn_rates(draws)
    assert means.mean() == pytest.approx(tokens.mean(), rel=0.01)
    assert means.var() == pytest.approx(tokens.var(ddof=1) / prompts, rel=0.05)


def test_few_prompts_a_benchmark_have_an_interval_together_only() -> None:
    rows = make_rows(prompts=FEWEST_FOR_INTERVAL - 2)
    assert len(BENCHES) > 1
    report = report_of(rows)
    for bench in BENCHES:
        for result in (report["benchmarks"][bench]["treegraft"]["speedup"], report["over_best_single"][bench]):
            assert result["low"] is result["high"] is None
    for result in (report["headline"], report["headline"]["over_best_single"], report["overall_over_best_single"]):
        assert result["low"] < result["ratio"] < result["high"]
    alone = report_of([row for row in rows if row["bench"] == BENCHES[0]])
    assert alone["headline"]["verdict"] == alone["headline"]["over_best_single"]["verdict"] == "unknown"


@pytest.mark.parametrize("prompts", [1, FEWEST_FOR_INTERVAL - 1])
def test_fewer_prompts_have_no_interval(prompts: int) -> None:
    report = report_of(equal_rows(prompts))
    assert report["benchmarks"]["code"]["fixed"]["speedup"] == {"mean": 1.0, "low": None, "high": None}
    assert report["headline"]["verdict"] == report["headline"]["over_best_single"]["verdict"] == "unknown"
    assert "no interval" in report["headline"]["text"]


def test_order_of_rows_does_not_matter_and_the_seed_does() -> None:
    rows = make_rows()
    report = report_of(rows)
    assert report_of(rows[::-1]) == report
    assert report_of(rows, seed=1)["headline"]["low"] != report["headline"]["low"]


def test_another_benchmark_leaves_intervals_alone() -> None:
    rows = make_rows()
    fewer = [row for row in rows if row["bench"] != "chat"]
    assert report_of(fewer)["benchmarks"]["maths"] == report_of(rows)["benchmarks"]["maths"]


def test_vectorised_bootstrap_equals_a_loop() -> None:
    random = np.random.default_rng(3)
    method, base = (Sums(random.integers(20, 64, 7).astype(float), random.uniform(1, 3, 7)) for _ in range(2))
    draws = draw_prompts(7, 50, 5, "code")
    ratios = drawn_ratios(method, base, draws)
    assert draws is not None
    assert ratios is not None
    for counts, ratio in zip(draws, ratios, strict=True):
        drawn = np.repeat(np.arange(7), counts)
        assert len(drawn) == 7 - 1
        rates = [part.tokens[drawn].sum() / part.taken[drawn].sum() for part in (method, base)]
        assert ratio == pytest.approx(rates[0] / rates[1])


def test_resamples_in_which_plain_emits_nothing_are_left_out() -> None:
    base = Sums(np.array([0.0, 4.0]), np.array([1.0, 1.0]))
    method = Sums(np.array([4.0, 4.0]), np.array([1.0, 1.0]))
    ratios = drawn_ratios(method, base, np.array([[2, 0], [1, 1], [0, 2]]))
    assert percentile_interval(ratios)["high"] == pytest.approx(1.975)  # of 2 and 1, linearly
    assert percentile_interval(drawn_ratios(method, base, np.array([[2, 0]]))) == {"low": None, "high": None}


# --------------------------------------------------------------------------------------------------------- temperatures


def hotter(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same runs at temperature 1."""
    return [row | {"temperature": 1.0} for row in rows]


def report_at(rows: list[dict[str, Any]], temperatures: list[float]) -> dict[str, Any]:
    runs = [parse_run(json.dumps(row), "line") for row in rows]
    summary = parse_summary(make_summary(temperatures=temperatures), "summary.json")
    return build_report("toy", runs, summary, DISTILL, resamples=200)


def test_each_temperature_is_as_if_it_were_alone() -> None:
    greedy, sampled = make_rows(0), hotter(make_rows(1))
    both = report_at([*sampled, *greedy], [0.0, 1.0])
    alone = {0.0: report_at(greedy, [0.0]), 1.0: report_at(sampled, [1.0])}
    (other,) = both["other_temperatures"]
    for part in (both, other):
        for key in ("headline", "benchmarks", "overall", "over_best_single", "identity", "by_prompt"):
            assert part[key] == alone[part["temperature"]][key], key
    assert (both["temperature"], other["temperature"]) == (0.0, 1.0)
    assert both["headline"]["text"].startswith("At temperature 0 ")
    assert other["headline"]["text"].startswith("At temperature 1 ")


def test_runs_of_a_temperature_that_is_missing_or_strange_are_refused() -> None:
    rows = make_rows()
    with pytest.raises(UserError, match=r"temperature 1\.0, which summary\.json has not"):
        report_at([*rows, *hotter(rows)], [0.0])
    with pytest.raises(UserError, match="holds no run"):
        report_at(rows, [0.0, 1.0])


def test_divergences_are_counted_where_texts_should_be_equal() -> None:
    place = {"token": 3, "logit_gap": 0.25}
    rows = [
        row | {"divergence": place if row["method"] in ("fixed", "hf_assisted") else None} for row in make_rows(hf=True)
    ]
    fixed = [row for row in rows if row["method"] == "fixed"]
    for temperature, foreign in ((0.0, len(fixed)), (1.0, None)):
        own = [row | {"temperature": temperature} for row in rows]
        identity = report_at(own, [temperature])["identity"]
        assert identity["divergences"] == identity["by_method"]["fixed"] == len(fixed)
        assert identity["by_method"]["treegraft"] == 0
        assert identity["by_method"]["hf_assisted"] == foreign, "transformers draws its own numbers"
        assert identity["max_logit_gap"] == 0.25
        drafted = [row["tokens"] for row in rows if row["method"] in DRAFTING_METHODS]
        assert identity["compared_tokens"] == sum(drafted)


# ---------------------------------------------------------------------------------------------- a scheduler for nothing


def test_a_useless_scheduler_is_said_to_be_useless_in_the_first_sentence() -> None:
    """It calls in every layer: the strong drafter's steps at more than the strong drafter's time."""
    rows = make_rows()
    strong = {(row["prompt_id"], row["turn"]): row for row in rows if row["method"] == "strong"}
    rows = [
        strong[row["prompt_id"], row["turn"]]
        | {"method": "treegraft", "seconds": 1.01 * strong[row["prompt_id"], row["turn"]]["seconds"]}
        if row["method"] == "treegraft"
        else row
        for row in rows
    ]
    report = report_of(rows)
    for bench in BENCHES:
        entry = report["over_best_single"][bench]
        speeds = {method: report["benchmarks"][bench][method]["tokens_per_s"] for method in ("ngram", "strong")}
        assert entry["ratio"] <= 1 / 1.01 + 1e-12
        assert entry["best"] == max(speeds, key=speeds.__getitem__)
    headline = report["headline"]
    assert headline["over_best_single"]["verdict"] == "slower"
    assert "slower than the better single drafter alone" in headline["text"]
    assert "is slower than the better single drafter" in headline["over_best_single"]["text"]
    assert "slower than the better" not in report_of(equal_rows())["headline"]["text"]


def test_a_random_scheduler_is_never_called_faster() -> None:
    """It plays one of the two single drafters by lot, turn by turn, and pays for deciding."""
    for seed in range(5):
        random, rows = np.random.default_rng(seed), make_rows(seed)
        runs = {(row["prompt_id"], row["turn"], row["method"]): row for row in rows}
        lots = [
            runs[row["prompt_id"], row["turn"], str(random.choice(["ngram", "strong"]))] | {"method": "treegraft"}
            for row in rows
            if row["method"] == "treegraft"
        ]
        lots = [row | {"seconds": 1.1 * row["seconds"]} for row in lots]
        headline = report_of([*(row for row in rows if row["method"] != "treegraft"), *lots])["headline"]
        assert headline["over_best_single"]["ratio"] < 1
        assert headline["over_best_single"]["verdict"] != "faster"


# ----------------------------------------------------------------------------------------------------------- provenance


def test_code_that_changed_while_evaluate_ran_is_a_warning() -> None:
    assert report_of(make_rows())["warnings"] == []
    summary = make_summary()
    summary["provenance"] |= {"code_changed": ["pipeline/methods.py"]}
    runs = [parse_run(json.dumps(row), "line") for row in make_rows()]
    report = build_report("toy", runs, parse_summary(summary, "summary.json"), DISTILL, resamples=50)
    (warning,) = report["warnings"]
    assert "pipeline/methods.py" in warning
    assert "run `pipeline evaluate toy` again" in warning


@pytest.mark.parametrize(("slowed", "doubtful"), [(0.5, True), (0.9, False), (1.1, False), (2.0, True)])
def test_a_clock_that_disagrees_with_the_profile_is_a_warning(slowed: float, doubtful: bool) -> None:
    rows = make_rows()
    plain = [row for row in rows if row["method"] == "plain"]
    by_clock = sum(row["tokens"] for row in plain) / sum(row["seconds"] for row in plain)
    summary = make_summary()
    summary["replay"]["tokens_per_ms"]["plain"] = by_clock * slowed / 1000
    runs = [parse_run(json.dumps(row), "line") for row in rows]
    warnings = build_report("toy", runs, parse_summary(summary, "summary.json"), DISTILL, resamples=50)["warnings"]
    assert len(warnings) == doubtful
    assert all(f"{by_clock:.3g} tokens a second" in warning for warning in warnings)
    assert all("run `pipeline all toy`" in warning and "-s profile@toy`" in warning for warning in warnings)


def test_decisions_left_to_the_fallback_are_a_warning() -> None:
    rows = make_rows()
    runs = [parse_run(json.dumps(row | {"fallbacks": 2 * (row["method"] == "treegraft")}), "line") for row in rows]
    report = build_report("toy", runs, parse_summary(make_summary(), "summary.json"), DISTILL, resamples=50)
    count = 2 * sum(row["method"] == "treegraft" for row in rows)
    assert any(text.startswith(f"In {count} decisions the scheduler's margins") for text in report["warnings"])


def test_sums_of_prompts_add_up_to_the_figures() -> None:
    report = report_of(make_rows(hf=True))
    for bench in BENCHES:
        by_prompt = report["by_prompt"][bench]
        assert set(by_prompt["prompts"]) == {f"{bench}/{number}" for number in range(6)}
        for method in METHODS:
            cell, sums = report["benchmarks"][bench][method], by_prompt["methods"][method]
            assert sum(sums["tokens"]) == cell["tokens"]
            assert sum(sums["seconds"]) == pytest.approx(cell["seconds"])
            assert (None if None in sums["steps"] else sum(sums["steps"])) == cell["steps"]


# ------------------------------------------------------------------------------------------------------- what is summed


def test_sums_and_shares_of_a_cell() -> None:
    cell = report_of(make_rows())["benchmarks"]["maths"]["treegraft"]
    rows = [row for row in make_rows() if row["bench"] == "maths" and row["method"] == "treegraft"]
    assert cell["tokens"] == sum(row["tokens"] for row in rows)
    assert cell["tokens_per_s"] == pytest.approx(cell["tokens"] / cell["seconds"])
    # Accepted draft tokens and one bonus token a step are all the tokens there are.
    assert 1 + sum(cell["acceptance_by_depth"]) == pytest.approx(cell["tokens_per_step"])
    assert sum(cell["time_split_ms"].values()) == pytest.approx(1000 * cell["seconds"])
    assert cell["acceptance_by_depth"] == sorted(cell["acceptance_by_depth"], reverse=True)


def test_overall_sums_the_benchmarks() -> None:
    report = report_of(make_rows(hf=True))
    for method in METHODS:
        for key in ("tokens", "seconds"):
            parts = [report["benchmarks"][bench][method][key] for bench in BENCHES]
            assert report["overall"][method][key] == pytest.approx(sum(parts))
    assert report["overall"]["plain"]["tokens_per_step"] == 1.0


def test_better_single_drafter_is_chosen_per_benchmark() -> None:
    rows = []
    for bench, faster in (("code", "ngram"), ("chat", "strong")):
        for prompt in range(3):
            for method in OWN_METHODS:
                seconds = {faster: 1.0, "treegraft": 0.5 if bench == "code" else 2.0}.get(method, 4.0)
                rows.append(make_row(f"{bench}/{prompt}", method, seconds=seconds))
    over = report_of(rows)["over_best_single"]
    assert (over["code"]["best"], over["chat"]["best"]) == ("ngram", "strong")
    assert (over["code"]["ratio"], over["chat"]["ratio"]) == (2.0, 0.5)
    assert (over["mean"], over["max"], over["min"]) == (1.25, 2.0, 0.5)


def test_one_drafter_for_all_prompts_is_chosen_by_their_sums() -> None:
    """Strong takes 8 seconds for a prompt of each kind, n-grams 11 and treegraft 7, though it wins no benchmark."""
    seconds = {"code": {"ngram": 1.0, "strong": 2.0, "treegraft": 1.0}, "chat": {"ngram": 10.0, "strong": 6.0}}
    rows = [
        make_row(f"{bench}/{prompt}", method, seconds=taken.get(method, 6.0))
        for bench, taken in seconds.items()
        for prompt in range(3)
        for method in OWN_METHODS
    ]
    report = report_of(rows)
    of_all = report["overall_over_best_single"]
    assert report["over_best_single"]["mean"] == 1.0
    assert of_all["best"] == "strong"
    assert of_all["ratio"] == pytest.approx(8 / 7)
    assert 1.0 <= of_all["low"] < 8 / 7 < of_all["high"] <= 2.0  # draws of chat alone have 1, those of code alone 2
    sentence = "is 1.14 times as fast as the single drafter that is better over all prompts together"
    assert sentence in report["headline"]["over_best_single"]["text"]
    code = report_of([row for row in rows if row["bench"] == "code"])  # where that says the same as the sentence before
    assert "over all prompts" not in code["headline"]["over_best_single"]["text"]


def test_ecosystem_baselines_are_null_unless_measured() -> None:
    assert report_of(make_rows())["benchmarks"]["code"]["hf_assisted"] is None
    cell = report_of(make_rows(hf=True))["benchmarks"]["code"]["hf_assisted"]
    assert cell["speedup"]["mean"] > 0
    assert cell["tokens_per_step"] is cell["acceptance_by_depth"] is cell["time_split_ms"] is None


def test_headroom() -> None:
    rates = {"ngram": 2.0, "strong": 1.0, "treegraft": 3.0, "oracle": 4.0}
    assert headroom(rates) == {"over_best_single": 2.0, "captured": 0.5}
    assert headroom(rates | {"treegraft": 4.0})["captured"] == 1.0
    assert headroom(rates | {"treegraft": 1.0})["captured"] == -0.5
    assert headroom(rates | {"oracle": 2.0}) == {"over_best_single": 1.0, "captured": None}
    assert headroom({}) == {"over_best_single": None, "captured": None}


@pytest.mark.parametrize(
    ("ratio", "low", "high", "says", "is_"),
    [
        (1.5, 1.2, 1.8, "is 1.50 times as fast as plain", "faster"),
        (0.8, 0.7, 0.9, "is slower than plain: 0.80 times its speed", "slower"),
        (0.97, 0.9, 1.1, "has 0.97 times the speed of plain", "undecided"),
        (0.999, 0.9, 1.1, "is as fast as plain", "undecided"),
        (1.5, None, None, "no interval", "unknown"),
    ],
)
def test_verdicts_are_said_plainly(ratio: float, low: float | None, high: float | None, says: str, is_: str) -> None:
    assert says in speed_phrase(ratio, low, high, "plain")
    assert verdict(low, high) == is_


# -------------------------------------------------------------------------------------------------------- refused input


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 1.5}, "tokens"),
        ({"method": "magic"}, "method 'magic' is not one of"),
        ({"bench": "mean"}, "may not be called 'mean'"),
        ({"steps": None}, "steps is missing"),
        ({"time_ms": None}, "time_ms is missing"),
        ({"accepted_by_depth": [1, 2]}, "rises with depth"),
        ({"accepted_by_depth": [31]}, "more steps than there were"),
        ({"time_ms": {"verify": 1.0}}, "time_ms.draft_light"),
    ],
)
def test_malformed_rows_are_refused_by_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=r"^runs\.jsonl, line 7 is not a run") as error:
        parse_run(json.dumps(make_row("code/1", "treegraft") | changes), "runs.jsonl, line 7")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["", "{", "[]", "null", '{"tokens": 3}'])
def test_lines_that_are_no_row_are_refused(line: str) -> None:
    with pytest.raises(UserError, match="line 1 is not a run"):
        parse_run(line, "line 1")


def test_incomparable_runs_are_refused() -> None:
    rows = make_rows()
    with pytest.raises(UserError, match="holds no run"):
        report_of([])
    with pytest.raises(UserError, match="twice"):
        report_of([*rows, rows[5]])
    with pytest.raises(UserError, match="no run of fixed on code"):
        report_of([row for row in rows if (row["method"], row["bench"]) != ("fixed", "code")])
    with pytest.raises(UserError, match="prompt chat/3, turn 1, repeat 0 of chat for only one of plain and strong"):
        report_of([row for row in rows if (row["method"], row["prompt_id"], row["turn"]) != ("strong", "chat/3", 1)])
    with pytest.raises(UserError, match="emitted no token on code"):
        report_of([row | {"tokens": 0} if row["method"] == "plain" else row for row in equal_rows()])


def test_malformed_summary_is_refused() -> None:
    summary = make_summary()
    del summary["temperatures"]
    with pytest.raises(UserError, match="temperatures: Field required"):
        parse_summary(summary, "summary.json")


# -------------------------------------------------------------------------------------------------------- the validator


def without(report: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of `report` without the key at the dotted `path`."""
    result = copy.deepcopy(report)
    *parents, last = path.split(".")
    inner = result
    for key in parents:
        inner = inner[key]
    del inner[last]
    return result


def replaced(report: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `report` with `value` at the dotted `path`."""
    result = copy.deepcopy(report)
    *parents, last = path.split(".")
    inner = result
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return result


REQUIRED_KEYS = [
    *(
        "schema",
        "pair",
        "device",
        "settings",
        "created",
        "benchmarks",
        "over_best_single",
        "overall_over_best_single",
        "oracle",
        "replay",
        "identity",
    ),
    *(f"benchmarks.code.{method}" for method in METHODS),
    *(
        f"benchmarks.code.treegraft.{key}"
        for key in (
            *("tokens", "seconds", "tokens_per_s", "speedup", "speedup.mean", "speedup.low", "speedup.high"),
            *("tokens_per_step", "steps", "strong_calls_per_step", "acceptance_by_depth", "time_split_ms"),
            *(f"time_split_ms.{part}" for part in ("draft_light", "draft_strong", "verify", "scheduler", "other")),
        )
    ),
    *(f"over_best_single.{key}" for key in ("mean", "max", "min", "code", "code.ratio", "code.low", "code.high")),
    *("oracle.over_best_single", "oracle.captured", "replay.predicted_speedup", "replay.measured_speedup"),
    *(f"identity.{key}" for key in ("dtype", "compared_tokens", "divergences", "max_logit_gap")),
]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(make_rows(hf=True))


@pytest.mark.parametrize("path", REQUIRED_KEYS)
def test_every_key_is_required(report: dict[str, Any], path: str) -> None:
    check_report(report)
    with pytest.raises(ValueError, match="not a report"):
        check_report(without(report, path))


@pytest.mark.parametrize("path", ["headline.ratio", "overall.plain.speedup.low", "benchmarks.code.fixed.tokens_per_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_anywhere(report: dict[str, Any], path: str, value: float) -> None:
    with pytest.raises(ValueError, match=path):
        check_report(replaced(report, path, value))


@pytest.mark.parametrize(
    "path",
    [
        *("schema", "benchmarks", "over_best_single.mean", "over_best_single.code", "replay.measured_speedup"),
        *(f"benchmarks.chat.{method}" for method in OWN_METHODS),
        *(f"benchmarks.chat.{method}.time_split_ms" for method in DRAFTING_METHODS),
        *("benchmarks.chat.hf_assisted.tokens", "benchmarks.chat.fixed.speedup.mean", "identity.divergences"),
    ],
)
def test_null_is_refused_where_a_number_must_be(report: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        check_report(replaced(report, path, None))


@pytest.mark.parametrize(
    "path",
    [
        *("benchmarks.chat.hf_assisted", "benchmarks.chat.hf_prompt_lookup.steps", "benchmarks.chat.fixed.speedup.low"),
        *("oracle.captured", "oracle.over_best_single", "replay.predicted_speedup", "identity.max_logit_gap"),
        "over_best_single.chat.low",
    ],
)
def test_null_is_allowed_where_nothing_was_measured(report: dict[str, Any], path: str) -> None:
    check_report(replaced(report, path, None))


def test_what_json_cannot_hold_is_refused(report: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not JSON serializable"):
        check_report(report | {"extra": {1, 2}})


def test_report_is_json_and_says_what_was_replayed(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["replay"]["predicted_speedup"] == pytest.approx(0.039 / 0.025)
    assert report["oracle"]["captured"] == pytest.approx((39 - 34) / (46 - 34))
    assert report["replay"]["measured_speedup"] == report["overall"]["treegraft"]["speedup"]["mean"]
    assert report["baselines"]["schedulers"]["student"] == {"validation": 0.038, "test": 0.039}


def test_a_report_without_replay_and_distillation_is_complete() -> None:
    runs = [parse_run(json.dumps(row), "line") for row in make_rows()]
    summary = make_summary()
    del summary["replay"], summary["calibration"]
    report = build_report("toy", runs, parse_summary(summary, "summary.json"), None, resamples=50)
    assert report["oracle"] == {"over_best_single": None, "captured": None, "benches": {}}
    assert report["replay"]["predicted_speedup"] is None
