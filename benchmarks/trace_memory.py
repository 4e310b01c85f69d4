"""Measures how much memory traces take: written, checked and read, each in a process of its own.

    python benchmarks/trace_memory.py --rows 20000000 --folder /tmp/traces

Random tables are made part by part, so that no process holds a whole one unless it reads it. Prints one JSON object:
for every phase the growth of the peak resident memory and of pyarrow's own pool, beside the size of the data.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEPTH, DRAFTERS, SIZES = 4, 2, (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ANSWER = 200  # positions of a prompt
PROMPTS_PER_PART = 40


def main() -> None:
    """Parse, run the three phases, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000, help="scheduling states of all splits together")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the traces go for a while"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(json.dumps(figures(options.rows, folder), indent=2))
    finally:
        shutil.rmtree(folder)


def figures(rows: int, folder: Path) -> dict[str, Any]:
    """Write, check and read traces of about ``rows`` states below ``folder``, in MB of 10^6 bytes."""
    import treegraft.values.validation  # noqa: F401  before the forks, so that code is not counted as data

    positions = max(rows // (2**DEPTH - 1) // ANSWER, 1) * ANSWER
    phases: dict[str, Callable[[], Any]] = {
        "write": lambda: write(folder, positions),
        "validate": lambda: check(folder),
        "read": lambda: read(folder),
    }
    return {
        "states": positions * (2**DEPTH - 1),
        "schedules": positions * 2**DEPTH,
        "phases": {name: _in_process(phase) for name, phase in phases.items()},
        "disk_mb": round(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6, 1),
    }


def parts(split: str, positions: int) -> Iterator[Any]:
    """Labelled random tables of whole prompts, ``positions`` in all."""
    import numpy as np

    from treegraft.costs import CostModel, LatencyCurve
    from treegraft.scheduling.features import feature_names
    from treegraft.values.lattice import Outcomes
    from treegraft.values.states import offset
    from treegraft.values.tables import build_tables

    random = np.random.default_rng(0)
    curve = LatencyCurve([1, 64], [64, 1024], [[20, 22], [60, 66]])
    costs = CostModel(curve, (None, curve), curve, (None, curve), 0.1, 0.1, 0.1, 0.1)
    names, states, plans = feature_names(DEPTH, DRAFTERS), offset(DEPTH, DRAFTERS), DRAFTERS**DEPTH
    prompts = positions // ANSWER
    for first in range(0, prompts, PROMPTS_PER_PART):
        rows = []
        for prompt in range(first, min(first + PROMPTS_PER_PART, prompts)):
            accepted = np.minimum(random.integers(0, 5, (ANSWER, plans, 1)), SIZES).astype(np.int16)
            outcomes = Outcomes(
                features=random.normal(size=(ANSWER, states, len(names))).astype(np.float32),
                accepted=accepted,
                mass=accepted * np.float32(0.9),
                nodes=random.integers(0, 40, (ANSWER, plans)).astype(np.int16),
                layer_tokens=random.integers(0, 5, (ANSWER, plans, DEPTH)).astype(np.int16),
                path_processed=random.integers(0, 5, (ANSWER, plans, DRAFTERS)).astype(np.int16),
                mean_accepted=np.zeros((ANSWER, plans, 0), np.float32),
            )
            rows.append((f"random/{split}-{prompt}/0", "random", 64, outcomes))
        part = build_tables(rows, names, DRAFTERS, DEPTH, SIZES, costs)
        shape = (len(part), states)
        yield part.labelled(random.normal(size=(*shape, DRAFTERS - 1)), random.uniform(size=shape))


def write(folder: Path, positions: int) -> int:
    """The folder, of which nearly everything is the training split; returns 0, as nothing stays in memory."""
    from treegraft.values.schema import SPLITS
    from treegraft.values.traces import trace_manifest, write_parts

    small = {split: list(parts(split, ANSWER)) for split in SPLITS}
    lengths = {split: positions if split == "train" else ANSWER for split in SPLITS}
    for split, length in lengths.items():
        write_parts(folder, split, parts(split, length), length)
    about = trace_manifest(folder, {split: some[0] for split, some in small.items()}, ["ngram", "strong"], 0.0, 64)
    about["splits"]["train"] |= {"prompts": positions // ANSWER, "positions": positions}
    (folder / "profile.json").write_text(json.dumps({"cost_model": small["train"][0].costs.to_json()}))
    (folder / "calibration.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps(about))
    return 0


def check(folder: Path) -> int:
    """Fails on a fault; returns 0, as nothing stays in memory."""
    from treegraft.values.validation import validate_traces

    faults, _ = validate_traces(folder)
    if faults:
        raise SystemExit("\n".join(faults))
    return 0


def read(folder: Path) -> int:
    """Returns the bytes of the training split's arrays, which stay in memory as the learner needs them."""
    import numpy as np

    from treegraft.values.traces import read_traces

    tables = read_traces(folder, "train")
    return sum(value.nbytes for value in vars(tables).values() if isinstance(value, np.ndarray))


def _in_process(phase: Callable[[], int]) -> dict[str, float]:
    """Run ``phase`` in a fork and report its peaks."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        import pyarrow as pa

        before = _peak_bytes()
        kept = phase()
        growth = _peak_bytes() - before
        sender.send({"growth": growth, "arrow": pa.default_memory_pool().max_memory(), "kept": kept})

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        raise SystemExit("a phase failed; its error stands above.") from None
    process.join()
    return {
        "peak_growth_mb": round(found["growth"] / 1e6, 1),
        "arrow_peak_mb": round(found["arrow"] / 1e6, 1),
        "arrays_mb": round(found["kept"] / 1e6, 1),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
