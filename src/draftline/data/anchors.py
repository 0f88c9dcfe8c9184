"""Which tokens of a row become anchors, and what their blocks learn.

A = block_budget, B = block_size, T = token_budget.
"""

from __future__ import annotations

import math

import numpy as np

from draftline.data.order import Purpose, raw_draws

MAX_TOKEN_BUDGET = 1 << 20
"""Tokens: an offset in a row, and a document's number in it, fit into 20 bits."""


def anchor_candidates(supervised: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Row offsets that may be anchors, ascending, int64 [candidates].

    A token is a candidate if the target wrote it and its successor, and both are of one document (dflash.md
    2.2 rule 1; SpecForge #731, DeepSpec). The first token of an answer is one: at inference it is the
    bonus token of the prefill.

    Args:
        supervised: bool [tokens], tokens <= T.
        starts: first token of each document, then the end of the last, int64 [documents + 1].
    """
    candidate = np.zeros(len(supervised), dtype=bool)
    candidate[:-1] = supervised[:-1] & supervised[1:]
    candidate[starts[1:] - 1] = False
    return np.flatnonzero(candidate)


def anchor_quotas(available: np.ndarray, most: int, block_budget: int, tie_draws: np.ndarray) -> np.ndarray:
    """Anchors that each document gets, int64 [documents].

    Every document gets min(available, most, level), with the highest level that the budget allows; what a
    whole level leaves over goes, one each, to the documents above it with the smallest `tie_draws`.

    Args:
        available: candidates of each document, int64 [documents].
        most: cap of a single document.
        block_budget: A, cap of the row.
        tie_draws: uint64 [documents].
    """
    wanted = np.minimum(available, most)
    level, left_over = _water_level(wanted, block_budget)
    quotas = np.minimum(wanted, level)
    above = np.flatnonzero(wanted > level)
    quotas[above[np.argsort(tie_draws[above], kind="stable")[:left_over]]] += 1
    return quotas


def _water_level(wanted: np.ndarray, budget: int) -> tuple[int, int]:
    """The level at which `budget` runs out, and what is left below the next; (most wanted, 0) if it lasts."""
    smallest_first = np.sort(wanted).tolist()
    for served, amount in enumerate(smallest_first):
        level, left_over = divmod(budget, len(smallest_first) - served)
        if amount > level:
            return level, left_over
        budget -= amount
    return smallest_first[-1], 0


def draw_anchors(
    candidates: np.ndarray, starts: np.ndarray, *, most: int, block_budget: int, seed: int, row: int
) -> np.ndarray:
    """Anchors of a row: uniform without replacement in each document, ascending, int64 [<= A].

    The draws are named by (seed, row), so each pass over the data draws anew. Arguments as in
    `anchor_candidates` and `anchor_quotas`.
    """
    available = np.diff(np.searchsorted(candidates, starts))
    draws = raw_draws(seed, Purpose.ANCHORS, row, n=len(available) + len(candidates))
    ties, draws = np.split(draws, [len(available)])
    quotas = anchor_quotas(available, most, block_budget, ties)
    # One sort of (document, 24 random bits, offset): inside each document the candidates then stand in
    # random order, and the first ones are taken.
    document = np.repeat(np.arange(len(available), dtype=np.uint64), available)
    keys = np.sort(
        document << np.uint64(44) | draws >> np.uint64(40) << np.uint64(20) | candidates.astype(np.uint64)
    )
    rank = np.arange(len(candidates)) - np.repeat(np.cumsum(available) - available, available)
    taken = keys[rank < np.repeat(quotas, available)] & np.uint64(MAX_TOKEN_BUDGET - 1)
    return np.sort(taken.astype(np.int64))


def block_labels(input_ids: np.ndarray, anchors: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
    """Token at anchor + k for slot k, 0 beyond the anchor's document, int64 [anchors, B].

    Args:
        input_ids: int64 [T].
        anchors: row offsets, int64 [anchors].
        ends: end of each anchor's document, int64 [anchors].
        block_size: B.
    """
    offsets = anchors[:, None] + np.arange(block_size)
    inside = offsets < ends[:, None]
    return np.where(inside, input_ids[np.where(inside, offsets, 0)], 0)


def block_weights(
    supervised: np.ndarray, starts: np.ndarray, anchors: np.ndarray, block_size: int, decay_gamma: float
) -> np.ndarray:
    """Weight of each slot in the loss, float32 [anchors, B].

    exp(-(k-1)/gamma) for slot k from 1 on (paper, section 4.2), 0 for slot 0 and from the first label on that
    the target did not write or that is beyond the document (dflash.md 2.4; DeepSpec's cumulative product).
    """
    breaks = ~supervised
    breaks[starts[1:-1]] = True
    stops = np.append(np.flatnonzero(breaks), starts[-1])
    # The token after an anchor never starts a document, so a break found from there on ends the block.
    stop = stops[np.searchsorted(stops, anchors + 1)]
    slots = np.arange(block_size)
    decay = [0.0, *(math.exp(-(k - 1) / decay_gamma) for k in range(1, block_size))]
    learned = anchors[:, None] + slots < stop[:, None]
    return np.where(learned, np.array(decay, dtype=np.float32), np.float32(0))
