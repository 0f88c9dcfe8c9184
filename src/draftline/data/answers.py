"""Where the answers of a conversation begin and end in its text.

An answer begins where the generation prompt ends, and ends with the first token that stops the target. All
other text that a template puts there (headers, empty think blocks, the newline after the end of turn) is not
the target's and is not marked.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from draftline.data.conversations import Conversation, has_reasoning
from draftline.data.reasons import Note, Reason, UnusableRow
from draftline.data.said import THINK_AT_END, THINK_TAG, end_of_message, refuse_stops, refuse_unshown, thinks
from draftline.data.template import ChatTemplate, Span

_EMPTY_THINK = re.compile(r"\s*<(\w*think\w*)>\s*</\1>\s*|\s*\[THINK\]\s*\[/THINK\]\s*", re.IGNORECASE)
_CLOSED_AT_ONCE = re.compile(r"\s*(<think>\s*)?</think>")


@dataclass(frozen=True)
class Marked:
    """The text of one document and the characters that the target generates."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Turn:
    """One answer, rendered: `text` goes on from `prompt`."""

    before: tuple[dict[str, Any], ...]
    message: dict[str, Any]
    think: bool
    prompt: str
    text: str
    marks: tuple[Span, ...] | None
    """What the template's own tags mark; None where it has none, or where its text had to be changed."""


def mark_answers(template: ChatTemplate, conversation: Conversation) -> tuple[list[Marked], Counter[Note]]:
    """Render a conversation and mark what the target generates in it.

    One document holds all answers when each turn's text goes on from the one before. A template that
    rewrites earlier turns (old reasoning dropped, other end tokens in history) gives a new document where it
    does, because at inference every answer follows the text as it was rendered for that turn. An answer that
    cannot be marked, such as one without its thought, stays as context of the others.

    Returns:
        The documents, and notes on what had to be done to get them.

    Raises:
        UnusableRow: the template refuses the conversation, leaves out what one of its answers says or calls, or
            none can be marked.
    """
    notes: Counter[Note] = Counter()
    documents: list[Marked] = []
    lost: UnusableRow | None = None
    wanted = conversation.answers if template.options.turns == "all" else conversation.answers[-1:]
    for index in conversation.answers:
        if index not in wanted:
            refuse_unshown(template, conversation, index)
            continue
        try:
            answer = _mark_answer(template, conversation, index, notes)
        except UnusableRow as unusable:
            if unusable.reason not in (Reason.NO_BOUNDARY, Reason.CONTENT_LOST):
                raise
            refuse_unshown(template, conversation, index)
            lost = unusable
            notes[Note.LEFT_OUT] += 1
            continue
        if answer is not None:
            _append(documents, answer)
    if not documents:
        raise lost or UnusableRow(Reason.NO_SUPERVISED, "the template's tags mark none of the answers")
    notes[Note.PER_TURN] += len(documents) > 1
    return documents, notes


def _append(documents: list[Marked], answer: Marked) -> None:
    if documents and answer.text.startswith(documents[-1].text):
        documents[-1] = Marked(answer.text, documents[-1].spans + answer.spans)
    else:
        documents.append(answer)


def _mark_answer(
    template: ChatTemplate, conversation: Conversation, index: int, notes: Counter[Note]
) -> Marked | None:
    """The text up to the end of one answer, or None where the template's tags leave this turn out."""
    turn = _render(template, conversation, index)
    start = len(turn.prompt)
    if not has_reasoning(turn.message) and (inserted := _EMPTY_THINK.match(turn.text, start)):
        start = inserted.end()
    said = end_of_message(template, turn.text, start, turn.message)
    if conversation.truncated and index == conversation.answers[-1]:
        # The template ends every turn, but here the target had not come to the end.
        text = turn.text[:said]
    else:
        text = _cut_at_end_of_turn(template, conversation, turn, said)
        notes[Note.NO_END] += not text.endswith(template.end_strings)
    _refuse_stop_inside(template, text[start:])
    if turn.marks is not None:
        marks = _marks_in_whole(template, conversation, turn)
        mine = [mark for mark in marks if mark[0] < len(text) and mark[1] > start]
        if not mine:
            return None
        notes[Note.MARKS_CORRECTED] += mine != [(start, len(text))]
    return Marked(text, ((start, len(text)),))


def _marks_in_whole(template: ChatTemplate, conversation: Conversation, turn: _Turn) -> tuple[Span, ...]:
    """The tags' marks when the whole conversation is rendered: a template may mark its last turn only.

    Where later turns change the text of this one, its own rendering is all there is to go by.
    """
    assert turn.marks is not None
    if len(turn.before) + 1 == len(conversation.messages):
        return turn.marks
    whole, marks = template.text(conversation.messages, conversation.tools, think=turn.think)
    return tuple(marks) if whole.startswith(turn.text) else turn.marks


