"""What `pipeline generalize` found: every cell's speeds on test prompts, and what a general student keeps of the gain.

The *gain* is the way from the better single drafter to the student of the pair and regime itself; what the general
student *keeps* is the share of that way that it goes too.
"""

from typing import TYPE_CHECKING, Any

from pipeline.distill_inputs import versions
from pipeline.students import Fit, admission_of, follow

if TYPE_CHECKING:
    from pipeline.distill_inputs import Inputs
    from pipeline.generalize import Cell, SavingRule
    from treegraft.scheduling.network import MarginNetwork

SCHEMA = "treegraft.generalize/1"
METHODS = ("plain", "ngram", "strong", "fixed", "own", "general", "oracle")
LEAST_GAIN = 0.01
"""Gain of the own student, as a share of the better single drafter's speed, below which no share of it is stated."""
GROUPS = {
    "trained": "trained pairs, trained regimes",
    "held_out_regime": "trained pairs, held-out regimes",
    "held_out_pair": "held-out pairs, trained regimes",
    "held_out_both": "held-out pairs, held-out regimes",
}


def general_report(
    name: str, cells: "list[Cell]", fits: list[Fit], best: Fit, rule: "SavingRule", own: dict[str, Fit]
) -> dict[str, Any]:
    """The content of generalize.json; speeds are replayed ones over plain decoding.

    Args:
        fits, best: of the general student, and the chosen one; own: each cell's own student, by the cell's name.
    """
    import math

    from treegraft.values.regimes import GROWTH_NODES, cost_ratio, verify_growth

    trained = {cell.pair for cell in cells if cell.seen}
    regimes = {cell.regime for cell in cells if cell.seen}
    rows = []
    for cell in cells:
        rates = cell_rates(cell, own[cell.name].student.network, best.student.network, rule)
        new_pair, new_regime = cell.pair not in trained, cell.regime not in regimes
        group = list(GROUPS)[2 * new_pair + new_regime]
        costs = cell.inputs.train.costs
        rows.append(
            {
                "pair": cell.pair,
                "regime": cell.regime.name,
                "group": group,
                "cost_ratio": cost_ratio(costs),
                "verify_growth": dict(zip(map(str, GROWTH_NODES), map(math.exp, verify_growth(costs)), strict=True)),
                "best_fixed": list(cell.inputs.best_fixed),
                "tokens_per_ms": rates,
                "speed": {method: rate / rates["plain"] for method, rate in rates.items()},
                "own_over_single": rates["own"] / single(rates),
                "general_over_single": rates["general"] / single(rates),
                "kept": kept_share([rates]),
            }
        )
    return {
        "schema": SCHEMA,
        "name": name,
        "pairs": sorted(trained),
        "held_out": sorted({cell.pair for cell in cells} - trained),
        "features": next(cell for cell in cells if cell.seen).general.train.feature_names,
        "cells": rows,
        "groups": summaries(rows),
        "chosen": {"seed": best.seed, "round": best.round, "epoch": best.student.epoch},
        "fits": [
            {
                "seed": fit.seed,
                "round": fit.round,
                "epoch": fit.student.epoch,
                "train_over_fixed": fit.train,
                "validation_over_fixed": fit.validation,
                "validation_by_epoch": list(fit.student.scores),
            }
            for fit in fits
        ],
        "saving_coefficients": rule.coefficients.tolist(),
        "versions": versions(),
    }


def cell_rates(cell: "Cell", own: "MarginNetwork", general: "MarginNetwork", rule: "SavingRule") -> dict[str, float]:
    """Replayed tokens per ms of every method on the test prompts; the general student knows the costs and no more."""
    from treegraft.values.replay import oracle, plain, replay_fixed

    inputs = cell.inputs
    test = inputs.test
    admission = rule.admission(test.costs, inputs.new_tokens)
    return {
        "plain": plain(test).tokens_per_ms,
        "ngram": replay_fixed(test, ()).tokens_per_ms,
        "strong": replay_fixed(test, best_strong(inputs)).tokens_per_ms,
        "fixed": replay_fixed(test, inputs.best_fixed).tokens_per_ms,
        "own": follow(own, test, admission_of(own, inputs)).tokens_per_ms,
        "general": follow(general, cell.general.test, admission).tokens_per_ms,
        "oracle": oracle(test).tokens_per_ms,
    }


def best_strong(inputs: "Inputs") -> tuple[int, ...]:
    """The drafter model and the number of layers that are fastest on the validation prompts when it drafts alone."""
    from pipeline.headroom import best_layers
    from treegraft.values.replay import replay_fixed

    tables = inputs.validation
    plans = [best_layers(tables, j) for j in range(1, tables.drafters)]
    return max(plans, key=lambda plan: replay_fixed(tables, plan).tokens_per_ms)


def single(rates: dict[str, float]) -> float:
    """Of the better single drafter."""
    return max(rates["ngram"], rates["strong"])


def kept_share(cells: list[dict[str, float]]) -> float | None:
    """Share of the own students' gain that the general one keeps over some cells; None where there is hardly a gain."""
    own = sum(rates["own"] / single(rates) - 1 for rates in cells)
    general = sum(rates["general"] / single(rates) - 1 for rates in cells)
    return general / own if own >= LEAST_GAIN * len(cells) else None


def summaries(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every group of cells: mean speeds over the better single drafter, and the share of the gain that is kept."""
    found = {}
    for group in GROUPS:
        cells = [row for row in rows if row["group"] == group]
        if cells:
            found[group] = {
                "cells": len(cells),
                **{
                    f"{method}_over_single": sum(
                        row["tokens_per_ms"][method] / single(row["tokens_per_ms"]) for row in cells
                    )
                    / len(cells)
                    for method in ("fixed", "own", "general", "oracle")
                },
                "kept": kept_share([row["tokens_per_ms"] for row in cells]),
            }
    return found


def markdown(report: dict[str, Any]) -> str:
    """Both tables."""
    lines = [
        "| pair | regime | n-grams | strong | best fixed | own | general | oracle | general / single | kept |",
        "|---|---|" + "---:|" * 8,
    ]
    for row in report["cells"]:
        speeds = " | ".join(f"{row['speed'][method]:.2f}" for method in METHODS[1:])
        mark = "" if row["group"] == "trained" else " *"
        lines.append(
            f"| {row['pair']} | {row['regime']}{mark} | {speeds} | {row['general_over_single']:.2f} | "
            f"{_share(row['kept'])} |"
        )
    lines += [
        "",
        "Replayed speed over plain decoding on test prompts; * = never seen in training.",
        "",
        "| over the better single drafter, mean | cells | best fixed | own | general | oracle | kept |",
        "|---|" + "---:|" * 6,
    ]
    for group in (group for group in GROUPS if group in report["groups"]):
        row = report["groups"][group]
        speeds = " | ".join(f"{row[f'{method}_over_single']:.3f}" for method in ("fixed", "own", "general", "oracle"))
        lines.append(f"| {GROUPS[group]} | {row['cells']} | {speeds} | {_share(row['kept'])} |")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
