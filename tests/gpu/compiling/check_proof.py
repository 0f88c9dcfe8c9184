"""A worker is proved by its kernels, or refused before its first step with exit code 9.

`--worker` says what it runs: `flex` (compiled, proved), `checkpoint` (compiled, forward recomputed in
autograd's threads), `nograd` (warm-up without gradients first), `captured` (a replayed graph, proved by the
same kernels), `eager` (flex that nobody compiled) and `sdpa` (a dense kernel where flex was promised).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from harness import finish, options, run_threads
from torch import Tensor
from workload import Trainer, devices, flex, sdpa

from draftline.compiling import CapturedStep, gate, prepare_profiler, prove, tripwire


def work(kind: str, device: torch.device, timeout_s: float) -> dict[str, Any]:
    """Build, warm up and prove one worker, as a program would."""
    with gate.compiling(f"worker-{kind}", deadline_s=timeout_s):
        trainer = Trainer(f"worker-{kind}", device)
        trainer.checkpointed = kind == "checkpoint"
        trainer.attention = {"eager": flex, "sdpa": sdpa}.get(kind, trainer.compiled)
        with trainer.active():
            if kind == "nograd":
                without_gradients(trainer)
            trainer.warm_up()
            step = trainer.step if kind != "captured" else captured(trainer)
            return asdict(prove(step, expect=trainer.expectation(), device=device))


def captured(trainer: Trainer) -> Callable[[], Tensor]:
    """The step as a graph."""
    if trainer.stream is None:
        return trainer.step
    return CapturedStep(trainer.step, owners=[trainer], stream=trainer.stream).replay


def without_gradients(trainer: Trainer) -> None:
    """Fills the cache with an entry that training cannot use."""
    x = trainer.x
    with torch.no_grad():
        for layer in trainer.layers:
            x = layer(x, trainer.context, trainer.block_mask, trainer.attention)


def main() -> None:
    """Prove one worker on a thread of its own."""
    kinds = ["flex", "checkpoint", "nograd", "captured", "eager", "sdpa"]
    args = options([("--worker", {"choices": kinds, "default": "flex"})])
    tripwire.arm()
    prepare_profiler()
    (device,) = devices(args.device, 1)
    outcome = run_threads({"worker": lambda: work(args.worker, device, args.timeout)}, args.timeout)
    detail = {**outcome.detail(), "proof": outcome.results.get("worker")}
    finish(f"proof of a {args.worker} worker", outcome.clean, detail, outcome.errors.get("worker"))


if __name__ == "__main__":
    main()
