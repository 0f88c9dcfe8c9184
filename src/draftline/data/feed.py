"""Rows built ahead of the worker that needs them, by a few host threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from draftline.data.rows import Row, RowSource
from draftline.errors import StallError

ROWS_AHEAD = 3
"""Rows that wait built in front of each worker; building one takes a few milliseconds."""


class RowFeed:
    """The given rows in order, each built before it is asked for."""

    def __init__(self, source: RowSource, indices: Iterator[int], pool: ThreadPoolExecutor, seconds: float) -> None:
        self._source, self._indices, self._pool, self._seconds = source, indices, pool, seconds
        self._pending: deque[tuple[int, Future[Row]]] = deque()
        self._fill()

    def _fill(self) -> None:
        while len(self._pending) < ROWS_AHEAD:
            index = next(self._indices, None)
            if index is None:
                return
            self._pending.append((index, self._pool.submit(self._source.row, index)))

    def next(self) -> Row | None:
        """The next row, or None after the last.

        Raises:
            DataError: the row's documents are corrupt.
            StallError: the loader took longer than the deadline.
        """
        if not self._pending:
            return None
        index, future = self._pending.popleft()
        self._fill()
        try:
            return future.result(self._seconds)
        except FutureTimeoutError:
            raise StallError(f"the loader did not build row {index} within {self._seconds:.0f} s") from None
