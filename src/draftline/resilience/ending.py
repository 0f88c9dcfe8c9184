"""How a run ends: any error as its user meets it, and what `result.json` says of it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import torch

from draftline.errors import (
    BLAME,
    INTERRUPTED,
    DiskFullError,
    DraftlineError,
    NonFiniteError,
    OutOfMemoryError,
    StallError,
    blame_of,
)
from draftline.resilience.result import RunResult


def explained(error: BaseException) -> BaseException:
    """The error that a user should meet: memory and disk by name, everything else as it is.

    What was noted on the original, its worker first of all, is noted on the new one too.
    """
    known = _named(error)
    if known is None:
        return error
    known.__dict__.update(error.__dict__)
    known.__cause__ = error
    return known


def _named(error: BaseException) -> DraftlineError | None:
    blamed = blame_of(error)
    who = blamed.worker if blamed else "the main thread"
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemoryError(
            f"{who} ran out of device memory: {error}. Lower rows.block_budget, loss.chunk_rows or "
            "rows.token_budget, or give the worker a device of its own"
        )
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{who} ran out of host memory: {error}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"the disk is full: {error}. Checkpoints already there are untouched; free some space and run the "
            "same command again"
        )
    return None


def failed(
    error: BaseException,
    command: Sequence[str],
    step: int | None = None,
    checkpoint: Path | None = None,
    skipped_checkpoints: int = 0,
    skipped_documents: int = 0,
) -> RunResult:
    """What `result.json` says of a run that ended with `error`."""
    blamed = blame_of(error)
    notes = getattr(error, "__notes__", [])
    return RunResult(
        exit_code=exit_code(error),
        cause=str(error) or type(error).__name__,
        error=type(error).__name__,
        worker=blamed.worker if blamed else None,
        step=step,
        row=blamed.row if blamed else None,
        checkpoint=str(checkpoint) if checkpoint else None,
        consequences=tuple(note for note in notes if not note.startswith(BLAME)),
        command=tuple(command),
        stacks=error.stacks if isinstance(error, StallError) else None,
        replay=str(error.saved) if isinstance(error, NonFiniteError) and error.saved else None,
        skipped_checkpoints=skipped_checkpoints,
        skipped_documents=skipped_documents,
    )


def exit_code(error: BaseException) -> int:
    """Exit code of the process that ends with `error`."""
    if isinstance(error, DraftlineError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
