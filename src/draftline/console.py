"""What a person sees: a status line that lives on a terminal and plain lines everywhere else."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

PLAIN_EVERY_S = 5.0
"""Seconds between progress lines when the output is not a terminal."""
FOLDED = 12
"""Columns into which words of a table may be folded."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Text of others for a terminal: control characters are shown as escapes, so that none of them acts on it.

    Line ends and tabs stay.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def fitting(table: Table, console: Console) -> RenderableType:
    """A table, or every row of it as lines where the console is too narrow: no figure is ever cut.

    Columns that are `no_wrap` hold figures and keep their width; the words in the others may be folded. Cells are
    markup: words from elsewhere are escaped.
    """
    for column in table.columns:
        column.overflow = "fold"
    roomy = console.options.update(width=sum(map(_width, table.columns)) + 100)
    folded = sum(max(0, _width(column) - FOLDED) for column in table.columns if not column.no_wrap)
    if Measurement.get(console, roomy, table).maximum - folded <= console.width:
        return table
    return Group(*([table.title] if table.title else []), *_stacked(table))


def _width(column: Column) -> int:
    texts = [column.header, *column.cells]
    return max(cell_len(line) for text in texts for line in Text.from_markup(str(text)).plain.split("\n"))


def _stacked(table: Table) -> Iterator[Text]:
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        first, *rest = map(str, cells)
        if not table.show_header:
            yield Text.from_markup("  ".join((first, *rest)))
            continue
        yield Text.from_markup(first)
        for heading, cell in zip(headings[1:], rest, strict=True):
            if cell:
                yield Text.from_markup(f"  {heading}: {cell}")


class OutputClosedError(BrokenPipeError):
    """Nobody reads standard output any more."""


def tell(text: str, *, results: bool = False) -> None:
    """Say on standard error, or where results go, how a command ends: it ends so also when nobody reads it."""
    stream = sys.stdout if results else sys.stderr
    try:
        print(text if results else visible(text), file=stream, flush=True)
    except BrokenPipeError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Send what a closed stream still holds nowhere: the interpreter flushes it once more, and would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Output(Console):
    """Standard output for people. When nobody reads it any more the command ends (OutputClosedError)."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet, highlight=False)

    def on_broken_pipe(self) -> None:
        """Called while the error is handled; rich itself would end the process with code 1."""
        raise OutputClosedError


class Status(Console):
    """Standard error. What it tells is also in files, so a run goes on when nobody reads it any more."""

    def __init__(self, *, quiet: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=True, quiet=quiet, highlight=False, soft_wrap=soft_wrap)

    def on_broken_pipe(self) -> None:
        """Called while the error is handled; rich itself would end the process with code 1."""
        self.quiet = True


class Screen:
    """Messages and one progress bar on standard error; standard output stays free for results."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console: Console = Status(quiet=quiet)

    def say(self, text: str) -> None:
        """A line for a person; in a log it stays one line, however long it is."""
        self.console.print(visible(text), markup=False, soft_wrap=not self.console.is_terminal)

    def progress(self, what: str, total: int | None, done: int = 0) -> Bar:
        """A progress bar, as a context manager; `total` None where the end is not known."""
        return Bar(self.console, what, total, done)

    @contextmanager
    def counting(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A progress bar for work that only tells how many of its parts are done."""
        with self.progress(what, total) as bar:
            yield lambda done: bar.update(done, "")


class Bar:
    """Progress of something: live on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, what: str, total: int | None, done: int) -> None:
        self._console, self._what, self._total, self._start = console, what, total, done
        self._last = time.monotonic()
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(what, total=total, completed=done, detail="")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, done: int, detail: str) -> None:
        """Show how far it is, with a few words of detail."""
        self._live.update(self._task, completed=done, detail=detail)
        now = time.monotonic()
        due = now - self._last >= PLAIN_EVERY_S or done == self._total
        if not self._console.is_terminal and due:
            self._last = now
            of = "" if self._total is None else f"/{self._total}"
            self._console.print(f"{self._what} {done}{of}  {detail}".rstrip(), markup=False, soft_wrap=True)
