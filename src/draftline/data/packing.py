"""Which documents a row holds, from lengths and a seed alone.

The store is read pass after pass, each in its own shuffled order. A pass is cut into windows of about
WINDOW_DOCUMENTS documents, and each window is packed by itself. A window never crosses the end of a pass:
therefore every pass holds each document exactly once, in whole rows, and no row holds a document twice.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict

import numpy as np

from draftline.data.order import Purpose, raw_draws, shuffled

WINDOW_DOCUMENTS = 1024
"""Enough to pack real length mixes above 99 %, few enough that one window packs in about a millisecond."""

KEPT_WINDOWS = 8
"""Packed windows in memory; neighbouring rows come from the same window."""

Rows = list[np.ndarray]  # documents of each row, int64


def pack(lengths: np.ndarray, priorities: np.ndarray, token_budget: int) -> list[list[int]]:
    """Best fit: the item numbers of each row; no item is cut.

    Args:
        lengths: tokens of each item, none above `token_budget`, int [items].
        priorities: items are placed from the highest down; rows fill best when that is nearly the order of
            the lengths, int64 [items].
        token_budget: tokens that a row holds.
    """
    rows: list[list[int]] = []
    # Sorted, each entry free tokens x number of items + row: one bisection finds the tightest fit.
    free: list[int] = []
    base = len(lengths)
    order = np.argsort(-priorities, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fit = bisect.bisect_left(free, length * base)
        if fit == len(free):
            room, row = token_budget, len(rows)
            rows.append([])
        else:
            room, row = divmod(free.pop(fit), base)
        rows[row].append(item)
        bisect.insort(free, (room - length) * base + row)
    return rows


class RowIndex:
    """From a row's number to its documents. Thread safe; keeps one integer per window seen."""

    def __init__(self, lengths: np.ndarray, token_budget: int, seed: int) -> None:
        """`lengths`: tokens of each document, none above `token_budget`, int32 [documents], at least one."""
        self._lengths = lengths
        self._token_budget = token_budget
        self._seed = seed
        self._windows_per_pass = -(-len(lengths) // WINDOW_DOCUMENTS)
        self._lock = threading.Lock()
        self._first_row = [0]  # of each window so far, and of the next
        self._packed: OrderedDict[int, Rows] = OrderedDict()

    def documents(self, row: int) -> np.ndarray:
        """Store numbers of the documents of a row, int64. Asking for a far row packs all before it."""
        with self._lock:
            while self._first_row[-1] <= row:
                self._rows_of(len(self._first_row) - 1)
            window = bisect.bisect_right(self._first_row, row) - 1
            return self._rows_of(window)[row - self._first_row[window]]

    def rows_in(self, epochs: float) -> int:
        """The fewest rows, from the first on, that hold `epochs` x documents documents (at least one).

        Packs every window of that many passes: about three seconds per million documents.
        """
        wanted = max(1, round(epochs * len(self._lengths)))
        window = self._window_of(wanted - 1)
        with self._lock:
            while len(self._first_row) <= window:
                self._rows_of(len(self._first_row) - 1)
            sizes = [len(row) for row in self._rows_of(window)]
            held = np.cumsum(sizes) + self._first_document(window)
            return self._first_row[window] + int(np.searchsorted(held, wanted)) + 1

    def _first_document(self, window: int) -> int:
        """Documents of the endless stream before a window."""
        passes, within = divmod(window, self._windows_per_pass)
        return passes * len(self._lengths) + within * len(self._lengths) // self._windows_per_pass

    def _window_of(self, position: int) -> int:
        """The window that holds a position of the endless stream; inverse of `_first_document`."""
        passes, rest = divmod(position, len(self._lengths))
        within = ((rest + 1) * self._windows_per_pass - 1) // len(self._lengths)
        return passes * self._windows_per_pass + within

    def _rows_of(self, window: int) -> Rows:
        """The packed rows of a window, at most one window past the last one counted. Needs the lock."""
        if window in self._packed:
            self._packed.move_to_end(window)
            return self._packed[window]
        rows = self._pack_window(window)
        if window == len(self._first_row) - 1:
            self._first_row.append(self._first_row[-1] + len(rows))
        self._packed[window] = rows
        if len(self._packed) > KEPT_WINDOWS:
            self._packed.popitem(last=False)
        return rows

    def _pack_window(self, window: int) -> Rows:
        first = self._first_document(window)
        epoch, start = divmod(first, len(self._lengths))
        positions = np.arange(start, start + self._first_document(window + 1) - first)
        documents = shuffled(positions, len(self._lengths), self._seed, epoch)
        lengths = self._lengths[documents].astype(np.int64)
        # By length alone, a small store would put the same documents together in every pass. Up to 10 % of
        # noise brings new company and costs no room.
        noise = raw_draws(self._seed, Purpose.PACKING, window, n=len(lengths)) % np.uint64(100)
        rows = pack(lengths, lengths * (1000 + noise.astype(np.int64)), self._token_budget)
        # The rows of long documents are opened first; training must not see them in that order.
        order = np.argsort(raw_draws(self._seed, Purpose.ROW_ORDER, window, n=len(rows)), kind="stable")
        return [documents[rows[row]] for row in order.tolist()]
