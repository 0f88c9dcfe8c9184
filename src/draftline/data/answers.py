"""Where the answers of a conversation begin and end in its text, as pure functions of rendered strings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from draftline.data.conversations import Conversation, has_reasoning
from draftline.data.reasons import Note, Reason, UnusableRow
from draftline.data.template import ChatTemplate, Span

_EMPTY_THINK = re.compile(r"\s*<(\w*think\w*)>\s*</\1>\s*|\s*\[THINK\]\s*\[/THINK\]\s*", re.IGNORECASE)
_THINK_AT_END = re.compile(r"<think>\s*(?P<closed></think>\s*)?$")
_THINK_TAG = re.compile(r"</?think>")


@dataclass(frozen=True)
class Marked:
    """The text of one document and the characters that the target generates."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class MarkedConversation:
    """The documents of one conversation, and what had to be done to get them."""

    documents: tuple[Marked, ...]
    notes: Counter[Note] = field(default_factory=Counter)


def mark_answers(template: ChatTemplate, conversation: Conversation) -> MarkedConversation:
    """Render a conversation and mark what the target generates in it.

    One document holds all answers when each turn's text goes on from the one before. A template that
    rewrites earlier turns (old reasoning dropped, other end tokens in history) gives a new document where it
    does, because at inference every answer follows the text as it was rendered for that turn.

    Raises:
        UnusableRow: the template refuses the conversation, or an answer cannot be marked.
    """
    notes: Counter[Note] = Counter()
    wanted = conversation.answers if template.options.turns == "all" else conversation.answers[-1:]
    answers = [answer for index in wanted if (answer := _mark_answer(template, conversation, index, notes))]
    if not answers:
        raise UnusableRow(Reason.NO_SUPERVISED, "the template marks none of the answers")
    documents: list[Marked] = []
    for answer in answers:
        if documents and answer.text.startswith(documents[-1].text):
            documents[-1] = Marked(answer.text, documents[-1].spans + answer.spans)
        else:
            documents.append(answer)
    if len(documents) > 1:
        notes[Note.PER_TURN] += 1
    return MarkedConversation(tuple(documents), notes)


def _mark_answer(
    template: ChatTemplate, conversation: Conversation, index: int, notes: Counter[Note]
) -> Marked | None:
    """The text up to the end of one answer, or None where the template's tags leave this turn out."""
    message, before = conversation.messages[index], conversation.messages[:index]
    if not any(earlier["role"] in ("user", "tool") for earlier in before):
        raise UnusableRow(Reason.ROLES, f"message {index} answers nothing")
    think = _thinks(template, message)
    prompt = template.prompt(before, conversation.tools, think=think)
    text, marks = template.text(conversation.messages[: index + 1], conversation.tools, think=think)
    if not text.startswith(prompt):
        text, marks = _continued(prompt, text, message), []
    start = len(prompt)
    if not has_reasoning(message) and (inserted := _EMPTY_THINK.match(text, start)):
        start = inserted.end()
    end = _end_of_turn(template, text, start, notes)
    _check(template, text[start:end], message)
    if template.has_tags and marks:
        mine = [mark for mark in marks if mark[0] < end and mark[1] > start]
        if not mine:
            return None
        if mine != [(start, end)]:
            notes[Note.MARKS_CORRECTED] += 1
    return Marked(text[:end], ((start, end),))


def _thinks(template: ChatTemplate, message: dict[str, Any]) -> bool:
    if template.options.thinking == "auto":
        return has_reasoning(message)
    return template.options.thinking == "on"


def _continued(prompt: str, text: str, message: dict[str, Any]) -> str:
    """The text as generated, where the finished turn lacks the think block that its prompt ends in.

    Raises:
        UnusableRow: the prompt and the text differ in any other way.
    """
    block = _THINK_AT_END.search(prompt)
    base = prompt[: block.start()] if block else prompt
    if block is None or not text.startswith(base) or bool(block["closed"]) == has_reasoning(message):
        raise UnusableRow(
            Reason.NO_BOUNDARY, f"the prompt ends in {prompt[-40:]!r}, the turn goes on otherwise"
        )
    shown = text[len(base) :]
    if block["closed"]:
        return prompt + shown
    answer = message["content"].rpartition("</think>")[2].strip()
    at = shown.find(answer)
    if at < 0:
        raise UnusableRow(Reason.CONTENT_LOST, "the answer after the reasoning is not in the rendered turn")
    return prompt + _written_reasoning(message) + shown[at:]


def _written_reasoning(message: dict[str, Any]) -> str:
    """Reasoning and its closing tag as the target wrote them; only raw answers keep the white space."""
    if "reasoning_content" in message:
        return message["reasoning_content"].strip() + "\n</think>\n\n"
    thought, tag, answer = message["content"].rpartition("</think>")
    space = answer[: len(answer) - len(answer.lstrip())]
    return thought.removeprefix("<think>").removeprefix("\n") + tag + space


def _end_of_turn(template: ChatTemplate, text: str, start: int, notes: Counter[Note]) -> int:
    """Character after the control token that ends the turn; without one, after the last visible character."""
    visible = len(text[start:].rstrip()) + start
    for token in template.end_strings:
        if text.endswith(token, start, visible):
            return visible
    notes[Note.NO_END] += 1
    return visible


def _check(template: ChatTemplate, answer: str, message: dict[str, Any]) -> None:
    """The answer must hold all that the message says, and no place where the target would have stopped."""
    pieces = [*_THINK_TAG.split(message["content"]), message.get("reasoning_content", "")]
    pieces += [call["function"]["name"] for call in message.get("tool_calls", ())]
    for piece in pieces:
        if piece.strip() not in answer:
            raise UnusableRow(Reason.CONTENT_LOST, f"missing: {piece.strip()[:60]!r}")
    ending = next((token for token in template.end_strings if answer.endswith(token)), "")
    body = answer[: len(answer) - len(ending)]
    for token in template.stop_strings | {ending}:
        if token and token in body:
            raise UnusableRow(Reason.STOP_INSIDE, f"{token!r}")
