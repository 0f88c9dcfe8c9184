"""Look at any document: its text with the supervised tokens marked, on a terminal or as a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftline.console import visible
from draftline.data.document import Document
from draftline.data.encoding import decode
from draftline.data.output import writing
from draftline.data.store import Entry, TokenStore
from draftline.errors import ConfigError, DataError

SUPERVISED_STYLE = "black on green3"
"""Colours of what the target wrote."""
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.6 ui-monospace, monospace; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ccc; padding: 1rem; }}
mark {{ background: #b8f0c0; }}
</style>
<h1>{title}</h1><p>Marked: what the target wrote, and so what the drafter learns.</p>
{body}
</html>
"""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that are all supervised, or all not."""

    text: str
    supervised: bool


def segments(tokenizer: PreTrainedTokenizerBase, document: Document) -> list[Segment]:
    """The decoded text of a document, cut where supervision begins and ends."""
    borders = np.flatnonzero(np.diff(document.supervised)) + 1
    return [
        Segment(decode(tokenizer, ids.tolist()), bool(mask[0]))
        for ids, mask in zip(
            np.split(document.input_ids, borders), np.split(document.supervised, borders), strict=True
        )
        if len(ids)
    ]


def marked_text(parts: Sequence[Segment], *, colour: bool) -> Text:
    """Segments as rich text: coloured, or with [[ ]] round what is supervised where there is no colour."""
    text = Text()
    for part in parts:
        shown = visible(part.text)
        if colour:
            text.append(shown, style=SUPERVISED_STYLE if part.supervised else "dim")
        else:
            text.append(f"[[{shown}]]" if part.supervised else shown)
    return text


def print_documents(
    console: Console, store: TokenStore, tokenizer: PreTrainedTokenizerBase, numbers: Sequence[int]
) -> None:
    """Print documents with what the target wrote marked, by colour where the console has it."""
    for number in numbers:
        entry = store.entry(number)
        text = marked_text(segments(tokenizer, entry.document), colour=console.color_system is not None)
        # above the frame: as its title the figures would be cut where it is narrow
        console.print(f"document {number}: {_summary(entry)}", highlight=False)
        console.print(Panel(text))


def select_documents(store: TokenStore, *, document: int | None, source: int | None) -> list[int]:
    """Documents by their own number, or all that came from one source row.

    Raises:
        ConfigError: both are given, or a number is out of the range, which is named.
        DataError: the source row was dropped, or its shard is left out.
    """
    if document is not None and source is not None:
        raise ConfigError(
            f"document={document} and source={source} name different things to show; give one of them"
        )
    if document is not None:
        _refuse_out_of_range("document", document, len(store), f"in {store.path}")
        return [document]
    if source is None:
        return list(range(min(3, len(store))))
    found = np.flatnonzero(store.sources() == source)
    if not len(found):
        _refuse_out_of_range("source", source, store.num_source_rows(), f"of the source of {store.path}")
        raise DataError(f"source row {source} gave no document; report.json says why rows were dropped")
    return found.tolist()


def _refuse_out_of_range(name: str, number: int, count: int, where: str) -> None:
    if not 0 <= number < count:
        there_are = f"there are 0 to {count - 1}" if count else "there is none"
        raise ConfigError(f"{name}={number} is no number {where}: {there_are}")


def describe_documents(
    store: TokenStore, tokenizer: PreTrainedTokenizerBase, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Documents as plain JSON values: where each came from, and its text cut where supervision changes."""
    described = list[dict[str, Any]]()
    for number in numbers:
        entry = store.entry(number)
        described.append(
            {
                "document": number,
                "source": entry.source,
                "tokens": len(entry.document),
                "supervised": int(entry.document.supervised.sum()),
                "segments": [asdict(part) for part in segments(tokenizer, entry.document)],
            }
        )
    return described


def write_html(
    path: Path, store: TokenStore, tokenizer: PreTrainedTokenizerBase, numbers: Sequence[int]
) -> None:
    """A page of documents with what the target wrote marked.

    Raises:
        ConfigError, DiskFullError: the file cannot be written.
    """
    body = "\n".join(_document_html(store, tokenizer, number) for number in numbers)
    text = _PAGE.format(title=html.escape(store.path.name), body=body)
    with writing(path, "the page is not complete"):
        path.write_text(text, encoding="utf-8")


def _document_html(store: TokenStore, tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    entry = store.entry(number)
    parts = [
        f"<mark>{html.escape(part.text)}</mark>" if part.supervised else html.escape(part.text)
        for part in segments(tokenizer, entry.document)
    ]
    return f"<h2>document {number}</h2><p>{_summary(entry)}</p><pre>{''.join(parts)}</pre>"


def _summary(entry: Entry) -> str:
    tokens, supervised = len(entry.document), int(entry.document.supervised.sum())
    return f"source row {entry.source}, {tokens} tokens, {supervised} supervised ({supervised / tokens:.0%})"
