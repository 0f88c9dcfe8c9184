"""`draftline prepare`: conversations become a token store, with an account of every row."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftline.data.conversations import read_tools
from draftline.data.encode_rows import EncodedChunk, RowEncoder, RowLimits
from draftline.data.fingerprint import hash_json, hash_template, hash_tokenizer
from draftline.data.options import PrepareOptions
from draftline.data.output import full_disk_explained
from draftline.data.reasons import Note, Reason
from draftline.data.report import PrepareReport, build_report
from draftline.data.sources import Chunk, Source, resolve_source
from draftline.data.store import FORMAT, REPORT, StoreWriter, foreign_files, open_store, read_manifest
from draftline.data.tally import Tally
from draftline.data.template import ChatTemplate, TemplateOptions, read_template, stop_token_ids
from draftline.data.witness import how_marked, marked_by
from draftline.errors import ConfigError, DataError, OccupiedError

PARALLEL_BYTES = 8 << 20
"""Sources smaller than this are prepared in this process: starting workers would take longer."""
_EARLY_ROWS = 2000
"""Rows after which a source whose answers cannot be marked is given up, instead of at its end."""
_QUEUED = 3
"""Chunks in flight for each worker."""
_SHOWN = 200
"""Characters of a manifest's value that an error shows."""


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    rows: int
    tokens: int
    bytes_read: int
    total_bytes: int | None
    """None where the source does not say."""


