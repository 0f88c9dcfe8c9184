"""What a finished run leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from draftline.decoding.evaluate import Evaluation


@dataclass(frozen=True)
class Trained:
    """What a finished run leaves."""

    folder: Path
    drafter: Path
    """The exported drafter, in serving layout."""
    steps: int
    loss: float | None
    """Of the last step, nats."""
    seconds: float
    """Of the training loop in this process."""
    tokens_per_s: float
    """Target tokens, padding excluded."""
    before: Evaluation | None
    after: Evaluation | None
    """Of the exported drafter."""
    exported_step: int
    """Steps of the drafter that was exported: the last one, or that of the best evaluation."""
    skipped_checkpoints: int
    """Checkpoints that found no room on the disk (`checkpoint.on_disk_full: continue`)."""
    skipped_documents: int
    """Documents of corrupt shards (`data.on_corrupt: skip`)."""


def show_trained(trained: Trained, console: Console) -> None:
    """What a finished run leaves, for a person."""
    lines = {
        "drafter": f"{trained.drafter} (after step {trained.exported_step})",
        "steps": f"{trained.steps} in {trained.seconds:.0f} s here"
        if trained.seconds >= 1
        else f"{trained.steps}",
        "loss": None if trained.loss is None else f"{trained.loss:.4f} in the last step",
        "tau before": trained.before and _tau(trained.before),
        "tau after": trained.after and _tau(trained.after),
        "checkpoints skipped": trained.skipped_checkpoints or None,
        "documents skipped": trained.skipped_documents or None,
    }
    for name, value in lines.items():
        if value is not None:
            console.print(f"{name:20} {value}", soft_wrap=True, markup=False)


def _tau(evaluation: Evaluation) -> str:
    overall = evaluation.overall
    return f"{overall.tau:.2f} tokens a verify step (95 % {overall.tau_low:.2f} to {overall.tau_high:.2f})"
