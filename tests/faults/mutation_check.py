"""Take away each sync, check, abort and deadline in turn, and show that some test then fails.

    python tests/faults/mutation_check.py [part of a name ...]

Works on a copy of the source. A run that hangs counts as a failing test. Exit code 1 when a mutation survived.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.faults.mutations import MUTATIONS, Mutation  # noqa: E402 - run as a script from anywhere

LIMIT_S = 150


def mutate(source: Path, mutation: Mutation) -> None:
    path = source / "draftline" / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.what}: {mutation.old!r} is not once in {mutation.file}"
    path.write_text(text.replace(mutation.old, mutation.new))


def failing_test(mutation: Mutation) -> str | None:
    """Name of the first test that fails without that line of defence, or None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(REPOSITORY / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.gguf"))
        mutate(source, mutation)
        code, output = run_tests(source, mutation.tests)
    if code == 0:
        return None
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split(" - ")[0] if failures else f"exit code {code} (a hang counts)"


def run_tests(source: Path, tests: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [str(REPOSITORY / "tests" / name) for name in tests.split()]
    environment = os.environ | {"PYTHONPATH": f"{source}:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return process.returncode, output


def main(wanted: list[str]) -> int:
    chosen = [one for one in MUTATIONS if not wanted or any(part in one.what for part in wanted)]
    survivors = []
    for mutation in chosen:
        started = time.monotonic()
        failed = failing_test(mutation)
        if failed is None:
            survivors.append(mutation.what)
        seconds = time.monotonic() - started
        print(f"{mutation.what:40} {seconds:5.0f} s  {failed or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations are caught; survived: {survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
