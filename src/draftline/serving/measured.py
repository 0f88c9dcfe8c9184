"""Figures in a model card, bound by SHA-256 to the weights that they were measured with.

A card is written anew with every export, also by one that measures nothing. Figures of the very same
`model.safetensors` are then kept as they stand in an earlier card; figures of any other weights never are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.resilience.names import read_regular

CARD = "README.md"
ACCEPTANCE = "## Acceptance"
"""Heading of the figures."""
_MAX_BYTES = 2**20
_SHOWN = 12
"""Digits of a SHA-256 in a message."""
_BLOCK = re.compile(
    r"<!-- draftline: measured with sha256 ([0-9a-f]{64}) -->\n.*?\n<!-- draftline: end of measured -->",
    re.DOTALL,
)


@dataclass(frozen=True)
class EarlierFigures:
    """What a card that is already there has measured."""

    card: Path
    sha256: str | None
    """Of the weights' file; None for a card that does not tell it, whose figures belong to no weights."""
    block: str
    """Markdown between, and with, the marks that `bound` sets."""


def bound(section: str, sha256: str) -> str:
    """A section of a card, marked as measured with the weights whose file has this hash."""
    return (
        f"<!-- draftline: measured with sha256 {sha256} -->\n{section}\n\n"
        f"Measured with the weights whose `sha256sum model.safetensors` is `{sha256}`.\n"
        "<!-- draftline: end of measured -->"
    )


def earlier_figures(folders: Iterable[Path]) -> list[EarlierFigures]:
    """Figures in the cards of some folders; one without a card, or whose card cannot be read, has none."""
    found = list[EarlierFigures]()
    for folder in dict.fromkeys(folders):
        try:
            text = read_regular(folder, CARD, _MAX_BYTES).decode()
        except (OSError, ValueError):  # not there, a link, or not UTF-8: nothing that could be kept
            continue
        if match := _BLOCK.search(text):
            found.append(EarlierFigures(folder / CARD, match[1], match[0]))
        elif ACCEPTANCE in text:
            found.append(EarlierFigures(folder / CARD, None, ""))
    return found


def same_weights(earlier: Sequence[EarlierFigures], sha256: str) -> EarlierFigures | None:
    """The first figures that were measured with the weights whose file has this hash."""
    return next((figures for figures in earlier if figures.sha256 == sha256), None)


def figures_to_show(fresh: str | None, earlier: Sequence[EarlierFigures], sha256: str) -> str | None:
    """The part of a card that holds figures: those measured just now, or else earlier ones of the same weights."""
    if fresh is not None:
        return bound(fresh, sha256)
    kept = same_weights(earlier, sha256)
    return kept.block if kept else None


def account(earlier: Sequence[EarlierFigures], sha256: str, out: Path) -> str:
    """What an export without a measurement did with the figures that there were, and how to measure."""
    if kept := same_weights(earlier, sha256):
        return f"the figures of {kept.card} are kept: they were measured with these weights (SHA-256 {sha256[:_SHOWN]})"
    replaced = next((figures for figures in earlier if figures.card.parent == out), None)
    dropped = f"; the figures of {replaced.card} are dropped: {_whose(replaced, sha256)}" if replaced else ""
    return (
        f"the model card has no figures{dropped}. To measure, name prompts and the target: "
        "draftline export RUN OUT held-out.jsonl --target TARGET"
    )


def _whose(figures: EarlierFigures, sha256: str) -> str:
    if figures.sha256 is None:
        return "the card does not tell with which weights they were measured"
    return f"they were measured with other weights (SHA-256 {figures.sha256[:_SHOWN]}, these are {sha256[:_SHOWN]})"
