"""Rows built ahead of the worker that needs them, by a few host threads.

The threads are workers like all others: the supervisor starts them, names them when a row cannot be built,
and lets none of them hold up the end of the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

from draftline.data.rows import Row, RowSource
from draftline.pipeline.supervise import Abort
from draftline.resilience import faults

ROWS_AHEAD = 3
"""Rows that wait built in front of each worker; building one takes a few milliseconds."""


class RowLoader:
    """Builds rows in the order in which they are asked for; any number of threads may `run` it."""

    def __init__(self, source: RowSource, abort: Abort) -> None:
        self._source, self._abort = source, abort
        self._condition = abort.condition()
        self._wanted: deque[int] = deque()
        self._built: dict[int, Row] = {}

    def ask(self, index: int) -> None:
        """Have a row built; each row is asked for once and taken once."""
        with self._condition:
            self._wanted.append(index)
            self._condition.notify_all()

    @property
    def num_wanted(self) -> int:
        """Rows that no thread has begun to build."""
        return len(self._wanted)

    def take(self, index: int, seconds: float) -> Row:
        """A row that was asked for.

        Raises:
            StallError, AbortedError: see `Abort.wait`.
        """
        with self._condition:
            self._abort.wait(
                self._condition, lambda: index in self._built, seconds, f"row {index} from the loader"
            )
            return self._built.pop(index)

    def run(self) -> NoReturn:
        """The loop of one loader thread; it ends with the run.

        Raises:
            DataError: a row's documents are corrupt.
            AbortedError: the run is ending.
        """
        while True:
            with self._condition:
                # no deadline: the workers that need rows have their own
                self._abort.wait(
                    self._condition, lambda: bool(self._wanted), threading.TIMEOUT_MAX, "rows to build"
                )
                index = self._wanted.popleft()
            row = self._build(index)
            with self._condition:
                self._built[index] = row
                self._condition.notify_all()

    def _build(self, index: int) -> Row:
        name, watchdog = threading.current_thread().name, self._abort.watchdog
        watchdog.beat(name, "row", index)
        faults.point("loader", "row", index)
        row = self._source.row(index)
        watchdog.leave(name)  # an idle loader is not watched
        return row


class RowFeed:
    """The given rows in order, each asked for before it is needed."""

    def __init__(self, loader: RowLoader, indices: Iterator[int], seconds: float) -> None:
        self._loader, self._indices, self._seconds = loader, indices, seconds
        self._pending: deque[int] = deque()
        self._fill()

    def _fill(self) -> None:
        while len(self._pending) < ROWS_AHEAD:
            index = next(self._indices, None)
            if index is None:
                return
            self._pending.append(index)
            self._loader.ask(index)

    def next(self) -> Row | None:
        """The next row, or None after the last.

        Raises:
            StallError: the loader took longer than the deadline.
            AbortedError: the run is ending, perhaps because the row could not be built.
        """
        if not self._pending:
            return None
        index = self._pending.popleft()
        self._fill()
        return self._loader.take(index, self._seconds)
