"""`draftline prepare`: conversations become a token store, with an account of every row."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from draftline.config import Frozen
from draftline.data.encode_rows import EncodedChunk, RowEncoder, RowLimits
from draftline.data.fingerprint import hash_json, hash_tokenizer
from draftline.data.report import PrepareReport, build_report
from draftline.data.sources import Chunk, Source, resolve_source
from draftline.data.store import FORMAT, StoreWriter, open_store, read_manifest
from draftline.data.tally import Tally
from draftline.data.template import ChatTemplate, TemplateOptions, stop_token_ids
from draftline.errors import DataError, DiskFullError

PARALLEL_BYTES = 8 << 20
"""Sources smaller than this are prepared in this process: starting workers would take longer."""
_EARLY_ROWS = 2000
"""Rows after which a source whose answers cannot be marked is given up, instead of at its end."""
_QUEUED = 3
"""Chunks in flight for each worker."""


class PrepareOptions(Frozen):
    """How conversations become documents."""

    max_length: int = Field(default=4096, ge=2)
    """Tokens: a longer document is clipped, and counted."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's thinking switch: on, off, or by whether the answer itself holds reasoning."""
    turns: Literal["all", "last"] = "all"
    """Supervise every answer of a conversation, or the last only."""
    truncated: Literal["keep", "drop"] = "keep"
    """What to do with answers that a length limit cut off."""
    on_error: Literal["stop", "skip"] = "stop"
    """A line that is not a conversation stops the preparation, or is counted and skipped."""
    max_unmasked_share: float = Field(default=0.1, ge=0, le=1)
    """Share of rows without a supervised token above which the template is taken to be wrong."""
    template: str | None = None
    """Jinja text to use instead of the tokenizer's chat template."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the template, as the server will be given them."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end the target's answer, besides the tokenizer's eos; none reads generation_config.json
    beside the tokenizer."""
    workers: int | None = Field(default=None, ge=1)
    """Processes; none takes every core when the source is worth it. The store does not depend on it."""

    def template_options(self, tokenizer: PreTrainedTokenizerBase) -> TemplateOptions:
        """The part that rendering needs, with the stop tokens looked up."""
        stops = self.stop_token_ids
        if stops is None:
            stops = stop_token_ids(tokenizer.name_or_path)
        return TemplateOptions(self.thinking, self.turns, self.template_variables, self.template, stops)


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    rows: int
    tokens: int
    bytes_read: int
    total_bytes: int | None
    """None where the source does not say."""


