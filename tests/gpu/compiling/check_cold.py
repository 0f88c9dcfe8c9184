"""Cold threads at once in a fresh process: through the gate they all train, without it they do not.

`--gate off` is the mutation: the same program, the same threads, no gate. Its pass is a failure of the gate's
purpose, so the driver expects it to fail.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from harness import finish, options, run_threads
from workload import Trainer, devices

from draftline.compiling import cache_entries, gate, tripwire

NUM_STEPS = 20


def main() -> None:
    """Start the workers together and compare what they trained."""
    args = options(
        [("--workers", {"type": int, "default": 3}), ("--gate", {"choices": ["on", "off"], "default": "on"})]
    )
    tripwire.arm()
    start = threading.Barrier(args.workers)

    def enter(mode: str, name: str) -> AbstractContextManager[None]:
        if args.gate == "off":
            return nullcontext()
        if mode == "compiling":
            return gate.compiling(name, deadline_s=args.timeout)
        return gate.running(name, deadline_s=args.timeout)

    def work(name: str, device: torch.device) -> dict[str, object]:
        start.wait(30)
        with enter("compiling", name):
            trainer = Trainer(name, device)
            with trainer.active():
                trainer.warm_up()
        losses = []
        for _ in range(NUM_STEPS):
            with enter("running", name), trainer.active():
                losses.append(trainer.step().item())
        entries = cache_entries(trainer.compiled) if trainer.is_cuda else 1
        return {"last_loss": losses[-1], "entries": entries}

    workers = {f"worker-{i}": d for i, d in enumerate(devices(args.device, args.workers))}
    outcome = run_threads({n: lambda n=n, d=d: work(n, d) for n, d in workers.items()}, args.timeout)
    losses = [result["last_loss"] for result in outcome.results.values()] or [float("inf")]
    entries = [result["entries"] for result in outcome.results.values()]
    passed = (
        outcome.clean and entries == [1] * args.workers and max(losses) - min(losses) < 1e-3 * max(losses)
    )
    finish(f"cold threads, gate {args.gate}", passed, {**outcome.detail(), "results": outcome.results})


if __name__ == "__main__":
    main()
