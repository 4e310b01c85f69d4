"""Memory of traces is that of a row group, whatever the table's size; what is read stays as the learner's arrays."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks/trace_memory.py"


def test_memory_stays_bounded_by_row_groups(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rows", "300000", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["states"] >= 290_000
    phases = figures["phases"]
    table = phases["read"]["arrays_mb"]
    assert table > 50
    # pyarrow's own pool, which holds what is between a file and the arrays: some row groups of some MB.
    for name, phase in phases.items():
        assert phase["arrow_peak_mb"] < 0.6 * table, name
    # The arrays and no second copy of them; code that is loaded on the way takes about 100 MB.
    assert phases["read"]["peak_growth_mb"] < 1.5 * table + 150
    assert not list(tmp_path.iterdir())
