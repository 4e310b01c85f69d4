"""Replayed speed of single drafters, fixed schedules and the clairvoyant optimum of a pair, by kind of prompt.

    python benchmarks/headroom.py smollm2-135m

Reads the traces of a pair (`pipeline traces`), all prompts of all splits, and prints a Markdown table: tokens a second
of plain decoding, all else as a multiple of it. "Best fixed" is one schedule for all kinds, "by kind" the best of each
kind in hindsight; "strong" drafts in as many layers as are best for the kind.
"""

import argparse
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treegraft.values.tables import OutcomeTables


def main() -> None:
    """Parse, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="slug of a pair in params.yaml whose traces are there")
    options = parser.parse_args()

    from pipeline.params import load_pair
    from treegraft.values.replay import best_fixed
    from treegraft.values.validation import read_validated

    tables = read_validated(load_pair(options.pair).paths.traces)
    schedule = best_fixed(tables["train"])
    drafters, depth = tables["train"].drafters, tables["train"].depth
    by_kind: dict[str, list[OutcomeTables]] = {}
    for table in tables.values():
        for kind in dict.fromkeys(table.kinds):
            by_kind.setdefault(kind, []).append(table.select(np.flatnonzero(np.array(table.kinds) == kind)))
    strong = [(drafters - 1,) * layers + (0,) * (depth - layers) for layers in range(1, depth + 1)]
    print(f"Best fixed schedule of the training prompts: {list(schedule)} (drafter by layer).\n")
    print(
        "| kind | turns | plain, tokens/s | n-grams | strong | best fixed | by kind | oracle | oracle / better single |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    rows = {kind: _speeds(parts, strong, schedule) for kind, parts in by_kind.items()}
    for kind, speeds in rows.items():
        print(_line(kind, sum(len(part.prompt_ids) for part in by_kind[kind]), speeds))
    mean = {name: float(np.mean([speeds[name] for speeds in rows.values()])) for name in next(iter(rows.values()))}
    print(_line("mean", sum(len(table.prompt_ids) for table in tables.values()), mean))


def _speeds(parts: "list[OutcomeTables]", strong: list[tuple[int, ...]], schedule: tuple[int, ...]) -> dict[str, float]:
    """Plain tokens per second of one kind's prompts, and every other policy's speed over it."""
    from treegraft.values.replay import ReplayResult, oracle, plain, replay_fixed
    from treegraft.values.states import schedules

    def rate(results: "list[ReplayResult]") -> float:
        return float(sum(r.tokens.sum() for r in results) / sum(r.ms.sum() for r in results))

    base = rate([plain(part) for part in parts])
    every = [tuple(plan) for plan in schedules(parts[0].depth, parts[0].drafters).tolist()]
    fixed = {plan: rate([replay_fixed(part, plan) for part in parts]) for plan in every}
    light, dear = fixed[(0,) * parts[0].depth], max(fixed[plan] for plan in strong)
    best = rate([oracle(part) for part in parts])
    found = {"ngram": light, "strong": dear, "fixed": fixed[schedule], "own": max(fixed.values()), "oracle": best}
    return {"plain": 1000 * base} | {name: r / base for name, r in found.items()} | {"head": best / max(light, dear)}


def _line(kind: str, turns: int, speeds: dict[str, float]) -> str:
    names = ("ngram", "strong", "fixed", "own", "oracle", "head")
    return f"| {kind} | {turns} | {speeds['plain']:.1f} | " + " | ".join(f"{speeds[n]:.2f}" for n in names) + " |"


if __name__ == "__main__":
    main()
