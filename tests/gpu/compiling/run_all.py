"""Every check of the compile-safety library on this machine's GPUs, each in processes of its own.

    python3 tests/gpu/compiling/run_all.py --json compiling.json --budget 280

Prints PASS or FAIL for each and exits with 0 if all passed. A check that fails, hangs or finds no time is
reported and does not keep the others from running. `--device cpu --processes 1` only tries the scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"


@dataclass(frozen=True)
class Check:
    """One process and how it must end."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    exit_code: int = 0
    message: str = ""
    """Must appear in what the process printed."""
    is_cold: bool = False
    """With compiler caches of its own, empty ones."""
    may_crash: bool = False
    """Whether hanging or dying of a signal is as good as that exit code."""
    timeout_s: float = 90.0


def checks(num_processes: int) -> list[Check]:
    """All of them, the longest first."""
    refused = {"exit_code": 9}
    mutated = {"exit_code": 1, "message": "FAIL cold threads, gate off", "may_crash": True, "is_cold": True}
    mutation = [
        Check(f"mutation {i}", "check_cold.py", ("--gate", "off"), timeout_s=60, **mutated) for i in range(3)
    ]
    cold = [
        Check(f"cold threads {i}", "check_cold.py", is_cold=i < num_processes // 5)
        for i in range(num_processes)
    ]
    return [
        Check("captured equals launched", "check_graphs.py", timeout_s=120),
        Check("seal", "check_seal.py"),
        *mutation,
        Check("compiled flex is proved", "check_proof.py", ("--worker", "flex")),
        Check("checkpointing", "check_proof.py", ("--worker", "checkpoint")),
        Check("warm-up without gradients, then training", "check_proof.py", ("--worker", "nograd")),
        Check("a replayed graph is proved", "check_proof.py", ("--worker", "captured")),
        Check(
            "eager flex is refused", "check_proof.py", ("--worker", "eager"), message="uncompiled", **refused
        ),
        Check(
            "a dense kernel is refused",
            "check_proof.py",
            ("--worker", "sdpa"),
            message="instead of",
            **refused,
        ),
        *cold,
    ]


def run(check: Check, device: str, caches: Path, ends: float) -> dict[str, Any]:
    """Run one check to its end, its timeout or the end of the budget."""
    started = time.monotonic()
    limit = min(check.timeout_s, ends - started)
    if limit < 10:
        return {"name": check.name, "passed": False, "why": "no time left in the budget"}
    cache = caches / (check.name.replace(" ", "-") if check.is_cold else "shared")
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, str(HERE / check.script), *check.arguments, "--device", device]
    process = subprocess.Popen(
        [*command, "--timeout", str(max(5.0, limit - 15))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
    _end(process)  # compile workers that outlive their parent
    passed = process.returncode == check.exit_code and check.message in out + err
    if check.may_crash:
        passed = passed or process.returncode < 0  # killed as hung, or by a signal of its own
    return {
        "name": check.name,
        "passed": passed,
        "exit_code": process.returncode,
        "wall_s": round(time.monotonic() - started, 1),
        "detail": _last_json(out),
        "stderr": "" if passed and not check.exit_code else err[-3000:],
    }


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_json(out: str) -> Any:
    lines = out.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else out[-1000:]


def _merge_mutations(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The race is a matter of timing: one process in which the missing gate shows is the proof."""
    mutations = [r for r in results if r["name"].startswith("mutation")]
    shown = [r for r in mutations if r["passed"]]
    merged = {
        "name": "without the gate the same threads fail",
        "passed": bool(shown),
        "failed_processes": f"{len(shown)} of {len(mutations)}",
        "detail": mutations,
    }
    return [r for r in results if r not in mutations] + [merged]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds for everything")
    parser.add_argument("--processes", type=int, default=20, help="fresh processes of the cold start")
    parser.add_argument("--parallel", type=int, default=5, help="processes at a time")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="compiling-") as folder,
        ThreadPoolExecutor(args.parallel) as pool,
    ):
        ends = started + args.budget
        jobs = [pool.submit(run, check, args.device, Path(folder), ends) for check in checks(args.processes)]
        results = []
        for job in jobs:
            result = job.result()
            results.append(result)
            print(
                f"{'PASS' if result['passed'] else 'FAIL'} {result['name']} {result.get('wall_s', '')} s",
                flush=True,
            )
    results = _merge_mutations(results)
    failed = [r["name"] for r in results if not r["passed"]]
    report = {
        "passed": not failed,
        "failed": failed,
        "wall_s": time.monotonic() - started,
        "results": results,
    }
    args.json.write_text(json.dumps(report, indent=1))
    print(f"{'FAIL' if failed else 'PASS'} {len(results) - len(failed)} of {len(results)}; failed: {failed}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
