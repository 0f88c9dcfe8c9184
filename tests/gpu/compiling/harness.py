"""Runs a check's threads to an end, hung or not, and says PASS or FAIL with a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from draftline.compiling import tripwire
from draftline.compiling.internals import tracing_leftovers
from draftline.errors import DraftlineError


@dataclass
class Outcome:
    """What came of a set of threads."""

    results: dict[str, Any] = field(default_factory=dict)
    """By thread: what its function returned."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)

    def detail(self) -> dict[str, Any]:
        """The outcome and the state of the process, for JSON."""
        return {
            "errors": {name: f"{type(e).__name__}: {e}"[:600] for name, e in self.errors.items()},
            "hung": self.hung,
            "leftovers": tracing_leftovers(),
            "dense_calls": len(tripwire.dense_calls()),
        }

    @property
    def clean(self) -> bool:
        """Every thread came back, nothing failed, nothing was left behind."""
        return not (self.errors or self.hung or tracing_leftovers() or tripwire.dense_calls())


def run_threads(work: dict[str, Callable[[], Any]], timeout_s: float) -> Outcome:
    """Run each function in a thread of its name; threads that do not end in time are named and left."""
    outcome = Outcome()

    def guard(name: str, function: Callable[[], Any]) -> None:
        try:
            outcome.results[name] = function()
        except BaseException as error:  # noqa: BLE001 - an error is a result here
            outcome.errors[name] = error
            traceback.print_exc()

    threads = [threading.Thread(target=guard, args=item, name=item[0], daemon=True) for item in work.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    outcome.hung = [thread.name for thread in threads if thread.is_alive()]
    return outcome


def options(arguments: Sequence[tuple[str, dict[str, Any]]] = ()) -> argparse.Namespace:
    """Command line of a check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the threads")
    for flag, settings in arguments:
        parser.add_argument(flag, **settings)
    return parser.parse_args()


def finish(name: str, passed: bool, detail: dict[str, Any], error: BaseException | None = None) -> NoReturn:
    """Print the verdict and leave at once: threads that hang would keep the interpreter.

    The exit code is 0 for a pass, the error's own where one is given, and 1 otherwise.
    """
    code = 0 if passed else 1
    if error is not None:
        print(error, file=sys.stderr)
        code = error.exit_code if isinstance(error, DraftlineError) else 1
    print(f"{'PASS' if passed else 'FAIL'} {name}")
    print(json.dumps({"check": name, "passed": passed, "torch": torch.__version__, **detail}, default=str))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
