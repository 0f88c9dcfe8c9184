"""Held-out prompts: chat records whose last answer, if there is one, is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftline.data.conversations import Conversation, parse_record
from draftline.data.reasons import UnusableRow
from draftline.data.sources import resolve_source
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.errors import DataError
from draftline.evaluate import Prompt


def load_prompts(path: str | Path, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[Prompt]:
    """The first `num_prompts` prompts of a file, tokenised with the target's own template.

    A record holds `messages` (up to the turn that the target should answer) or `prompt` (one user turn), and
    optionally `task`, the slice it is reported under.

    Raises:
        DataError: the file cannot be read, a line is malformed (it is named), or it holds no prompt.
    """
    template = ChatTemplate(tokenizer, TemplateOptions())
    prompts: list[Prompt] = []
    for where, record in _records(path):
        if len(prompts) == num_prompts:
            break
        conversation = _conversation(record, where)
        prompts.append(encode_prompt(template, conversation, task=str(record.get("task", "all"))))
    if not prompts:
        raise DataError(f"{path} holds no prompt; evaluation needs at least one line with messages or prompt")
    return prompts


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> Prompt:
    """One user turn as the target is given it."""
    template = ChatTemplate(tokenizer, TemplateOptions())
    return encode_prompt(template, Conversation(({"role": "user", "content": text},), None, truncated=False))


def encode_prompt(template: ChatTemplate, conversation: Conversation, task: str = "all") -> Prompt:
    """Render the turns with the answer's header and tokenise."""
    text = template.prompt(conversation.messages, conversation.tools, think=False)
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(tuple(ids), task)


def _records(path: str | Path) -> Iterator[tuple[str, Any]]:
    for chunk in resolve_source(path).chunks():
        for offset, record in chunk.records():
            if isinstance(record, UnusableRow):
                raise DataError(f"{chunk.where(offset)}: {record}")
            yield chunk.where(offset), record


def _conversation(record: Any, where: str) -> Conversation:
    if isinstance(record, dict) and isinstance(record.get("prompt"), str) and "messages" not in record:
        record = {"messages": [{"role": "user", "content": record["prompt"]}]}
    try:
        parsed = parse_record(record)
    except UnusableRow as error:
        raise DataError(f"{where}: not a prompt: {error}") from None
    if not isinstance(parsed, Conversation):
        raise DataError(f"{where}: holds token ids; a prompt is given as messages or text")
    messages = parsed.messages
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{where}: holds no turn for the target to answer")
    return Conversation(messages, parsed.tools, truncated=False)
