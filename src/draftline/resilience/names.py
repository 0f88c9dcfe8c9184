"""Names that came from a file: one plain component inside its folder, or an error.

A checkpoint, an index or a manifest may have been edited by anyone. `../../etc/x`, an absolute path, a link
out of the folder or a device would let it read what it was not given.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}", re.ASCII)


class UnsafeNameError(ValueError):
    """A file name that is not one plain path component, or a file that is not a regular one."""


def plain_name(name: str) -> str:
    """Return `name` if it is one path component of letters, digits and `_.+-` that starts with none of `.+-`.

    Raises:
        UnsafeNameError: anything else, such as `../x`, `/etc/passwd`, `a/b`, an empty or a hidden name.
    """
    if not _PLAIN.fullmatch(name):
        raise UnsafeNameError(f"file name {name!r} is not a plain name inside its folder")
    return name


def read_regular(folder: Path, name: str, max_bytes: int) -> bytes:
    """Read a whole regular file of `folder`, following no link and never blocking on a pipe or device.

    Raises:
        UnsafeNameError: the name is not plain, or the file is a link, folder, pipe or device.
        ValueError: the file is larger than `max_bytes`.
        OSError: it is missing or cannot be read.
    """
    path = folder / plain_name(name)
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeNameError(f"{name} is a link, a folder or a device, not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"{name} has {status.st_size} bytes, more than {max_bytes}")
    # Should it be exchanged just now: no link is followed, and opening a pipe does not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(status.st_size)
