"""What a person is told when an output of the data commands cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftline.errors import ConfigError, DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disk_explained(path: Path, left: str) -> Iterator[None]:
    """Name a full disk; other errors pass.

    Args:
        path: what was to be written.
        left: what is there now.

    Raises:
        DiskFullError: no space or quota is left.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"no room left to write {path}: {error}; {left}. Free some space and run the same command again"
            ) from error
        raise


@contextmanager
def writing(path: Path, left: str) -> Iterator[None]:
    """As `full_disk_explained`, for a piece of work whose every OSError comes from writing `path`.

    Raises:
        DiskFullError: no space or quota is left.
        ConfigError: the path cannot be written for another reason.
    """
    try:
        with full_disk_explained(path, left):
            yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; {left}. Name another output") from error
