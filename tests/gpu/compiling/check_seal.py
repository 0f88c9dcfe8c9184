"""What a worker, or a stranger, can do wrong after the seal, and that the other workers do not notice."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from harness import finish, options, run_threads
from workload import NUM_CONTEXT, Trainer, devices, flex

from draftline.compiling import gate, seal, tripwire, unseal

NUM_STEPS = 30


def new_shape(trainer: Trainer) -> None:
    """Half the context: a shape that was never compiled."""
    trainer.set_context(NUM_CONTEXT // 2)
    trainer.step()


def other_grad_mode(trainer: Trainer) -> None:
    """The warm-up trained; a forward without gradients is another entry."""
    with torch.no_grad():
        trainer.step()


def eager_flex(trainer: Trainer) -> None:
    """A stranger that forgot to compile, with gradients: it would trace at every call."""
    trainer.attention = flex
    trainer.step()


GUARD = r"thread offender would compile \S+_worker_2 .* after the seal: (?!it has never been compiled)"
MISTAKES: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "new-shape": (new_shape, GUARD),
    "grad-mode": (other_grad_mode, f"{GUARD}.*grad"),
    "eager-flex": (eager_flex, "thread offender would compile .*flex_attention_hop_wrapper"),
}
"""What is done, and a regular expression for the refusal."""


def main() -> None:
    """Two workers train on while a third thread makes each mistake."""
    args = options()
    tripwire.arm()
    trainers = [build(f"worker-{i}", d, args.timeout) for i, d in enumerate(devices(args.device, 3))]
    steady, offender = trainers[:2], trainers[2]
    sealed = seal()
    refused = {}
    mistakes = dict(MISTAKES)
    if args.device == "cpu":
        del mistakes["eager-flex"]  # flex_attention does not train on a CPU
    for name, (mistake, reason) in mistakes.items():
        outcome = run_threads(
            {"offender": lambda m=mistake: attempt(offender, m)}
            | {t.name: lambda t=t: train(t) for t in steady},
            args.timeout,
        )
        message = str(outcome.errors.pop("offender", "nothing was raised"))
        refused[name] = {
            "as_expected": bool(re.search(reason, message, flags=re.DOTALL)) and outcome.clean,
            "message": message[:400],
            "others": outcome.detail(),
        }
    num_violations = len(sealed.violations)
    unseal()
    passed = all(entry["as_expected"] for entry in refused.values()) and num_violations == len(mistakes)
    finish("seal", passed, {"violations": num_violations, "refused": refused})


def build(name: str, device: torch.device, timeout_s: float) -> Trainer:
    """A warm trainer."""
    with gate.compiling(name, deadline_s=timeout_s):
        trainer = Trainer(name, device)
        with trainer.active():
            trainer.warm_up()
    return trainer


def attempt(trainer: Trainer, mistake: Callable[[Trainer], None]) -> None:
    """Make the mistake; the error is passed on."""
    context, attention = (trainer.context, trainer.anchors, trainer.block_mask), trainer.attention
    try:
        with trainer.active():
            mistake(trainer)
    finally:
        trainer.attention = attention
        trainer.context, trainer.anchors, trainer.block_mask = context


def train(trainer: Trainer) -> float:
    """What the other workers do meanwhile."""
    with trainer.active():
        for _ in range(NUM_STEPS):
            loss = trainer.step().item()
    return loss


if __name__ == "__main__":
    main()
