"""Every error becomes one exit code and one cause, with the worker and row that were noted on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from draftline.errors import (
    Blame,
    ConfigError,
    DiskFullError,
    Interrupted,
    OutOfMemoryError,
    StallError,
    blame,
    blame_of,
)
from draftline.resilience.ending import exit_code, explained, failed


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError, 7),
        (MemoryError("no"), OutOfMemoryError, 7),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl"), DiskFullError, 8),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), DiskFullError, 8),
        (OSError(errno.EIO, os.strerror(errno.EIO)), OSError, 1),
        (ConfigError("x"), ConfigError, 2),
        (Interrupted("x"), Interrupted, 75),
        (KeyboardInterrupt(), KeyboardInterrupt, 130),
        (SystemExit(3), SystemExit, 1),
        (ValueError("a bug"), ValueError, 1),
    ],
)
def test_an_error_has_its_exit_code(error: BaseException, kind: type[BaseException], code: int):
    blame(error, "drafter-1", 17)
    error.add_note("then drafter-0: because of it")
    known = explained(error)
    assert type(known) is kind
    assert exit_code(known) == code
    result = failed(known, ("draftline",), step=4, checkpoint=Path("run/checkpoints/step-000004"))
    assert (result.exit_code, result.worker, result.row, result.step) == (code, "drafter-1", 17, 4)
    assert result.cause
    assert result.consequences == ("then drafter-0: because of it",)
    assert result.checkpoint == "run/checkpoints/step-000004"


def test_out_of_memory_names_the_worker_and_what_to_lower():
    error = torch.OutOfMemoryError("tried to allocate 2 GiB")
    blame(error, "drafter-1", 3)
    message = str(explained(error))
    assert message.startswith("drafter-1 ran out of device memory: tried to allocate 2 GiB")
    assert "rows.block_budget" in message


def test_only_the_first_blame_counts():
    error = ValueError()
    blame(error, "target-0", 5)
    blame(error, "drafter-0", 6)
    assert blame_of(error) == Blame("target-0", 5)
    assert error.__notes__ == ["worker: target-0, row 5"]


def test_the_stacks_of_a_stall_are_kept():
    assert failed(StallError("no progress", "threads:\n"), ()).stacks == "threads:\n"
