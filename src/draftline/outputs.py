"""Files that a user names as outputs: one that exists is touched only if such a command wrote it."""

from __future__ import annotations

from pathlib import Path

from draftline.errors import ConfigError

_LOOKED_AT = 16384
"""Bytes of a file's beginning: of a page all that stands above its first document, however long its title."""
_PAGE = b"<!doctype html>\n"
_PAGE_SAYS = b"<p>Marked: what the target wrote, and so what the drafter learns.</p>"
_JOURNAL = b'{"id": "'


def refuse_other_page(path: Path) -> None:
    """Make sure that a page of documents replaces nothing but an earlier one.

    Raises:
        ConfigError: the file is something else.
    """
    found = _beginning(path)
    if found and not (found.startswith(_PAGE) and _PAGE_SAYS in found):
        raise ConfigError(
            f"{path} exists and is no page that `draftline inspect` wrote; writing it would delete that. Name another "
            "file"
        )


def refuse_other_journal(path: Path) -> None:
    """Make sure that rows are added to nothing but rows; a single line without an end would even be taken for one
    that a kill cut off, and be removed.

    Raises:
        ConfigError: the file is something else.
    """
    found = _beginning(path)
    if not (found.startswith(_JOURNAL) or _JOURNAL.startswith(found)):
        raise ConfigError(f"{path} exists and was not written by this command; name another output file")


def _beginning(path: Path) -> bytes:
    """Nothing of what is not there, is no file, or is a pipe, which would wait for a writer."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(_LOOKED_AT)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read, so nobody knows what would be lost ({error.strerror}); name another file"
        ) from error
