"""A conversation whose answers are written anew, one turn after the other. Knows neither server nor model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from draftline.data.conversations import Conversation, parse_record, turns_of
from draftline.data.reasons import Reason, UnusableRow
from draftline.data.sources import Source
from draftline.errors import DataError

Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Answer:
    """What the target wrote for one turn."""

    content: str
    finish_reason: str
    """`stop`, `length` (cut off by a limit) or `tool_calls`."""
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as the target read it, where the writer says."""
    completion_ids: tuple[int, ...] | None = None
    """The answer as it was generated, end of turn included, where the writer says."""

    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass
class Dialogue:
    """One row on its way: turns that are given, and answers as they come."""

    id: str
    source: int
    """Number of the row in the source, from 0."""
    where: str
    """The row's file and line (from 1), for messages."""
    tools: Tools | None
    segments: tuple[tuple[dict[str, Any], ...], ...]
    """The turns before each answer, from the end of the answer before it."""
    history: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history.extend(self.segments[0])

    def add(self, answer: Answer) -> bool:
        """Take the next answer; True when the dialogue is complete.

        A cut-off answer or a tool call ends it: what should follow them is not known.
        """
        self.answers.append(answer)
        self.history.append(answer.message())
        if answer.finish_reason != "stop" or len(self.answers) == len(self.segments):
            return True
        self.history.extend(self.segments[len(self.answers)])
        return False

    def row(self, made_by: dict[str, Any]) -> dict[str, Any]:
        """The finished dialogue as a row that `draftline prepare` reads; `id` comes first."""
        row: dict[str, Any] = {"id": self.id, "source": self.source, "messages": self.history}
        if self.tools:
            row["tools"] = list(self.tools)
        row["finish_reason"] = self.answers[-1].finish_reason
        turns = [
            {"prompt_ids": list(answer.prompt_ids), "completion_ids": list(answer.completion_ids)}
            for answer in self.answers
            if answer.prompt_ids is not None and answer.completion_ids is not None
        ]
        if len(turns) == len(self.answers):
            row["token_turns"] = turns
        return {**row, "made_by": made_by}


def read_dialogues(
    source: Source,
    turns: Literal["all", "last"],
    tools: Tools | None,
    skipped: Counter[Reason],
    examples: dict[Reason, str],
) -> Iterator[Dialogue]:
    """The rows of a source as dialogues without answers. Rows with the same turns get different ids.

    Args:
        source: conversations, or prompts alone.
        turns: write every answer anew, or only the last after the given ones.
        tools: offered in conversations that name none.
        skipped: rows that cannot be asked (no prompt, an unknown role) are counted here.
        examples: the first of them for each reason, and what was wrong with it.

    Raises:
        DataError: a malformed row, by file and line.
    """
    seen: Counter[str] = Counter()
    for chunk in source.chunks():
        for offset, record in chunk.records():
            try:
                dialogue = _dialogue(record, turns, tools, chunk.source + offset, chunk.where(offset), seen)
            except UnusableRow as unusable:
                where = chunk.where(offset)
                if unusable.reason.malformed:
                    raise DataError(f"{where}: {unusable}") from None
                skipped[unusable.reason] += 1
                examples.setdefault(
                    unusable.reason, f"{where}: {unusable.detail}" if unusable.detail else where
                )
                continue
            yield dialogue


def _dialogue(
    record: Any,
    turns: Literal["all", "last"],
    tools: Tools | None,
    source: int,
    where: str,
    seen: Counter[str],
) -> Dialogue:
    if isinstance(record, UnusableRow):
        raise record
    row = parse_record(turns_of(record))
    if not isinstance(row, Conversation):
        raise UnusableRow(Reason.NOT_A_ROW, "token ids; answers can be written to text only")
    segments = split_into_segments(row.messages, turns)
    tools = row.tools or tools
    key = Conversation(tuple(message for segment in segments for message in segment), tools).key
    seen[key] += 1
    return Dialogue(f"{key}-{seen[key]}", source, where, tools, segments)


def split_into_segments(
    messages: tuple[dict[str, Any], ...], turns: Literal["all", "last"]
) -> tuple[tuple[dict[str, Any], ...], ...]:
    """The turns before each answer that is to be written.

    Raises:
        UnusableRow: no user turn to answer.
    """
    if not any(message["role"] == "user" for message in messages):
        raise UnusableRow(Reason.SYSTEM_ONLY if messages else Reason.NO_MESSAGES)
    if turns == "last":
        last = max(i for i, message in enumerate(messages) if message["role"] != "assistant")
        return (messages[: last + 1],)
    segments: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            # It answers a call that the target may not make again.
            break
        if message["role"] != "assistant":
            segments[-1].append(message)
        elif segments[-1]:
            segments.append([])
    return tuple(tuple(segment) for segment in segments if segment)
