"""The speed benchmarks run: on a CPU and a tiny shape here, so that they also run where it matters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {
    "step": {"step_ms", "share_of_peak", "counted_gib", "recompiles"},
    "target": {"forward_ms", "share_of_peak", "recompiles"},
    "pipeline": {"tokens_per_s", "share_of_bound", "dense_calls", "recompiles"},
}
SMALL = {
    "step": ["--tokens", "256", "--blocks", "32", "--repeats", "2"],
    "target": ["--tokens", "256", "--repeats", "2"],
    "pipeline": ["--tokens", "256", "--blocks", "32", "--steps", "6"],
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_benchmark_measures_a_tiny_shape_on_the_cpu_and_says_how_it_was_run(name: str, tmp_path: Path):
    out = tmp_path / "out.json"
    script = ROOT / "benchmarks" / f"{name}.py"
    arguments = ["--shapes", "tiny", "--device", "cpu", "--json", str(out), *SMALL[name]]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=240, capture_output=True)
    written = json.loads(out.read_text())
    assert {"date", "hardware", "torch", "commit", "command"} <= written.keys()
    for row in written["results"]:
        assert FIGURES[name] <= row.keys()
        assert row["recompiles"] == 0
        assert all(value >= 0 for value in row.values() if isinstance(value, float))
