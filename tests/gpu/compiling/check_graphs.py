"""Captured steps equal launched ones to the last bit, on threads that replay together, in flat memory.

Every worker captures inside the gate on its own thread; then all replay at once, under the seal and with
host synchronisation forbidden.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from harness import finish, options, run_threads
from torch import Tensor
from workload import NUM_QUERIES, WIDTH, Trainer, devices

from draftline.compiling import CapturedStep, LaunchedStep, Seal, Step, gate, seal, tripwire

NUM_COMPARED = 50
NUM_REPLAYS = 200


class Worker:
    """A launched trainer and a captured one with the same start and the same inputs."""

    def __init__(self, name: str, device: torch.device, timeout_s: float) -> None:
        with gate.compiling(name, deadline_s=timeout_s):
            generator = torch.Generator().manual_seed(1)
            self.inputs = torch.randn(NUM_COMPARED, NUM_QUERIES, WIDTH, generator=generator).to(device)
            launched = self._warm(f"{name}-launched", device)
            self.expected = self.compared_steps(launched, LaunchedStep(launched.step))
            self.trainer = self._warm(name, device)
            self.step: Step[Tensor] = LaunchedStep(self.trainer.step)
            if self.trainer.stream is not None:
                self.step = CapturedStep(self.trainer.step, owners=[self.trainer], stream=self.trainer.stream)

    def _warm(self, name: str, device: torch.device) -> Trainer:
        trainer = Trainer(name, device)
        with trainer.active():
            trainer.warm_up()
        return trainer

    def compared_steps(self, trainer: Trainer, step: Step[Tensor]) -> list[Tensor]:
        """Losses [NUM_COMPARED] and weights of steps on fresh inputs, without a host synchronisation."""
        with trainer.active():
            losses = torch.zeros(NUM_COMPARED, device=trainer.device)
            for i in range(NUM_COMPARED):
                trainer.x.copy_(self.inputs[i])
                losses[i].copy_(step.replay())
            return [losses, *(p.detach().clone() for p in trainer.layers.parameters())]

    def replay_long(self) -> None:
        """Many replays, with no wait of the host."""
        for _ in range(NUM_REPLAYS):
            self.step.replay()


class Phases:
    """What happens to the process between the workers' phases, while all of them stand still."""

    def __init__(self, num_workers: int, used: set[torch.device]) -> None:
        self.used = sorted((d for d in used if d.type == "cuda"), key=str)
        self.memory: list[list[int]] = []
        self.sealed: Seal | None = None
        self.all_captured = threading.Barrier(num_workers, action=self._seal)
        self.all_compared = threading.Barrier(num_workers, action=self._measure)
        self.all_launched = threading.Barrier(num_workers, action=self._allow_waiting)
        self.all_replayed = threading.Barrier(num_workers, action=self._measure)

    def _seal(self) -> None:
        self.sealed = seal()
        if self.used:
            torch.cuda.set_sync_debug_mode("error")

    def _allow_waiting(self) -> None:
        if self.used:
            torch.cuda.set_sync_debug_mode("default")

    def _measure(self) -> None:
        self.memory += [
            [
                torch.cuda.memory_allocated(d),
                torch.cuda.max_memory_allocated(d),
                torch.cuda.memory_reserved(d),
            ]
            for d in self.used
        ]

    @property
    def memory_is_flat(self) -> bool:
        """Tensors, their peak and the reserve after the long replay, equal to those before it."""
        half = len(self.memory) // 2
        return self.memory[:half] == self.memory[half:]


def work(name: str, device: torch.device, phases: Phases, timeout_s: float) -> dict[str, Any]:
    """One worker from capture to comparison."""
    worker = Worker(name, device, timeout_s)
    phases.all_captured.wait(timeout_s)
    seen = worker.compared_steps(worker.trainer, worker.step)
    phases.all_compared.wait(timeout_s)
    start = time.perf_counter()
    worker.replay_long()
    phases.all_launched.wait(timeout_s)
    worker.trainer.synchronize()
    replay_ms = (time.perf_counter() - start) / NUM_REPLAYS * 1e3
    phases.all_replayed.wait(timeout_s)
    different = [
        i for i, pair in enumerate(zip(worker.expected, seen, strict=True)) if not torch.equal(*pair)
    ]
    return {
        "different_tensors": different,  # 0 is the losses, then the weights
        "last_loss": seen[0][-1].item(),
        "loss_moved": bool(seen[0][0] != seen[0][-1]),
        "replay_ms": round(replay_ms, 4),
        "num_replays": worker.step.num_replays,
    }


def main() -> None:
    """Three workers, however many GPUs."""
    args = options()
    tripwire.arm()
    workers = {f"worker-{i}": device for i, device in enumerate(devices(args.device, 3))}
    phases = Phases(len(workers), set(workers.values()))
    outcome = run_threads(
        {name: lambda n=name, d=device: work(n, d, phases, args.timeout) for name, device in workers.items()},
        args.timeout,
    )
    same = all(not r["different_tensors"] and r["loss_moved"] for r in outcome.results.values())
    complete = len(outcome.results) == len(workers)
    violations = [str(v) for v in phases.sealed.violations] if phases.sealed else ["never sealed"]
    passed = outcome.clean and complete and same and phases.memory_is_flat and not violations
    detail = {
        "results": outcome.results,
        "memory_bytes": phases.memory,
        "memory_is_flat": phases.memory_is_flat,
        "violations": violations,
    }
    finish("captured equals launched", passed, {**outcome.detail(), **detail})


if __name__ == "__main__":
    main()