def prepare(
    source: str | Path | Source,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    options: PrepareOptions | None = None,
    *,
    overwrite: bool = False,
    remake: bool = False,
    context: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PrepareReport:
    """Make the token store `out` from a source (see sources.py), or leave it when nothing has changed.

    Args:
        source: a file, a folder of files, or the name of a hub data set.
        tokenizer: the target's own, with its chat template.
        out: folder of the store; it appears only when complete.
        options: how conversations are read.
        overwrite: replace a store that was made from other data, options or tokenizer.
        remake: replace `out` though nothing has changed, or whatever is there; it stays until the new one is complete.
        context: most tokens that the target can read. A default `max_length` gives way to it, and what that clips
            is counted by itself.
        progress: called after every chunk.

    Returns:
        What happened to every row, also kept in the store as report.json.

    Raises:
        DataError: a malformed line (named by file and line), no row kept, or answers that cannot be marked in
            too many rows or that trl marks otherwise.
        OccupiedError: `out` was made otherwise, is not a store, or holds more than one.
        ConfigError: the file of a template or of tools cannot be read, `max_length` was set beyond `context`,
            or `out` cannot be written.
        DiskFullError: there is no room for the store.
    """
    asked = options or PrepareOptions()
    options = _within_context(asked, context)
    resolved = source if isinstance(source, Source) else resolve_source(source)
    template = ChatTemplate(tokenizer, template_options(tokenizer, options))
    limits = row_limits(options)
    if options.max_length < asked.max_length:
        limits = replace(limits, clipped=Note.BEYOND_CONTEXT)
    manifest = _manifest(resolved, tokenizer, template, limits, options)
    if not remake and _is_current(out, manifest, overwrite=overwrite):
        return PrepareReport.read(out / REPORT)
    by_template = how_marked(template)
    started = time.monotonic()
    tally = Tally()
    with full_disk_explained(out, "no store was written"), StoreWriter(out) as writer:
        for chunk, encoded in _encoded_chunks(resolved, template, limits, options.workers):
            writer.append(encoded.batch)
            tally.add(encoded.tally)
            _refuse_unmasked(tally, options, at_end=False)
            if progress is not None:
                progress(Progress(tally.rows, tally.tokens, chunk.bytes_read, resolved.total_bytes))
        _refuse_unmasked(tally, options, at_end=True)
        _refuse_empty(tally, resolved)
        marked = marked_by(by_template, tally)
        report = build_report(tally, writer.duplicates(), time.monotonic() - started, marked)
        rendered = tally.kept > tally.kept_from_ids
        manifest["chat_template"] = hash_template(template.source) if rendered else None
        writer.commit(manifest, report.to_json())
    return report


def _within_context(options: PrepareOptions, context: int | None) -> PrepareOptions:
    if context is None or options.max_length <= context:
        return options
    if "max_length" in options.model_fields_set:
        raise ConfigError(
            f"max_length={options.max_length} is more than the target's context of {context} tokens "
            f"(max_position_embeddings); set it to at most {context}, or leave it out"
        )
    return options.model_copy(update={"max_length": context})


def template_options(tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> TemplateOptions:
    """The part that rendering needs, with the stop tokens looked up and the template's file read.

    Raises:
        ConfigError: the template's file cannot be read, or a stop token is none of the tokenizer's.
    """
    stops = options.stop_token_ids
    if stops is not None:
        _refuse_unknown_tokens(stops, len(tokenizer))
    else:
        stops = stop_token_ids(tokenizer.name_or_path)
    text = None if options.template is None else read_template(options.template)
    return TemplateOptions(options.thinking, options.turns, options.template_variables, text, stops)


def _refuse_unknown_tokens(token_ids: Sequence[int], num_tokens: int) -> None:
    unknown = [token_id for token_id in token_ids if not 0 <= token_id < num_tokens]
    if unknown:
        raise ConfigError(
            f"stop_token_ids={unknown} is not in the target's tokenizer, which has tokens 0 to {num_tokens - 1}"
        )


def row_limits(options: PrepareOptions) -> RowLimits:
    """The part that one row needs, with the tools' file read.

    Raises:
        ConfigError: the tools' file cannot be read.
    """
    tools = None if options.tools is None else read_tools(options.tools)
    return RowLimits(options.max_length, options.truncated == "keep", options.on_error == "stop", tools)


def _manifest(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    limits: RowLimits,
    options: PrepareOptions,
) -> dict[str, Any]:
    made_from = {
        "tokenizer": hash_tokenizer(tokenizer),
        "template": hash_json([template.source, template.options.stop_token_ids]),
        "source": source.content_hashes(),
        "tools": limits.tools,
        # The number of processes does not change a byte of the store; files count by what they hold.
        "options": options.model_dump(mode="json", exclude={"workers", "template", "tools"}),
    }
    key = hash_json({"format": FORMAT, **made_from})
    return {"key": key, **made_from, "tokenizer_name": tokenizer.name_or_path, "source_name": source.name}


def _is_current(out: Path, manifest: dict[str, Any], *, overwrite: bool) -> bool:
    if not out.exists():
        return False
    found = read_manifest(out) if out.is_dir() else None
    if found is None:
        if out.is_dir() and not any(out.iterdir()):
            return False
        raise OccupiedError(f"{out} exists and is not a token store; give another output folder")
    # One that does not name its template is from an earlier version; `train` needs it named.
    if found["key"] == manifest["key"] and "chat_template" in found:
        open_store(out, verify=False)
        return True
    # Without a difference only the layout is older: the same store is made again.
    differing = _differences(found, json.loads(json.dumps(manifest)))  # as it would be read
    if differing and not overwrite:
        raise OccupiedError(
            f"{out} was made otherwise: {'; '.join(differing)}. Give another output folder, or --overwrite to "
            "replace it"
        )
    foreign = foreign_files(out)
    if foreign:
        raise OccupiedError(
            f"{out} holds more than a token store: {', '.join(foreign)}; replacing it would delete that. Move it "
            "elsewhere, or give another output folder"
        )
    return False


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What a store was made from that is not what is wanted now, each with both values."""
    pairs = {part: (found.get(part), wanted[part]) for part in ("template", "source", "tools")}
    theirs, ours = found.get("options", {}), wanted["options"]
    pairs |= {f"options.{name}": (theirs.get(name), ours.get(name)) for name in sorted(theirs | ours)}
    differing = [
        f"{name} {_shown(was)}, now {_shown(now)}" for name, (was, now) in pairs.items() if was != now
    ]
    if found.get("tokenizer") != wanted["tokenizer"]:
        was, now = (f"{each['tokenizer'][:16]} ({each['tokenizer_name']})" for each in (found, wanted))
        differing.insert(0, f"tokenizer {was}, now {now}")
    return differing


def _shown(value: Any) -> str:
    """A manifest's value for a message: hashes and long lists by their beginning."""
    if isinstance(value, dict):
        named = ", ".join(f"{name} {str(each)[:16]}" for name, each in value.items())
        return named[:_SHOWN] or "none"
    return value[:16] if isinstance(value, str) else json.dumps(value)[:_SHOWN]


def _encoded_chunks(
    source: Source, template: ChatTemplate, limits: RowLimits, asked: int | None
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    workers = asked or _workers_for(source)
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
                "a preparing process died (out of memory?); use fewer (--workers N), or one to see why"
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
            f"{count} x {reason} ({tally.examples[reason]})"
            for reason, count in tally.dropped.most_common()
            if reason.unmasked
        )
        raise DataError(
            f"{tally.unmasked} of {tally.rows} rows ({share:.0%}) have no supervised token, more than "
            f"--max-unmasked-share={options.max_unmasked_share:.0%}: {reasons}\none of them reads:\n"
            f"{tally.unmasked_text}"
        )


def _refuse_empty(tally: Tally, source: Source) -> None:
    if tally.documents:
        return
    if not tally.rows:
        raise DataError(f"{source.name} holds no rows")
    reasons = "; ".join(
        f"{count} x {reason} ({tally.examples[reason]})" for reason, count in tally.dropped.most_common()
    )
    fix = (
        "; let the target answer them first (`draftline regenerate`)"
        if Reason.USER_ONLY in tally.dropped
        else ""
    )
    raise DataError(f"none of the {tally.rows} rows of {source.name} can be used: {reasons}{fix}")
