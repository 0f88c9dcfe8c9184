"""`result.json`: how a run ended, for scripts and for whoever finds the folder later."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from draftline.config import Frozen
from draftline.console import tell
from draftline.resilience.fsio import FileSystem, replace_bytes
from draftline.resilience.redact import redact, redact_argv
from draftline.resilience.sealed import canonical

RESULT = "result.json"


class RunResult(Frozen):
    """One cause and one exit code (errors.py)."""

    exit_code: int = Field(ge=0)
    cause: str
    """One sentence: what ended the run."""
    error: str | None = None
    """Class of the error, none when the run finished."""
    worker: str | None = None
    """Worker that failed first."""
    step: int | None = None
    """Optimizer steps done."""
    row: int | None = None
    """Row that was being worked on."""
    checkpoint: str | None = None
    """Newest intact checkpoint, from which the same command goes on."""
    consequences: tuple[str, ...] = ()
    """What failed afterwards because of the cause."""
    command: tuple[str, ...] = ()
    """Command line of the run."""
    stacks: str | None = None
    """Stacks of all threads, when the run stalled."""
    replay: str | None = None
    """Folder of the step that was not finite, for `draftline replay`."""
    skipped_checkpoints: int = 0
    """Checkpoints that found no room on the disk while `checkpoint.on_disk_full` is `continue`."""
    skipped_documents: int = 0
    """Documents of corrupt shards that were left out because `data.on_corrupt` is `skip`."""


def write_result(folder: Path, result: RunResult) -> None:
    """Write `result.json` with secrets redacted.

    A disk that refuses is reported on stderr only: it must not replace the cause of the run's end.
    """
    body = redact(result.model_dump(mode="json")) | {"command": redact_argv(result.command)}
    try:
        replace_bytes(FileSystem(), folder / RESULT, canonical(body))
    except OSError as error:
        tell(f"draftline: {folder / RESULT} could not be written: {error}")
