"""What a report says first: sentences about ratios of speed, with their intervals and what these show."""

from collections.abc import Mapping
from typing import Any

from pipeline.provenance import code_changed

OFF_PROFILE = 1.25  # machines drift by a tenth and more from minute to minute; other load slows down several times


def doubts(pair: str, changed: list[str], modelled: float, measured: float, fallbacks: int) -> list[str]:
    """Sentences about what makes a report's figures doubtful.

    changed: code that changed while it was measured. fallbacks: decisions that the scheduler left to the best fixed
    schedule. modelled, measured: plain decoding's tokens a second by the latencies of stage profile (0 if it has no say
    on these prompts) and by the clock.
    """
    found = [code_changed("evaluate", pair, changed)] if changed else []
    if modelled and not 1 / OFF_PROFILE <= measured / modelled <= OFF_PROFILE:
        found.append(
            f"Plain decoding ran at {measured:.3g} tokens a second, by the profile it runs at {modelled:.3g}: "
            "the machine had other load or other settings in one of the two stages, and the scheduler was made for the "
            f"profile's costs. Measure both again on the idle machine: run `pipeline all {pair}` (with dvc: "
            f"`dvc repro -f -s profile@{pair}`, then `dvc repro`)."
        )
    if fallbacks:
        found.append(
            f"In {fallbacks} decisions the scheduler's margins were not possible, and the best fixed schedule acted "
            "in its place: it met features unlike those it was trained on. Train it again: run "
            f"`pipeline all {pair}`."
        )
    return found


def headline(
    temperature: float,
    speedup: Mapping[str, Any],
    mean: Mapping[str, Any],
    by_bench: Mapping[str, Any],
    of_all: Mapping[str, Any],
) -> dict[str, Any]:
    """The report's headline: TreeGraft over plain decoding, and over the better single drafter.

    speedup: {mean, low, high} over plain decoding, all prompts. mean: {ratio, low, high} over the better single
    drafter, averaged over benchmarks; by_bench: the same of each benchmark; of_all: over the one that is the better of
    the two on all prompts together, for whoever has to serve all of them alike.
    """
    over_plain = verdict(speedup["low"], speedup["high"])
    over_best = verdict(mean["low"], mean["high"])
    text = (
        f"At temperature {temperature:g} TreeGraft "
        f"{speed_phrase(speedup['mean'], speedup['low'], speedup['high'], 'plain decoding')}"
    )
    if over_best == "slower":
        # Whoever reads one sentence only must not miss that the scheduler is not worth having.
        text += f" {'and' if speedup['mean'] < 1 else 'but'} slower than the better single drafter alone"
    compared = speed_phrase(mean["ratio"], mean["low"], mean["high"], "the better single drafter")
    if len(by_bench) == 1:
        best = f"It {compared}."
    else:
        best = f"On average over benchmarks it {compared}"
        least, most = (choose(by_bench, key=lambda bench: by_bench[bench]["ratio"]) for choose in (min, max))
        best += f"; from {by_bench[least]['ratio']:.2f} ({least}) to {by_bench[most]['ratio']:.2f} ({most})."
    if over_best == "undecided":
        best += " That interval includes 1: these prompts do not show a difference."
    if len(by_bench) > 1:
        other = "the single drafter that is better over all prompts together"
        best += f" It {speed_phrase(of_all['ratio'], of_all['low'], of_all['high'], other)}."
    return {
        "text": f"{text}.",
        "ratio": speedup["mean"],
        "low": speedup["low"],
        "high": speedup["high"],
        "verdict": over_plain,
        "over_best_single": {"text": best, **mean, "verdict": over_best},
    }


def verdict(low: float | None, high: float | None) -> str:
    """What an interval of a speed ratio shows: faster, slower, undecided (it includes 1) or unknown (no interval)."""
    if low is None or high is None:
        return "unknown"
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


def speed_phrase(ratio: float, low: float | None, high: float | None, other: str) -> str:
    """A speed ratio as the end of a sentence that begins with who is compared."""
    interval = "no interval from so few prompts" if low is None else f"95% interval {low:.2f} to {high:.2f}"
    times = f"{ratio:.2f}"
    if times == "1.00":
        return f"is as fast as {other} (1.00 times its speed, {interval})"
    if ratio < 1 and verdict(low, high) == "undecided":
        return f"has {times} times the speed of {other} ({interval})"  # "slower" would say more than was shown
    if ratio < 1:
        return f"is slower than {other}: {times} times its speed ({interval})"
    return f"is {times} times as fast as {other} ({interval})"
