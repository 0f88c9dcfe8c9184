"""Counts of one preparation: small, and added together from all workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from draftline.data.document import Document
from draftline.data.inspect import Segment
from draftline.data.reasons import Note, Reason

NUM_SAMPLES = 3
"""Documents whose text the report shows."""


@dataclass
class Tally:
    """What happened to some source rows."""

    rows: int = 0
    kept: int = 0
    kept_from_ids: int = 0
    """Rows kept that came as token ids and needed no template."""
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: Counter[Reason] = field(default_factory=Counter)
    notes: Counter[Note] = field(default_factory=Counter)
    examples: dict[Reason | Note, str] = field(default_factory=dict)
    """The first row of each reason and note: where it is, and what was wrong with a dropped one."""
    unmasked_text: str | None = None
    """The text of the first row in which no answer could be marked."""
    samples: list[tuple[Segment, ...]] = field(default_factory=list)
    """The text of a few documents, cut where supervision begins and ends."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Documents by bucket; bucket n holds lengths of 2^(n-1) to 2^n - 1 tokens."""

    def add_document(self, document: Document) -> None:
        """Count a kept document."""
        self.documents += 1
        self.tokens += len(document)
        self.supervised += int(document.supervised.sum())
        self.lengths[len(document).bit_length()] += 1

    def add(self, other: Tally) -> None:
        """Add the counts of the rows that follow."""
        self.rows += other.rows
        self.kept += other.kept
        self.kept_from_ids += other.kept_from_ids
        self.documents += other.documents
        self.tokens += other.tokens
        self.supervised += other.supervised
        self.dropped += other.dropped
        self.notes += other.notes
        self.lengths += other.lengths
        self.samples = (self.samples + other.samples)[:NUM_SAMPLES]
        self.examples = {**other.examples, **self.examples}
        self.unmasked_text = self.unmasked_text or other.unmasked_text

    @property
    def unmasked(self) -> int:
        """Rows lost because no answer could be marked."""
        return sum(count for reason, count in self.dropped.items() if reason.unmasked)
