"""The account of a preparation: every source row is in it, kept or with the reason why not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftline.console import visible
from draftline.data.inspect import Segment, marked_text
from draftline.data.tally import Tally

_BAR = 32


@dataclass(frozen=True)
class PrepareReport:
    """What happened to every row. `rows` = `kept` + the sum of `dropped`."""

    rows: int
    kept: int
    documents: int
    tokens: int
    supervised: int
    dropped: dict[str, int]
    notes: dict[str, int]
    examples: dict[str, str]
    """Where the first row of each reason and note is, and what was wrong with a dropped one."""
    lengths: tuple[tuple[int, int, int], ...]
    """Least tokens, most tokens, documents."""
    duplicates: int
    """Documents whose source row had been seen before."""
    samples: tuple[tuple[Segment, ...], ...]
    seconds: float
    marked: str = ""
    """By what the answers were marked."""

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens."""
        return self.supervised / self.tokens if self.tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read report.json of a store."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["lengths"] = tuple(tuple(bucket) for bucket in raw["lengths"])
        raw["samples"] = tuple(tuple(Segment(**part) for part in sample) for sample in raw["samples"])
        return cls(**raw)


def build_report(tally: Tally, duplicates: int, seconds: float, marked: str) -> PrepareReport:
    """The report of a finished tally."""
    return PrepareReport(
        rows=tally.rows,
        kept=tally.kept,
        documents=tally.documents,
        tokens=tally.tokens,
        supervised=tally.supervised,
        dropped={str(reason): count for reason, count in tally.dropped.most_common()},
        notes={str(note): count for note, count in tally.notes.most_common()},
        examples={str(reason): example for reason, example in tally.examples.items()},
        lengths=tuple((1 << bits >> 1, (1 << bits) - 1, n) for bits, n in sorted(tally.lengths.items())),
        duplicates=duplicates,
        samples=tuple(tally.samples),
        seconds=round(seconds, 2),
        marked=marked,
    )


def render_report(report: PrepareReport, *, colour: bool) -> RenderableType:
    """The report for a terminal; `colour` off marks supervised text by [[ ]] instead."""
    parts: list[RenderableType] = [_totals(report)]
    if report.marked:
        parts.append(Text(f"answers are marked {report.marked}"))
    if report.dropped:
        parts += ["", _dropped(report)]
    if report.notes or report.duplicates:
        parts += ["", _notes(report)]
    parts += ["", _histogram(report), ""]
    for number, sample in enumerate(report.samples):
        title = f"row {number + 1} of {len(report.samples)} shown; marked = what the target wrote"
        parts.append(Panel(marked_text(sample, colour=colour), title=title, title_align="left"))
    return Group(*parts)


def print_report(report: PrepareReport, console: Console) -> None:
    """Print the report, with colour where the console has it."""
    console.print(render_report(report, colour=console.color_system is not None))


def _totals(report: PrepareReport) -> Table:
    table = _table("", "count", "share")
    table.add_row("rows read", f"{report.rows:,}", "")
    table.add_row("rows kept", f"{report.kept:,}", _share(report.kept, report.rows))
    table.add_row(
        "rows dropped", f"{report.rows - report.kept:,}", _share(report.rows - report.kept, report.rows)
    )
    table.add_row("documents", f"{report.documents:,}", "")
    table.add_row("tokens", f"{report.tokens:,}", "")
    table.add_row("supervised tokens", f"{report.supervised:,}", _share(report.supervised, report.tokens))
    return table


def _dropped(report: PrepareReport) -> Table:
    table = _table("dropped because", "rows", "the first one")
    for reason, count in report.dropped.items():
        table.add_row(reason, f"{count:,}", _first(report, reason))
    return table


def _notes(report: PrepareReport) -> Table:
    table = _table("kept, and", "count", "the first one")
    for note, count in report.notes.items():
        table.add_row(note, f"{count:,}", _first(report, note))
    if report.duplicates:
        table.add_row("the same row again", f"{report.duplicates:,}", "")
    return table


def _first(report: PrepareReport, why: str) -> Text:
    # rows may hold what a console reads as markup
    return Text(visible(report.examples.get(why, "")[:90]))


def _histogram(report: PrepareReport) -> Table:
    table = _table("tokens in a document", "documents", "")
    most = max((count for _, _, count in report.lengths), default=1)
    for low, high, count in report.lengths:
        table.add_row(f"{low:,} to {high:,}", f"{count:,}", "#" * max(1, _BAR * count // most))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number == 1 else "left", overflow="fold")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
