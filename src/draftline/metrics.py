"""Metrics of a run: one JSON object per line in `metrics.jsonl`, names as in docs/metrics.md.

The prefix before the first slash is the section in TensorBoard and W&B; positions are zero-padded so that they
sort. `progress/*` comes with every record, so that steps, tokens and seconds can each be the x axis.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from draftline.decoding.evaluate import Evaluation
from draftline.drafter.stats import StepStats
from draftline.drafter.worker import StepRecord
from draftline.resilience.folder import METRICS
from draftline.resilience.fsio import FileSystem, replace_bytes


@dataclass
class Progress:
    """How far a run is; the same in every record."""

    step: int = 0
    tokens_target: int = 0
    """Tokens that the target has read, padding excluded."""
    blocks: int = 0
    """Blocks trained on so far."""
    started: float = 0.0

    def fields(self) -> dict[str, float]:
        """As metrics."""
        return {
            "progress/step": self.step,
            "progress/tokens_target": self.tokens_target,
            "progress/blocks": self.blocks,
            "progress/seconds": time.monotonic() - self.started,
        }


class Rate:
    """Tokens a second of this process, since the end of its first step: start-up and the steps before a resume, whose
    seconds or tokens are another's, do not count."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def after_step(self, tokens: int, now: float) -> float | None:
        """The rate at a step's end; None at the first.

        Args:
            tokens: `Progress.tokens_target`.
            now: seconds of one clock.
        """
        if self._first is None:
            self._first = tokens, now
            return None
        first_tokens, first_time = self._first
        return (tokens - first_tokens) / max(1e-9, now - first_time)


def train_metrics(record: StepRecord, stats: StepStats) -> dict[str, float]:
    """Metrics of one optimizer step."""
    metrics = {
        "train/loss": stats.loss,
        "train/accept_anchor_mean": stats.accept_anchor_mean,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/blocks": stats.num_blocks,
    }
    for name, values in (("ce", stats.ce_pos), ("top1", stats.top1_pos), ("prefix", stats.prefix_pos)):
        metrics.update({f"train/{name}_pos/{slot:02d}": value for slot, value in enumerate(values, start=1)})
    return metrics


def eval_metrics(evaluation: Evaluation, accept_anchor_mean: float | None = None) -> dict[str, float]:
    """Metrics of one evaluation on held-out prompts.

    Args:
        accept_anchor_mean: what training says at that time, for the gap between the two.
    """
    overall = evaluation.overall
    metrics = {
        "eval/tau": overall.tau,
        "eval/tau_low": overall.tau_low,
        "eval/tau_high": overall.tau_high,
        "eval/tau_macro": overall.tau_macro,
        "eval/ce": evaluation.ce,
        "eval/verify_steps": float(overall.verify_steps),
    }
    if accept_anchor_mean is not None:
        metrics["eval/tau_train_gap"] = accept_anchor_mean - overall.tau
    at_least = (1.0, *overall.accept_pos, 0.0)
    for slot in range(len(at_least) - 1):
        metrics[f"eval/accept_len_hist/{slot:02d}"] = at_least[slot] - at_least[slot + 1]
        if slot:
            metrics[f"eval/accept_pos/{slot:02d}"] = at_least[slot]
    for name, found in evaluation.slices.items():
        metrics |= {f"eval/tau/{name}": found.tau, f"eval/tau_macro/{name}": found.tau_macro}
    return metrics


class MetricsLog:
    """Appends to `metrics.jsonl`; a resumed run goes on in the same file, after the step that it resumes."""

    def __init__(self, folder: Path, step: int = 0, *, say: Callable[[str], None]) -> None:
        """Forget what an ended process wrote after `step`, and the line that a kill cut off: both come again.

        Args:
            folder: The run's.
            step: Optimizer steps done.
            say: Told when the file had to be written again.
        """
        self._path, self._say = folder / METRICS, say
        kept = _lines_until(folder / METRICS, step)
        self.evaluated = {int(line["eval/step"]) for line in kept if "eval/step" in line}
        """Steps whose evaluation is in the file."""
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_bytes(FileSystem(), folder / METRICS, text.encode())
        self._file = self._open()
        self._size = _size(self._file)
        self._is_barred = False

    def write(self, progress: Progress, metrics: dict[str, float]) -> None:
        """One line: where the run is, and the figures."""
        self._look_after()
        self._file.write(json.dumps(progress.fields() | metrics) + "\n")
        self._file.flush()
        self._size = _size(self._file)

    def _look_after(self) -> None:
        """Notice what somebody did to the file. A folder that is gone is the checkpoints' to report."""
        if not self._path.parent.is_dir():
            return
        if not _is_at(self._path, self._file):
            self._put_back()
        elif _size(self._file) < self._size:
            lost = self._size - _size(self._file)
            self._say(
                f"{self._path} was cut under the run: {lost} bytes of its lines are lost, and it goes on from here"
            )

    def _put_back(self) -> None:
        """Write every line again if the file was removed, moved or replaced: in the open one, nobody would see them."""
        self._file.seek(0)
        try:
            replace_bytes(FileSystem(), self._path, self._file.read().encode())
        except IsADirectoryError:
            if not self._is_barred:
                self._say(
                    f"{self._path} is a folder now, so that the run's metrics cannot be written there; remove it, and "
                    "all lines are written again"
                )
            self._is_barred = True
            return
        self._file.close()
        self._file = self._open()
        self._is_barred = False
        self._say(f"{self._path} was removed or replaced under the run; all its lines are written again")

    def _open(self) -> TextIO:
        # whoever took the file away may have written anything into it
        return self._path.open("a+", encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _size(file: TextIO) -> int:
    return os.fstat(file.fileno()).st_size


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _lines_until(path: Path, step: int) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    lines = [_line(text) for text in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [line for line in lines if line is not None and line["progress/step"] <= step]


def _line(text: str) -> dict[str, float] | None:
    """A record, or None for one that was cut off and for what somebody else wrote."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and "progress/step" in line else None