def prepare(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    options: PrepareOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> PrepareReport:
    """Make the token store `out` from a source (see sources.py), or leave it when nothing has changed.

    Args:
        source: a file, a folder of files, or the name of a hub data set.
        tokenizer: the target's own, with its chat template.
        out: folder of the store; it appears only when complete.
        options: how conversations are read.
        overwrite: replace a store that was made for another tokenizer.
        progress: called after every chunk.

    Returns:
        What happened to every row, also kept in the store as report.json.

    Raises:
        DataError: a malformed line (named by file and line), no row kept, answers that cannot be marked in
            too many rows, or `out` belongs to another tokenizer or is not a store.
        DiskFullError: there is no room for the store.
    """
    options = options or PrepareOptions()
    resolved = resolve_source(source)
    template = ChatTemplate(tokenizer, options.template_options(tokenizer))
    manifest = _manifest(resolved, tokenizer, template, options)
    if _is_current(out, manifest, overwrite=overwrite):
        return PrepareReport.read(out / "report.json")
    started = time.monotonic()
    tally = Tally()
    try:
        with StoreWriter(out) as writer:
            for chunk, encoded in _encoded_chunks(resolved, template, options):
                writer.append(encoded.batch)
                tally.add(encoded.tally)
                _refuse_unmasked(tally, options, at_end=False)
                if progress is not None:
                    progress(Progress(tally.rows, tally.tokens, chunk.bytes_read, resolved.total_bytes))
            _refuse_unmasked(tally, options, at_end=True)
            _refuse_empty(tally, resolved)
            report = build_report(tally, writer.duplicates(), time.monotonic() - started)
            writer.commit(manifest, report.to_json())
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFullError(f"no room left for the token store at {out}; it was not written") from None
        raise
    return report


def _manifest(
    source: Source, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, options: PrepareOptions
) -> dict[str, Any]:
    made_from = {
        "tokenizer": hash_tokenizer(tokenizer),
        "template": hash_json([template.source, template.options.stop_token_ids]),
        "source": source.content_hashes(),
        # The number of processes does not change a byte of the store.
        "options": options.model_dump(mode="json", exclude={"workers"}),
    }
    key = hash_json({"format": FORMAT, **made_from})
    return {"key": key, **made_from, "tokenizer_name": tokenizer.name_or_path, "source_name": source.name}


def _is_current(out: Path, manifest: dict[str, Any], *, overwrite: bool) -> bool:
    if not out.exists():
        return False
    found = read_manifest(out)
    if found is None:
        if out.is_dir() and not any(out.iterdir()):
            return False
        raise DataError(f"{out} exists and is not a token store; give another output folder")
    if found["tokenizer"] != manifest["tokenizer"] and not overwrite:
        raise DataError(
            f"{out} was made for tokenizer {found['tokenizer'][:16]} ({found['tokenizer_name']}), this one "
            f"is {manifest['tokenizer'][:16]} ({manifest['tokenizer_name']}); give another output folder, or "
            "overwrite"
        )
    if found["key"] != manifest["key"]:
        return False
    open_store(out, verify=False)
    return True


def _encoded_chunks(
    source: Source, template: ChatTemplate, options: PrepareOptions
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    limits = RowLimits(options.max_length, options.truncated == "keep", options.on_error == "stop")
    workers = options.workers or _workers_for(source)
    if workers == 1:
        encoder = RowEncoder(template, limits)
        for chunk in source.chunks():
            yield chunk, encoder.encode_chunk(chunk)
        return
    initial = (template.tokenizer, template.options, limits)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, initial) as pool:
        try:
            yield from _in_order(pool, source.chunks(), workers * _QUEUED)
        except BrokenProcessPool:
            raise DataError(
                "a preparing process died (out of memory?); use fewer (workers=...), or one to see why"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[Chunk], window: int
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Results in the order of the source, with at most `window` chunks in flight: memory stays flat."""
    waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, pool.submit(_encode_in_worker, chunk)))
        if len(waiting) >= window:
            done, future = waiting.popleft()
            yield done, future.result()
    for done, future in waiting:
        yield done, future.result()


def _workers_for(source: Source) -> int:
    if source.total_bytes is not None and source.total_bytes < PARALLEL_BYTES:
        return 1
    return len(os.sched_getaffinity(0))


_encoder: RowEncoder | None = None


def _start_worker(tokenizer: PreTrainedTokenizerBase, options: TemplateOptions, limits: RowLimits) -> None:
    # One core a worker: the tokenizer's own threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _encoder  # noqa: PLW0603 - a process pool can only keep state in its module
    _encoder = RowEncoder(ChatTemplate(tokenizer, options), limits)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder.encode_chunk(chunk)


def _refuse_unmasked(tally: Tally, options: PrepareOptions, *, at_end: bool) -> None:
    if not tally.rows or (tally.rows < _EARLY_ROWS and not at_end):
        return
    share = tally.unmasked / tally.rows
    if share > options.max_unmasked_share:
        reasons = "; ".join(
            f"{reason} ({tally.examples[reason]})" for reason in tally.dropped if reason.unmasked
        )
        raise DataError(
            f"{tally.unmasked} of {tally.rows} rows ({share:.0%}) have no supervised token, more than "
            f"max_unmasked_share={options.max_unmasked_share:.0%}: {reasons}\none of them reads:\n"
            f"{tally.unmasked_text}"
        )


def _refuse_empty(tally: Tally, source: Source) -> None:
    if tally.documents:
        return
    if not tally.rows:
        raise DataError(f"{source.name} holds no rows")
    reasons = "; ".join(
        f"{count} x {reason} ({tally.examples[reason]})" for reason, count in tally.dropped.items()
    )
    raise DataError(f"none of the {tally.rows} rows of {source.name} can be used: {reasons}")
