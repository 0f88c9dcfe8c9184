"""`draftline synthesize`: prompts out of nothing but the target.

Given the bare header of a user turn, a chat model writes what a user would say (the method of Magpie,
arXiv 2406.08464). Those turns, filtered and without doubles, are prompts for `regenerate`, so that a first
drafter needs no data at all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftline.data.filters import Refused, refuse, request_key
from draftline.data.journal import Journal
from draftline.data.local import LocalModel
from draftline.data.options import SynthesizeOptions
from draftline.data.sampling import Sampling
from draftline.data.server import RequestFailedError, Server, in_flight
from draftline.data.template import ChatTemplate
from draftline.errors import DataError, ServerError

_MARK = "draftline-user-turn"
_JUDGED = 256
"""Attempts after which a target that gives almost nothing is given up."""


@dataclass(frozen=True)
class UserHeader:
    """What the template puts round a user's words."""

    text: str
    """Everything before them: the target continues it as the user."""
    end: str
    """What ends them."""


@dataclass
class SynthesizeReport:
    """What became of the turns that were drawn. `drawn` = `written` + `surplus` + the sum of `refused`."""

    drawn: int = 0
    written: int = 0
    surplus: int = 0
    """Usable turns of the last batch beyond the number asked for."""
    already_there: int = 0
    refused: Counter[Refused] = field(default_factory=Counter)
    examples: dict[Refused, str] = field(default_factory=dict)
    """The first turn refused for each reason."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        refused = {str(reason): count for reason, count in self.refused.most_common()}
        examples = {str(reason): text for reason, text in self.examples.items()}
        return {**vars(self), "refused": refused, "examples": examples}


class TurnWriter(Protocol):
    """Writes user turns: a model in this process or a server."""

    def made_by(self) -> dict[str, Any]:
        """What every row records of its writer."""
        ...

    def draw(self, number: int, count: int) -> list[tuple[str, bool]]:
        """Batch `number` of user turns, each with whether it ended by itself."""
        ...


def user_header(template: ChatTemplate) -> UserHeader:
    """Find the header from the template's own rendering of a user turn.

    Raises:
        DataError: the template does not show the user's words as they are.
    """
    text, _ = template.text([{"role": "user", "content": _MARK}], None, think=False)
    before, found, after = text.partition(_MARK)
    end = next((token for token in template.end_strings if after.lstrip().startswith(token)), after.strip())
    if not found or not end:
        raise DataError("the chat template does not show where a user's turn begins and ends; give prompts")
    return UserHeader(before, end)


def synthesize(
    writer: TurnWriter,
    out: Path,
    options: SynthesizeOptions,
    *,
    progress: Callable[[SynthesizeReport], None] | None = None,
) -> SynthesizeReport:
    """Write prompts into the JSONL file `out` until it holds `count`; a run that was stopped goes on.

    Raises:
        DataError: almost nothing that the target writes as a user is usable (examples are shown).
        ServerError: the server fails.
        ConfigError: `out` was made with other settings.
    """
    report = SynthesizeReport()
    made_by = writer.made_by()
    with Journal(out, made_by) as journal:
        report.already_there = len(journal.ids)
        seen = {name.partition("-")[2] for name in journal.ids}
        # Each batch draws with its own random numbers: a resumed run must not draw the old ones again.
        number = max((int(name.partition("-")[0]) for name in journal.ids), default=-1) + 1
        while len(journal.ids) < options.count:
            for text, ended in writer.draw(number, options.batch_size):
                report.drawn += 1
                if (reason := refuse(text, ended=ended, seen=seen)) is not None:
                    report.refused[reason] += 1
                    report.examples.setdefault(reason, text[:120])
                elif len(journal.ids) >= options.count:
                    report.surplus += 1
                else:
                    key = request_key(text)
                    seen.add(key)
                    message = {"role": "user", "content": text.strip()}
                    journal.append({"id": f"{number}-{key}", "messages": [message], "made_by": made_by})
                    report.written += 1
            number += 1
            _refuse_low_yield(report, options)
            if progress is not None:
                progress(report)
    return report


def _refuse_low_yield(report: SynthesizeReport, options: SynthesizeOptions) -> None:
    usable = report.written + report.surplus
    if report.drawn < _JUDGED or usable >= options.min_yield * report.drawn:
        return
    shown = "; ".join(
        f"{count} x {reason}: {report.examples[reason]!r}" for reason, count in report.refused.most_common()
    )
    raise DataError(
        f"only {usable} of {report.drawn} user turns of this target are usable ({shown}); "
        "give it prompts (`draftline regenerate`) instead"
    )


class LocalTurns:
    """User turns from a model in this process."""

    def __init__(self, model: LocalModel, name: str) -> None:
        self._model = model
        self._name = name
        header = user_header(model.template)
        ids: Any = model.tokenizer(header.text, add_special_tokens=False)["input_ids"]
        self._header: list[int] = ids
        self._end = header.end

    def made_by(self) -> dict[str, Any]:
        """What every row records of its writer."""
        return {"model": self._name, **self._model.sampling.model_dump(mode="json"), "seed": self._model.seed}

    def draw(self, number: int, count: int) -> list[tuple[str, bool]]:
        """Batch `number` of user turns, each with whether it ended by itself."""
        made = self._model.continue_batch([self._header] * count, number)
        return [_before_end(self._model.text(ids), self._end, ended=self._model.ended(ids)) for ids in made]


class ServerTurns:
    """User turns through a server's text completions."""

    def __init__(self, server: Server, template: ChatTemplate, sampling: Sampling, seed: int = 0) -> None:
        self._server = server
        self._sampling = sampling
        self._seed = seed
        header = user_header(template)
        # Servers put the beginning-of-text token before a raw prompt themselves.
        self._header = header.text.removeprefix(str(template.tokenizer.bos_token or ""))
        self._end = header.end
        self._stop = None if header.end in template.stop_strings else header.end

    def made_by(self) -> dict[str, Any]:
        """What every row records of its writer."""
        return {"model": self._server.model, **self._sampling.model_dump(mode="json"), "seed": self._seed}

    def draw(self, number: int, count: int) -> list[tuple[str, bool]]:
        """Batch `number` of user turns, each with whether it ended by itself.

        Raises:
            ServerError: a request failed, with the server's words.
        """
        seeds = [self._seed + number * count + place for place in range(count)]
        made = dict(in_flight(iter(seeds), self._one, min(count, self._server.options.concurrency)))
        return [made[seed] for seed in seeds]

    def _one(self, seed: int, stop: threading.Event) -> tuple[int, tuple[str, bool]]:
        try:
            text, reason = self._server.patiently(
                lambda: self._server.complete(self._header, seed, self._stop), stop
            )
        except RequestFailedError as failed:
            raise ServerError(
                f"the server failed to write a user turn: {failed}. It must offer text completions (/completions). The "
                "prompts written so far are kept; remove the cause and run the same command again to go on"
            ) from None
        return seed, _before_end(text, self._end, ended=reason == "stop")


def _before_end(text: str, end: str, *, ended: bool) -> tuple[str, bool]:
    said, found, _ = text.partition(end)
    return said, ended or bool(found)
