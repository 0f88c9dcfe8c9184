"""Threads that start cold and at once, in processes that have never compiled anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "compile_gate.py"


@pytest.mark.parametrize("process", range(3))
def test_cold_threads_of_a_fresh_process_all_train_through_the_gate(process: int, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    workers = sorted(line for line in ran.stdout.splitlines() if line.startswith("worker-"))
    assert len(workers) == 2, ran.stderr
    assert all("101 steps, 1 compilation" in line for line in workers)
    assert "Traceback" not in ran.stderr
