"""What the data commands do, from typed arguments; parsing and the printing of results are the command line's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from draftline.config import Frozen, TargetConfig
from draftline.console import Bar, Screen
from draftline.data.fingerprint import hash_tokenizer
from draftline.data.inspect import describe_documents, print_documents, select_documents, write_html
from draftline.data.local import LocalModel, LocalWriter
from draftline.data.options import (
    LocalOptions,
    PrepareOptions,
    RegenerateOptions,
    RequestOptions,
    ServerOptions,
    SynthesizeOptions,
    TurnOptions,
)
from draftline.data.prepare import Progress, prepare
from draftline.data.regenerate import RegenerateReport, Writer, regenerate
from draftline.data.report import PrepareReport
from draftline.data.sampling import Sampling
from draftline.data.server import Server, ServerWriter
from draftline.data.sources import resolve_source
from draftline.data.store import open_store
from draftline.data.synthesize import LocalTurns, ServerTurns, SynthesizeReport, TurnWriter, synthesize
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.errors import ConfigError
from draftline.paths import builtin_conversations, builtin_prompts
from draftline.pipeline.plan import available_devices
from draftline.target.inspect import declared_context
from draftline.target.load import load_target, load_tokenizer

MIB = 1 << 20


def prepare_store(
    source: str, out: Path, target: TargetConfig, options: PrepareOptions, screen: Screen, *, overwrite: bool
) -> PrepareReport:
    """Prepare with a progress bar; raises what `prepare` raises."""
    found = resolve_source(builtin_conversations(source))
    total = found.total_bytes
    with LateBar(screen, "rows" if total is None else "MiB read", total and -(-total // MIB)) as bar:

        def show(progress: Progress) -> None:
            done = progress.rows if total is None else -(-progress.bytes_read // MIB)
            bar.update(done, f"{progress.rows:,} rows, {progress.tokens:,} tokens")

        return prepare(
            found,
            load_tokenizer(target),
            out,
            options,
            overwrite=overwrite,
            context=declared_context(target),
            progress=show,
        )


def regenerate_answers(
    source: str,
    out: Path,
    writer: ServerOptions | TargetConfig,
    local: LocalOptions,
    sampling: Sampling,
    options: RegenerateOptions,
    screen: Screen,
) -> RegenerateReport:
    """The target's own answers, by a server or by a model in this process, with a progress bar.

    Raises:
        ConfigError, DataError, ServerError, FolderInUseError: see `Server` and `regenerate`.
    """
    answering = _writer(writer, local, sampling)
    with LateBar(screen, "conversations", options.limit) as bar:

        def show(report: RegenerateReport) -> None:
            done = report.written + report.already_there
            bar.update(
                done, f"{report.written:,} new, {report.truncated:,} cut off, {report.failed:,} failed"
            )

        return regenerate(builtin_prompts(source), answering, out, sampling, options, progress=show)


def _writer(writer: ServerOptions | TargetConfig, local: LocalOptions, sampling: Sampling) -> Writer:
    if isinstance(writer, ServerOptions):
        return ServerWriter(Server(writer, sampling))
    loaded = load_target(writer, available_devices()[0])
    model = LocalModel(loaded.model, loaded.tokenizer, sampling, local.seed)
    return LocalWriter(model, loaded.name, local.batch_size)


def synthesize_prompts(
    out: Path,
    target: TargetConfig,
    server: ServerOptions | None,
    drawn: TurnOptions,
    options: SynthesizeOptions,
    screen: Screen,
) -> SynthesizeReport:
    """User turns written by the target, on a server (its template is read here) or in this process.

    Raises:
        ConfigError, DataError, ServerError, FolderInUseError: see `Server` and `synthesize`.
    """
    turns = _turns(target, server, drawn.sampling, drawn.seed)
    with LateBar(screen, "prompts", options.count) as bar:

        def show(report: SynthesizeReport) -> None:
            done = report.already_there + report.written
            bar.update(done, f"{report.written:,} of {report.drawn:,} drawn turns used")

        return synthesize(turns, out, options, progress=show)


def _turns(target: TargetConfig, server: ServerOptions | None, sampling: Sampling, seed: int) -> TurnWriter:
    if server is not None:
        template = ChatTemplate(load_tokenizer(target), TemplateOptions())
        return ServerTurns(Server(server, sampling), template, sampling, seed)
    loaded = load_target(target, available_devices()[0])
    return LocalTurns(LocalModel(loaded.model, loaded.tokenizer, sampling, seed), loaded.name)


def inspect_store(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    console: Console | None,
    *,
    document: int | None = None,
    source: int | None = None,
    page: Path | None = None,
) -> dict[str, Any]:
    """Show documents of a store, by their own number or that of their source row; the first three by default.

    Args:
        path: the store.
        tokenizer: the one it was made with; another is refused.
        console: where the text goes, coloured if it can; None prints nothing.
        document: number of one document.
        source: number of a source row, from 0; all documents made from it are shown.
        page: HTML file to write instead of printing.

    Returns:
        The documents with their text cut where supervision changes, and the store's size.

    Raises:
        ConfigError: a number is out of range.
        DataError: the source row was dropped, or the store belongs to another tokenizer.
    """
    # numbered as a run on the same damaged store numbers them
    store = open_store(path, hash_tokenizer(tokenizer), on_corrupt="skip")
    left_out = [damage.describe() for damage in store.damages]
    for line in left_out:
        Screen().say(f"left out: {line}")
    numbers = select_documents(store, document=document, source=source)
    if page is not None:
        write_html(page, store, tokenizer, numbers)
    elif console is not None:
        print_documents(console, store, tokenizer, numbers)
    return {
        "documents": describe_documents(store, tokenizer, numbers),
        "store_documents": len(store),
        "tokens": int(store.lengths.sum()),
        "left_out": left_out,
    }


def server_options(url: str | None, model: str | None, requests: RequestOptions) -> ServerOptions | None:
    """The server that a command line names, or None where it names none.

    Raises:
        ConfigError: flags for a server without a server.
    """
    if url is not None:
        return ServerOptions(url=url, model=model, **requests.model_dump())
    flags = changed_flags(requests) + (["--model"] if model is not None else [])
    if flags:
        say, them = ("says", "it") if len(flags) == 1 else ("say", "them")
        raise ConfigError(
            f"{', '.join(flags)} {say} how a server is used; name the server by --url, or leave {them} out"
        )
    return None


def changed_flags(options: Frozen) -> list[str]:
    """Names on the command line of the settings that are not at their defaults."""
    default = type(options)()
    names = [name for name in type(options).model_fields if getattr(options, name) != getattr(default, name)]
    return ["--" + name.replace("_", "-") for name in names]


class LateBar:
    """A progress bar that appears with the first update: nothing to do shows nothing."""

    def __init__(self, screen: Screen, what: str, total: int | None) -> None:
        self._screen, self._what, self._total = screen, what, total
        self._open = ExitStack()
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def update(self, done: int, detail: str) -> None:
        """Show how far it is, with a few words of detail."""
        if self._bar is None:
            self._bar = self._open.enter_context(self._screen.progress(self._what, self._total))
        self._bar.update(done, detail)
