"""Whether the text of a turn holds what its message says: its thoughts, its answer, its calls."""

from __future__ import annotations

import re
from typing import Any

from draftline.data.conversations import Conversation, has_reasoning
from draftline.data.reasons import Reason, UnusableRow
from draftline.data.template import ChatTemplate

THINK_AT_END = re.compile(r"<think>\s*(?P<closed></think>\s*)?$")
"""The think block that a prompt ends in."""
THINK_TAG = re.compile(r"</?think>")


def thinks(template: ChatTemplate, message: dict[str, Any]) -> bool:
    """Whether the template's thinking switch is on for an answer."""
    if template.options.thinking == "auto":
        return has_reasoning(message)
    return template.options.thinking == "on"


def end_of_message(template: ChatTemplate, text: str, start: int, message: dict[str, Any]) -> int:
    """Character after everything the message says, its thoughts before its answer.

    Raises:
        UnusableRow: a part of it is not in the text, or a thought would stop the target.
    """
    said = [message.get("reasoning_content", ""), message["content"]]
    pieces = [piece.strip() for part in said for piece in THINK_TAG.split(part)]
    *thoughts, answer = pieces
    end = start
    for thought in thoughts:
        refuse_stops(template.stop_strings, thought)
        end = _end_of_piece(template, text, end, thought)
    end = _end_of_piece(template, text, end, answer)
    _refuse_missing_calls(text[start:], pieces, message)
    return max([end, *(_end_of_piece(template, text, start, name) for name in _called(message))])


def refuse_unshown(template: ChatTemplate, conversation: Conversation, index: int) -> None:
    """Refuse a conversation in which the template cannot show what an answer says or calls.

    A later answer would be learned from a context that lacks it. Thoughts are not asked for, and neither is
    whether the words are still there when later turns follow: what a template takes out of earlier turns is
    missing when serving too.

    Raises:
        UnusableRow: the turn lacks its words or one of its calls.
    """
    message, before = conversation.messages[index], conversation.messages[:index]
    think = thinks(template, message)
    try:
        prompt = template.prompt(before, conversation.tools, think=think)
        text, _ = template.text((*before, message), conversation.tools, think=think)
    except UnusableRow:
        return  # some templates take a greeting only where the user's turn follows
    base = THINK_AT_END.sub("", prompt)
    start = len(base) if text.startswith(base) else 0
    answer = THINK_TAG.split(message["content"])[-1].strip()
    try:
        _end_of_piece(template, text, start, answer)
        _refuse_missing_calls(text[start:], [answer], message)
    except UnusableRow as unusable:
        raise UnusableRow(unusable.reason, f"message {index}, {unusable.detail}") from None


def _end_of_piece(template: ChatTemplate, text: str, start: int, piece: str) -> int:
    # A thought of "<" or "think" must not be found in what the template itself puts there.
    own = ["<think>", "</think>", *(token for token in template.stop_strings if token not in piece)]
    end = start
    for number, part in enumerate(re.split(f"({'|'.join(map(re.escape, own))})", text[start:])):
        is_own = number % 2
        if not is_own and piece in part:
            return end + part.index(piece) + len(piece)
        end += len(part)
    raise UnusableRow(Reason.CONTENT_LOST, f"missing: {piece[:60]!r}")


def _called(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def _refuse_missing_calls(shown: str, said: list[str], message: dict[str, Any]) -> None:
    """Refuse a turn that names its calls less often than they were made; naming one in words is no call.

    Args:
        shown: the turn as text.
        said: what is known to be in it besides calls.
        message: the turn's own.

    Raises:
        UnusableRow: a call is missing.
    """
    names = _called(message)
    for name in filter(None, names):
        if shown.count(name) < sum(part.count(name) for part in (*said, *names)):
            raise UnusableRow(Reason.CONTENT_LOST, f"missing: a call of {name!r}")


def refuse_stops(stops: frozenset[str], text: str) -> None:
    """Refuse text with a token inside that stops the target.

    Raises:
        UnusableRow: one stands there.
    """
    for token in stops:
        if token and token in text:
            raise UnusableRow(Reason.STOP_INSIDE, f"{token!r}")
