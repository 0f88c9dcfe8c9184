"""Acceptance length of a run's weights on held-out prompts, before, beside and after training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from draftline.config import DrafterSpec
from draftline.decoding.evaluate import (
    Evaluation,
    Prompt,
    Reference,
    evaluate,
    reference_answers,
    refuse_beyond_context,
)
from draftline.decoding.greedy import Limit
from draftline.drafter.model import drafter_of
from draftline.errors import StallError, blame
from draftline.resilience import faults
from draftline.resilience.watchdog import thread_stacks
from draftline.serving.export import SERVED_DTYPE
from draftline.target.forward import share_weights
from draftline.target.load import Target


@dataclass(frozen=True)
class Measured:
    """An evaluation made beside training."""

    step: int
    evaluation: Evaluation


class _LeftError(Exception):
    """The run is ending; nobody wants this evaluation any more."""


class Evaluator:
    """Replays the target's own answers; they are written once and serve every evaluation of the run."""

    def __init__(self, target: Target, spec: DrafterSpec, prompts: list[Prompt], limit: Limit) -> None:
        """Raises DataError, ConfigError: see `refuse_beyond_context`."""
        refuse_beyond_context(target, prompts, limit)
        # its own structure over the same weights: the hooks of an evaluation must not meet the workers'
        self._target = replace(target, model=share_weights(target.model))
        self._spec, self._prompts, self._limit = spec, prompts, limit
        self._references: list[Reference] | None = None
        self._results: queue.SimpleQueue[Measured | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()

    def measure(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate `weights` by parameter name, rounded as they are served, in the target's dtype on its device."""
        if self._references is None:
            self._references = reference_answers(self._target, self._prompts, self._limit)
        drafter = drafter_of(self._spec, weights)
        drafter.to(SERVED_DTYPE).to(device=self._target.device, dtype=self._target.embedding.dtype).eval()
        return evaluate(self._target, drafter, self._references, check=self._check)

    def _check(self) -> None:
        if self._leave.is_set():
            raise _LeftError

    def start(self, weights: Mapping[str, Tensor], step: int) -> bool:
        """Evaluate in the background; False when the last evaluation still runs, so this one is left out."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(
            target=self._work, args=(weights, step), name="evaluator", daemon=True
        )
        self._thread.start()
        return True

    def _work(self, weights: Mapping[str, Tensor], step: int) -> None:
        try:
            faults.point("evaluator", "measure", step)
            self._results.put(Measured(step, self.measure(weights)))
        except _LeftError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by `finished` in the main thread
            blame(error, "evaluator")
            self._results.put(error)

    def finished(self) -> list[Measured]:
        """Evaluations that have ended since the last call; raises what one of them failed with."""
        results = []
        while not self._results.empty():
            result = self._results.get_nowait()
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def wait(self, seconds: float) -> None:
        """Let a running evaluation end.

        Raises:
            StallError: `seconds` passed.
        """
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            error = StallError(f"an evaluation has not ended within {seconds:g} s", thread_stacks())
            blame(error, "evaluator")
            raise error

    def leave(self, seconds: float) -> None:
        """Give up a running evaluation after the prompt it is at; the end of a failed run does not wait for it."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join(seconds)