def _render(template: ChatTemplate, conversation: Conversation, index: int) -> _Turn:
    message, before = conversation.messages[index], conversation.messages[:index]
    if not any(earlier["role"] in ("user", "tool") for earlier in before):
        raise UnusableRow(Reason.ROLES, f"message {index} answers nothing")
    think = thinks(template, message)
    prompt = template.prompt(before, conversation.tools, think=think)
    text, marks = template.text((*before, message), conversation.tools, think=think)
    if has_reasoning(message) and _CLOSED_AT_ONCE.match(text, len(prompt)):
        # This template does not look for reasoning inside the content: hand it over by its own name.
        message = _split_reasoning(message)
        text, marks = template.text((*before, message), conversation.tools, think=think)
    turn = _Turn(before, message, think, prompt, text, tuple(marks) if template.has_tags else None)
    return turn if text.startswith(prompt) else replace(turn, text=_continued(turn), marks=None)


def _continued(turn: _Turn) -> str:
    """The text as generated, where the finished turn lacks the think block that its prompt ends in.

    Raises:
        UnusableRow: the prompt and the text differ in any other way.
    """
    block = THINK_AT_END.search(turn.prompt)
    base = turn.prompt[: block.start()] if block else turn.prompt
    thought = has_reasoning(turn.message)
    if block is None or not turn.text.startswith(base) or bool(block["closed"]) == thought:
        raise UnusableRow(
            Reason.NO_BOUNDARY,
            f"the prompt ends in {turn.prompt[-40:]!r}, the rendered answer does not go on there",
        )
    shown = turn.text[len(base) :]
    if not thought:
        return turn.prompt + shown
    answer = turn.message["content"].rpartition("</think>")[2].strip()
    at = shown.find(answer)
    if at < 0:
        raise UnusableRow(Reason.CONTENT_LOST, f"missing after the reasoning: {answer[:60]!r}")
    return turn.prompt + _written_reasoning(turn.message) + shown[at:]


def _written_reasoning(message: dict[str, Any]) -> str:
    """Reasoning and its closing tag as the target wrote them; only raw answers keep the white space."""
    if "reasoning_content" in message:
        return message["reasoning_content"].strip() + "\n</think>\n\n"
    thought, tag, answer = message["content"].rpartition("</think>")
    space = answer[: len(answer) - len(answer.lstrip())]
    return thought.removeprefix("<think>").removeprefix("\n") + tag + space


def _split_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    thought, _, answer = message["content"].rpartition("</think>")
    reasoning = message.get("reasoning_content", "") + thought.rpartition("<think>")[2].strip()
    if not THINK_TAG.sub("", reasoning).strip():
        reasoning = ""  # tags without a thought between them
    return {**message, "reasoning_content": reasoning, "content": answer.lstrip("\n")}


def _cut_at_end_of_turn(template: ChatTemplate, conversation: Conversation, turn: _Turn, said: int) -> str:
    """The text up to and with the token that ends the turn; without one, up to the last visible character.

    That token is the first after the message that stops the target; failing that, a control token that stands
    last; failing that, the stop token that the next turn begins with (GLM ends an answer by `<|user|>`).
    """
    stops = [
        turn.text.find(token, said) + len(token)
        for token in template.stop_strings
        if token in turn.text[said:]
    ]
    if stops:
        return turn.text[: min(stops)]
    visible = turn.text[: max(said, len(turn.text.rstrip()))]
    # A control token at the end of the message itself is the message's, not the template's.
    if len(visible) > said and visible.endswith(template.end_strings):
        return visible
    return visible + _beginning_of_next_turn(template, conversation, turn, visible)


def _beginning_of_next_turn(
    template: ChatTemplate, conversation: Conversation, turn: _Turn, visible: str
) -> str:
    asked = {"role": "tool" if turn.message.get("tool_calls") else "user", "content": "next"}
    try:
        text, _ = template.text((*turn.before, turn.message, asked), conversation.tools, think=turn.think)
    except UnusableRow:
        return ""
    answer = turn.message["content"].rpartition("</think>")[2].strip()
    if text.startswith(visible):
        following = text.removeprefix(visible)
    else:
        # Later turns change this one (its reasoning goes), but not the words of the answer.
        following = text.rpartition(answer)[2] if answer else ""
    for token in template.stop_strings:
        before, found, _ = following.partition(token)
        if found and not before.strip():
            return before + token
    return ""


def _refuse_stop_inside(template: ChatTemplate, answer: str) -> None:
    ending = next((token for token in template.end_strings if answer.endswith(token)), "")
    refuse_stops(template.stop_strings | {ending}, answer[: len(answer) - len(ending)])
