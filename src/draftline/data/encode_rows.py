"""What one worker does with one chunk: a record batch of documents, and the count of everything else."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from draftline.data.conversations import Conversation, TokenRow, parse_record
from draftline.data.document import Document
from draftline.data.encoding import clip, count_ids, decode, encode, token_document
from draftline.data.inspect import segments
from draftline.data.reasons import Note, Reason, UnusableRow
from draftline.data.sources import Chunk
from draftline.data.store import Entry, record_batch
from draftline.data.tally import NUM_SAMPLES, Tally
from draftline.data.template import ChatTemplate
from draftline.errors import DataError

_SHOWN = 2000
"""Characters of a row that an error shows."""


@dataclass(frozen=True)
class RowLimits:
    """What is kept of a row."""

    max_length: int
    keep_truncated: bool
    stop_on_malformed: bool
    tools: tuple[dict[str, Any], ...] | None = None
    """Offered in conversations that name none."""
    clipped: Note = Note.CLIPPED
    """What a longer document is counted as."""


@dataclass(frozen=True)
class EncodedChunk:
    """Documents in the columns of the store, and what happened to the rows they came from."""

    batch: pa.RecordBatch
    tally: Tally


class RowEncoder:
    """Encodes chunks with one tokenizer; holds no state between them."""

    def __init__(self, template: ChatTemplate, limits: RowLimits) -> None:
        self._template = template
        self._limits = limits
        self._vocab_size = count_ids(template.tokenizer)

    def encode_chunk(self, chunk: Chunk) -> EncodedChunk:
        """Encode every record of a chunk.

        Raises:
            DataError: a record is malformed and malformed records stop the preparation.
        """
        tally = Tally()
        entries: list[Entry] = []
        for offset, record in chunk.records():
            tally.rows += 1
            try:
                made = self._encode(record, tally, chunk.where(offset))
            except UnusableRow as unusable:
                self._count_dropped(tally, unusable, chunk.where(offset), record)
                continue
            tally.kept += 1
            for document, key in made:
                tally.add_document(document)
                entries.append(Entry(document, key, chunk.source + offset))
        tally.samples = [
            tuple(segments(self._template.tokenizer, entry.document)) for entry in entries[:NUM_SAMPLES]
        ]
        return EncodedChunk(record_batch(entries), tally)

    def _encode(self, record: Any, tally: Tally, where: str) -> list[tuple[Document, int]]:
        if isinstance(record, UnusableRow):
            raise record
        row = parse_record(record)
        notes: Counter[Note] = Counter()
        if row.truncated:
            if not self._limits.keep_truncated:
                raise UnusableRow(Reason.TRUNCATED)
            notes[Note.TRUNCATED] += 1
        if isinstance(row, TokenRow):
            documents = [token_document(text, self._vocab_size) for text in row.documents]
            notes[Note.NO_END] += not row.truncated and not self._ends(documents[-1])
        else:
            documents, more = encode(self._template, replace(row, tools=row.tools or self._limits.tools))
            notes += more
        kept = self._clipped(documents, notes)
        tally.notes += notes
        for note in +notes:
            tally.examples.setdefault(note, where)
        tally.kept_from_ids += isinstance(row, TokenRow)
        return [(document, int(row.key, 16)) for document in kept]

    def _ends(self, document: Document) -> bool:
        last = int(document.input_ids[np.flatnonzero(document.supervised)[-1]])
        return decode(self._template.tokenizer, [last]) in self._template.end_strings

    def _clipped(self, documents: list[Document], notes: Counter[Note]) -> list[Document]:
        """Clip each document; one with nothing left goes, and the row with it when all do."""
        kept: list[Document] = []
        last: UnusableRow | None = None
        for document in documents:
            try:
                kept.append(clip(document, self._limits.max_length))
            except UnusableRow as unusable:
                last = unusable
                continue
            notes[self._limits.clipped] += len(document) > self._limits.max_length
        if last is not None and not kept:
            raise last
        return kept

    def _count_dropped(self, tally: Tally, unusable: UnusableRow, where: str, record: Any) -> None:
        if unusable.reason.malformed and self._limits.stop_on_malformed:
            raise DataError(f"{where}: {unusable}; --on-error skip counts such rows and goes on")
        tally.dropped[unusable.reason] += 1
        tally.examples.setdefault(
            unusable.reason, f"{where}: {unusable.detail}" if unusable.detail else where
        )
        if unusable.reason.unmasked and tally.unmasked_text is None:
            tally.unmasked_text = self._readable(record)

    def _readable(self, record: Any) -> str:
        """A row as the target would see it, or as it is when not even that works."""
        try:
            row = parse_record(record)
            if isinstance(row, Conversation):
                return self._template.text(row.messages, row.tools, think=False)[0][:_SHOWN]
            return decode(self._template.tokenizer, list(row.documents[0].input_ids))[:_SHOWN]
        except UnusableRow:
            return json.dumps(record, ensure_ascii=False, default=str)[:_SHOWN]
