"""One class per failure a user can meet, each with the exit code of the process.

A message names the value, the reason and the fix. `draftline` prints it without a traceback;
anything that is not a DraftlineError is a bug and is shown with its traceback (exit code 1).
"""


class DraftlineError(Exception):
    """Any failure that Draftline explains itself."""

    exit_code = 1


class ConfigError(DraftlineError):
    """A setting, a flag or a path that cannot work."""

    exit_code = 2


class FolderInUseError(DraftlineError):
    """Another process owns the output folder."""

    exit_code = 3


class DataError(DraftlineError):
    """Training data that is missing, malformed or corrupt."""

    exit_code = 4


class NonFiniteError(DraftlineError):
    """A loss or gradient that is NaN or infinite; the update was withheld."""

    exit_code = 5


class StallError(DraftlineError):
    """A wait that passed its deadline."""

    exit_code = 6


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
