"""Figures in a model card, bound to the drafter that they were measured with: its weights and its settings.

A card is written anew with every export, also by one that measures nothing. Figures of the very same drafter are then
kept as they stand in an earlier card; figures of any other never are. The same `model.safetensors` under another block
size or other taps drafts other tokens, so the weights' hash alone does not name a drafter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.config import DrafterSpec
from draftline.data.fingerprint import hash_json
from draftline.resilience.names import read_regular

CARD = "README.md"
ACCEPTANCE = "## Acceptance"
"""Heading of the figures."""
_MAX_BYTES = 2**20
_SHOWN = 12
"""Digits of a SHA-256 in a message."""
_BLOCK = re.compile(
    r"<!-- draftline: measured with sha256 ([0-9a-f]{64}) and settings ([0-9a-f]{64}) -->\n.*?\n"
    r"<!-- draftline: end of measured -->",
    re.DOTALL,
)
_NOT_DRAFTING = {"bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_sha256"}
"""Fields that no draft depends on, and that not every format tells."""


@dataclass(frozen=True)
class DrafterHash:
    """Names one drafter, whatever folder or format it lies in."""

    weights: str
    """SHA-256 of `model.safetensors`."""
    settings: str
    """SHA-256 of what the drafter's specification does."""


@dataclass(frozen=True)
class EarlierFigures:
    """What a card that is already there has measured."""

    card: Path
    drafter: DrafterHash | None
    """None for a card that does not tell it, whose figures belong to no drafter."""
    block: str
    """Markdown between, and with, the marks that `bound` sets."""


def drafter_hash(weights: str, spec: DrafterSpec) -> DrafterHash:
    """Names a drafter by the SHA-256 of its weights' file and by its specification."""
    names = sorted(set(DrafterSpec.model_fields) - _NOT_DRAFTING)
    return DrafterHash(weights, hash_json({name: spec.effective(name) for name in names}))


def bound(section: str, drafter: DrafterHash) -> str:
    """A section of a card, marked as measured with this drafter."""
    return (
        f"<!-- draftline: measured with sha256 {drafter.weights} and settings {drafter.settings} -->\n{section}\n\n"
        f"Measured with the weights whose `sha256sum model.safetensors` is `{drafter.weights}`.\n"
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
            found.append(EarlierFigures(folder / CARD, DrafterHash(match[1], match[2]), match[0]))
        elif ACCEPTANCE in text:
            found.append(EarlierFigures(folder / CARD, None, ""))
    return found


def same_drafter(earlier: Sequence[EarlierFigures], drafter: DrafterHash) -> EarlierFigures | None:
    """The first figures that were measured with this drafter."""
    return next((figures for figures in earlier if figures.drafter == drafter), None)


def figures_to_show(fresh: str | None, earlier: Sequence[EarlierFigures], drafter: DrafterHash) -> str | None:
    """The part of a card that holds figures: those measured just now, or else earlier ones of the same drafter."""
    if fresh is not None:
        return bound(fresh, drafter)
    kept = same_drafter(earlier, drafter)
    return kept.block if kept else None


def account(earlier: Sequence[EarlierFigures], drafter: DrafterHash, out: Path) -> str:
    """What an export without a measurement did with the figures that there were, and how to measure."""
    if kept := same_drafter(earlier, drafter):
        shown = drafter.weights[:_SHOWN]
        return f"the figures of {kept.card} are kept: they were measured with this drafter (SHA-256 {shown})"
    refused = [
        f"the figures of {figures.card} {'are dropped' if figures.card.parent == out else 'do not apply'}: "
        f"{_whose(figures, drafter)}"
        for figures in earlier
    ]
    return (
        f"{'; '.join(['the model card has no figures', *refused])}. To measure, name prompts and the target: "
        "draftline export RUN OUT held-out.jsonl --target TARGET"
    )


def _whose(figures: EarlierFigures, drafter: DrafterHash) -> str:
    if figures.drafter is None:
        return "the card does not tell with which drafter they were measured"
    theirs, ours = figures.drafter.weights[:_SHOWN], drafter.weights[:_SHOWN]
    if theirs == ours:
        return f"they were measured with these weights (SHA-256 {ours}) under other settings in config.json"
    return f"they were measured with other weights (SHA-256 {theirs}, these are {ours})"
