"""What the data commands do, from typed arguments; parsing and printing are the command line's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftline.data.fingerprint import hash_tokenizer
from draftline.data.inspect import print_documents, select_documents, write_html
from draftline.data.local import LocalModel, LocalWriter
from draftline.data.regenerate import RegenerateOptions, RegenerateReport, regenerate
from draftline.data.sampling import Sampling
from draftline.data.server import Server, ServerOptions, ServerWriter
from draftline.data.store import open_store
from draftline.data.synthesize import (
    LocalTurns,
    ServerTurns,
    SynthesizeOptions,
    SynthesizeReport,
    synthesize,
)
from draftline.data.template import ChatTemplate, TemplateOptions

BATCH_SIZE = 32
"""Prompts that a model in this process answers at a time."""


def regenerate_by_server(
    source: str | Path,
    out: Path,
    server: ServerOptions,
    sampling: Sampling,
    options: RegenerateOptions,
    *,
    progress: Callable[[RegenerateReport], None] | None = None,
) -> RegenerateReport:
    """Answers by an OpenAI-compatible server; raises what `Server` and `regenerate` raise."""
    writer = ServerWriter(Server(server, sampling), server)
    return regenerate(source, writer, out, sampling, options, progress=progress)


def regenerate_here(
    source: str | Path,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    sampling: Sampling,
    options: RegenerateOptions,
    *,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[RegenerateReport], None] | None = None,
) -> RegenerateReport:
    """Answers by a model in this process; `name` is recorded in every row."""
    writer = LocalWriter(LocalModel(model, tokenizer, sampling, seed), name, batch_size)
    return regenerate(source, writer, out, sampling, options, progress=progress)


def synthesize_by_server(
    out: Path,
    server: ServerOptions,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    options: SynthesizeOptions,
    *,
    seed: int = 0,
    progress: Callable[[SynthesizeReport], None] | None = None,
) -> SynthesizeReport:
    """User turns by a server's text completions, from the header of the tokenizer's own template."""
    template = ChatTemplate(tokenizer, TemplateOptions())
    turns = ServerTurns(Server(server, sampling), template, sampling, seed)
    return synthesize(turns, out, options, progress=progress)


def synthesize_here(
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    sampling: Sampling,
    options: SynthesizeOptions,
    *,
    seed: int = 0,
    progress: Callable[[SynthesizeReport], None] | None = None,
) -> SynthesizeReport:
    """User turns by a model in this process."""
    turns = LocalTurns(LocalModel(model, tokenizer, sampling, seed), name)
    return synthesize(turns, out, options, progress=progress)


def inspect_store(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    *,
    document: int | None = None,
    source: int | None = None,
    page: Path | None = None,
) -> dict[str, Any]:
    """Show documents of a store, by their own number or that of their source row; the first three by default.

    Args:
        path: the store.
        tokenizer: the one it was made with; another is refused.
        console: where the text goes, coloured if it can.
        document: number of one document.
        source: number of a source row, from 0; all documents made from it are shown.
        page: write HTML there instead of printing.

    Returns:
        The numbers that were shown, and the store's size.

    Raises:
        DataError: no such document or row, or the store belongs to another tokenizer.
    """
    store = open_store(path, hash_tokenizer(tokenizer))
    numbers = select_documents(store, document=document, source=source)
    if page is None:
        print_documents(console, store, tokenizer, numbers)
    else:
        write_html(page, store, tokenizer, numbers)
    return {"documents": numbers, "store_documents": len(store), "tokens": int(store.lengths.sum())}
