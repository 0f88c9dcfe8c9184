"""Order and randomness as functions of numbers, never as state.

`raw_draws` is a counter-based generator: the same seed, purpose and counters give the same numbers, whoever
asks, whenever. `shuffled` is a permutation of any size that is computed one position at a time, so a shuffle
of a million documents needs no list. Only numpy's raw bit streams are used: they are frozen by numpy's
compatibility policy (NEP 19), while the methods of `numpy.random.Generator` may change between versions.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

FEISTEL_ROUNDS = 8


class Purpose(IntEnum):
    """What a draw decides. The values are part of every run's identity: never renumber one."""

    DOCUMENT_ORDER = 1
    ROW_ORDER = 2
    ANCHORS = 3
    PACKING = 4


def raw_draws(seed: int, purpose: Purpose, *counters: int, n: int) -> np.ndarray:
    """`n` independent 64-bit draws that follow from the arguments alone, uint64 [n].

    Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by (seed,
    purpose); up to three counters name the stream. Streams of different arguments never overlap.
    """
    assert len(counters) <= 3, f"{len(counters)} counters; Philox has room for three beside its own"
    # The first word is the generator's own count of the draws.
    words = np.zeros(4, dtype=np.uint64)
    words[1 : 1 + len(counters)] = counters
    key = np.array([seed, purpose], dtype=np.uint64)
    return np.random.Philox(counter=words, key=key).random_raw(n)


def shuffled(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The documents at `positions` of one pass over `size` documents, int64 [len(positions)].

    For fixed (size, seed, epoch) this is a permutation of 0..size-1: a Feistel network on a grid of
    rows x columns >= size that is walked again from any value outside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002).
    """
    keys = raw_draws(seed, Purpose.DOCUMENT_ORDER, epoch, n=FEISTEL_ROUNDS)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    out = _feistel(positions.astype(np.uint64), rows, columns, keys)
    while (outside := out >= size).any():
        out[outside] = _feistel(out[outside], rows, columns, keys)
    return out.astype(np.int64)


def _feistel(values: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """A keyed bijection of 0..rows*columns-1, uint64 [n] to uint64 [n]."""
    row, column = np.divmod(values, np.uint64(columns))
    for step, key in enumerate(keys):
        if step % 2:
            column = (column + _hash(row, key) % np.uint64(columns)) % np.uint64(columns)
        else:
            row = (row + _hash(column, key) % np.uint64(rows)) % np.uint64(rows)
    return row * np.uint64(columns) + column


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014) of `values` under `key`, uint64 [n]."""
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ key
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)
