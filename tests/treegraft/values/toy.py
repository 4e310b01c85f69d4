"""Random outcome tables, and trace folders of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.treegraft.tiny import cost_model
from treegraft.costs import CostModel, LatencyCurve
from treegraft.scheduling.features import feature_names
from treegraft.values.lattice import Outcomes
from treegraft.values.states import offset
from treegraft.values.tables import OutcomeTables, build_tables
from treegraft.values.traces import trace_manifest, write_split

SIZES = (0, 1, 2, 4)


def scaled_costs(costs: CostModel, factor: float) -> CostModel:
    """A machine that takes ``factor`` times as long for everything."""

    def scaled(curve: LatencyCurve) -> LatencyCurve:
        return LatencyCurve(curve.new_tokens, curve.context_lengths, curve.grid * factor)

    return CostModel(
        target=scaled(costs.target),
        drafters=tuple(curve and scaled(curve) for curve in costs.drafters),
        target_prefill=scaled(costs.target_prefill),
        drafter_prefill=tuple(curve and scaled(curve) for curve in costs.drafter_prefill),
        light_ms=costs.light_ms * factor,
        graft_ms=costs.graft_ms * factor,
        scheduler_ms=costs.scheduler_ms * factor,
        step_ms=costs.step_ms * factor,
    )


def random_tables(
    seed: int, m: int = 2, depth: int = 2, prompts: int = 3, length: int = 12, kind: str = "k", sampled: bool = False
) -> OutcomeTables:
    """Unlabelled tables of random outcomes that no text could have, but that respect what the arrays promise."""
    random = np.random.default_rng(seed)
    curve = LatencyCurve([1, 4, 16], [8, 64], [[1.0, 1.1], [1.3, 1.4], [3.0, 3.2]])
    catch_up = LatencyCurve([1, 64], [8, 64], [[0.2, 0.2], [0.9, 1.0]])
    cheap = LatencyCurve([1, 4, 16], [8, 64], [[0.2, 0.2], [0.3, 0.3], [0.6, 0.7]])
    costs = dataclasses.replace(
        cost_model(curve, (None, *[cheap] * (m - 1)), 0.02), drafter_prefill=(None, *[catch_up] * (m - 1))
    )
    names = feature_names(depth, m)
    rows = []
    for prompt in range(prompts):
        plans = m**depth
        left = np.arange(length, 0, -1)[:, None, None]
        growth = random.integers(0, 2, (length, plans, len(SIZES))).cumsum(-1)
        accepted = np.minimum(np.where(np.array(SIZES) == 0, 0, growth), np.maximum(left - 1, 0))
        outcomes = Outcomes(
            features=random.normal(size=(length, offset(depth, m), len(names))).astype(np.float32),
            accepted=accepted.astype(np.int16),
            mass=np.sort(random.uniform(0, 2, (length, plans, len(SIZES))), axis=-1).astype(np.float32),
            nodes=np.full((length, plans), 9, np.int16),
            layer_tokens=random.integers(1, 4, (length, plans, depth)).astype(np.int16),
            path_processed=random.integers(0, 2, (length, plans, m)).astype(np.int16),
            mean_accepted=means(random, (length, plans), sampled),
        )
        rows.append((f"{kind}/{prompt}/0", kind, 20 + prompt, outcomes))
    return build_tables(rows, names, m, depth, SIZES, costs)


def means(random: np.random.Generator, shape: tuple[int, int], sampled: bool) -> NDArray[np.float32]:
    """What ``mean_accepted`` holds: rising with the size, or nothing for greedy text; draws nothing then."""
    grown = np.sort(random.uniform(0, 2, (*shape, len(SIZES) if sampled else 0)), axis=-1)
    return grown.astype(np.float32)


def labelled_tables(
    seed: int, m: int = 2, depth: int = 2, prompts: int = 3, kind: str = "k", sampled: bool = False
) -> OutcomeTables:
    """Random tables with random labels."""
    tables = random_tables(seed, m, depth, prompts, kind=kind, sampled=sampled)
    random = np.random.default_rng(seed)
    shape = (len(tables), offset(depth, m))
    return tables.labelled(random.normal(size=(*shape, m - 1)), random.uniform(0.1, 1, shape))


def write_folder(folder: Path, tables: dict[str, OutcomeTables]) -> None:
    """A trace folder as stage traces leaves it."""
    for split, part in tables.items():
        write_split(folder, split, part)
    some = next(iter(tables.values()))
    seal(folder, tables)
    (folder / "profile.json").write_text(json.dumps({"cost_model": some.costs.to_json()}))
    (folder / "calibration.json").write_text("{}")


def seal(folder: Path, tables: dict[str, OutcomeTables]) -> None:
    """Write the manifest, with the digests of the files as they are now."""
    some = next(iter(tables.values()))
    drafters = [f"drafter{j}" for j in range(some.drafters)]
    (folder / "manifest.json").write_text(
        json.dumps(trace_manifest(folder, tables, drafters, 0.7 if some.sampled else 0.0, 12))
    )
