"""`draftline regenerate`: the same prompts, with answers that the target wrote itself.

A drafter learns to guess the target's next tokens, so every answer it trains on must be the target's own
(dflash.md 2.5). The output is JSONL that `draftline prepare` reads; it is also the journal, so that a run that
was killed goes on where it was.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftline.data.conversations import content_key, read_tools
from draftline.data.dialogue import Dialogue, Tools, read_dialogues
from draftline.data.journal import Journal
from draftline.data.options import RegenerateOptions
from draftline.data.reasons import Reason
from draftline.data.sampling import Sampling
from draftline.data.server import Failed
from draftline.data.sources import Source, resolve_source
from draftline.errors import ConfigError, ServerError


class Writer(Protocol):
    """Whatever finishes dialogues: a server (server.py) or a model in this process (local.py)."""

    def made_by(self) -> dict[str, Any]:
        """What every row records of its writer."""
        ...

    def finish(self, dialogues: Iterator[Dialogue], /) -> Iterator[Dialogue | Failed]:
        """Finished or failed dialogues, in any order."""
        ...


@dataclass
class RegenerateReport:
    """What happened to the rows of the source."""

    written: int = 0
    """Rows written by this run."""
    already_there: int = 0
    """Rows that an earlier run had written."""
    truncated: int = 0
    """Rows of this run whose last answer was cut off (finish_reason=length); they are marked."""
    failed: int = 0
    """Rows that gave no answer; run again to try them again."""
    first_failure: str = ""
    """Its file, line and reason."""
    skipped: Counter[Reason] = field(default_factory=Counter)
    """Rows that cannot be asked: no prompt, an unknown role."""
    examples: dict[Reason, str] = field(default_factory=dict)
    """The first row skipped for each reason, and what was wrong with it."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        skipped = {str(reason): count for reason, count in self.skipped.most_common()}
        examples = {str(reason): example for reason, example in self.examples.items()}
        return {**vars(self), "skipped": skipped, "examples": examples}


def regenerate(
    source: str | Path | Source,
    writer: Writer,
    out: Path,
    sampling: Sampling,
    options: RegenerateOptions | None = None,
    *,
    progress: Callable[[RegenerateReport], None] | None = None,
) -> RegenerateReport:
    """Write the target's own answers to every prompt of a source into the JSONL file `out`.

    Rows that `out` already holds are kept and not asked for again, so a run that was stopped in any way goes on.

    Raises:
        ServerError: `give_up_after` failures in a row, with the server's last words; or no row of `out` at the end.
        ConfigError: `out` was made with other settings (they are named), or the tools' file cannot be read.
        DataError: a malformed row, by file and line.
        FolderInUseError: another process writes `out`.
    """
    options = options or RegenerateOptions()
    if out.suffix != ".jsonl":
        raise ConfigError(f"output {out} must end in .jsonl")
    tools = None if options.tools is None else read_tools(options.tools)
    made_by = {**writer.made_by(), **sampling.model_dump(mode="json"), "turns": options.turns}
    if tools is not None:
        made_by["tools"] = content_key(tools)
    report = RegenerateReport()
    in_a_row = 0
    with Journal(out, made_by) as journal:
        resolved = source if isinstance(source, Source) else resolve_source(source)
        dialogues = _remaining(resolved, journal.ids, options, tools, report)
        for outcome in writer.finish(dialogues):
            if isinstance(outcome, Failed):
                in_a_row += 1
                _count_failure(report, outcome, in_a_row, options)
            else:
                in_a_row = 0
                journal.append(outcome.row(made_by))
                report.written += 1
                report.truncated += outcome.answers[-1].finish_reason == "length"
            if progress is not None:
                progress(report)
    if report.failed and not report.written + report.already_there:
        raise ServerError(
            f"none of {report.failed} rows got an answer, the first was {report.first_failure}; remove the cause and "
            "run the same command again"
        )
    return report


def _remaining(
    source: Source,
    done: set[str],
    options: RegenerateOptions,
    tools: Tools | None,
    report: RegenerateReport,
) -> Iterator[Dialogue]:
    dialogues = read_dialogues(source, options.turns, tools, report.skipped, report.examples)
    for dialogue in itertools.islice(dialogues, options.limit):
        if dialogue.id in done:
            report.already_there += 1
        else:
            yield dialogue


def _count_failure(
    report: RegenerateReport, failed: Failed, in_a_row: int, options: RegenerateOptions
) -> None:
    report.failed += 1
    where = f"{failed.dialogue.where}: {failed.words}"
    report.first_failure = report.first_failure or where
    if in_a_row >= options.give_up_after:
        raise ServerError(
            f"{in_a_row} rows in a row gave no answer, the last was {where}. The {report.written} rows written "
            "so far are kept; remove the cause and run the same command again to go on, or pass such rows by with "
            "a larger --give-up-after"
        )
