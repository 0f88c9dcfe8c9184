"""One class per failure a user can meet, each with the exit code of the process.

A message names the value, the reason and the fix. `draftline` prints it without a traceback;
anything that is not a DraftlineError is a bug and is shown with its traceback (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

INTERRUPTED = 130
"""Exit code of Ctrl-C where there was nothing to save, as shells have it."""
INTERRUPTED_CAUSE = "interrupted; what is finished stays as it is, and the same command may be run again"
"""What a person is told of it, whatever the command was doing."""
BLAME = "worker: "
"""How the note that names the failed worker begins."""


@dataclass(frozen=True)
class Blame:
    """Whose failure an error is."""

    worker: str
    row: int | None = None
    """Row that was being worked on."""


def blame(error: BaseException, worker: str, row: int | None = None) -> None:
    """Record on an error whose it is, for `result.json` and, as a note, for people; the first record stays."""
    if blame_of(error) is None:
        error.__dict__["blame"] = Blame(worker, row)
        error.add_note(f"{BLAME}{worker}" + ("" if row is None else f", row {row}"))


def blame_of(error: BaseException) -> Blame | None:
    """What `blame` recorded."""
    return error.__dict__.get("blame")


class DraftlineError(Exception):
    """Any failure that Draftline explains itself."""

    exit_code = 1


class ConfigError(DraftlineError):
    """A setting, a flag or a path that cannot work."""

    exit_code = 2


class OccupiedError(ConfigError):
    """An output that holds something else, such as another run; nothing in it was changed."""


class FolderInUseError(DraftlineError):
    """Another process owns the output folder."""

    exit_code = 3


class DataError(DraftlineError):
    """Training data that is missing, malformed or corrupt."""

    exit_code = 4


class NonFiniteError(DraftlineError):
    """A loss or gradient that is NaN or infinite; the update was withheld."""

    exit_code = 5
    saved: Path | None = None
    """Folder of the step, for `draftline replay`."""


class StallError(DraftlineError):
    """A wait that passed its deadline."""

    exit_code = 6

    def __init__(self, message: str, stacks: str | None = None) -> None:
        """`stacks`: every worker's last act and every thread's stack, when the error was found in time for them."""
        super().__init__(message)
        self.stacks = stacks


class OutOfMemoryError(DraftlineError):
    """A device has too little memory for the plan."""

    exit_code = 7


class DiskFullError(DraftlineError):
    """There is no room for what must be written."""

    exit_code = 8


class AttentionFallbackError(DraftlineError):
    """Attention did not run as the kernel that was promised, or something compiled after the seal."""

    exit_code = 9


class CheckpointError(DraftlineError):
    """A checkpoint, drafter or target folder that is incomplete or does not fit."""

    exit_code = 10


class ServerError(DraftlineError):
    """A generation server that cannot be reached, or that fails row after row."""

    exit_code = 11


class Interrupted(DraftlineError):
    """Stopped by a signal with a checkpoint saved; run the same command again to go on."""

    exit_code = 75
