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

    from pipeline.params_file import load_pair
    from treegraft.values.replay import best_fixed
    from treegraft.values.validation import read_validated

    tables = read_validated(load_pair(options.pair).paths.traces)
    schedule = best_fixed(tables["train"])
    by_kind: dict[str, list[OutcomeTables]] = {}
    for table in tables.values():
        for kind in dict.fromkeys(table.kinds):
            by_kind.setdefault(kind, []).append(table.select(np.flatnonzero(np.array(table.kinds) == kind)))
    print(f"Best fixed schedule of the training prompts: {list(schedule)} (drafter by layer).\n")
    print(
        "| kind | turns | plain, tokens/s | n-grams | strong | best fixed | by kind | oracle | oracle / better single |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    rows = {kind: _speeds(parts, schedule) for kind, parts in by_kind.items()}
    for kind, speeds in rows.items():
        print(_line(kind, sum(len(part.prompt_ids) for part in by_kind[kind]), speeds))
    mean = {name: float(np.mean([speeds[name] for speeds in rows.values()])) for name in next(iter(rows.values()))}
    print(_line("mean", sum(len(table.prompt_ids) for table in tables.values()), mean))


def _speeds(parts: "list[OutcomeTables]", schedule: tuple[int, ...]) -> dict[str, float]:
    """Plain tokens per second of one kind's prompts, and every other policy's speed over it."""
    from pipeline.headroom import yardsticks

    found = yardsticks(parts)
    runs = {
        "ngram": found.fixed[found.alone[0]],
        "strong": found.fixed[found.alone[-1]],
        "fixed": found.fixed[schedule],
        "own": found.fixed[found.best],
        "oracle": found.oracle,
    }
    speeds = {name: found.speed(run) for name, run in runs.items()}
    return {"plain": 1000 * found.plain.rate} | speeds | {"head": found.oracle.rate / found.single.rate}


def _line(kind: str, turns: int, speeds: dict[str, float]) -> str:
    names = ("ngram", "strong", "fixed", "own", "oracle", "head")
    return f"| {kind} | {turns} | {speeds['plain']:.1f} | " + " | ".join(f"{speeds[n]:.2f}" for n in names) + " |"


if __name__ == "__main__":
    main()
