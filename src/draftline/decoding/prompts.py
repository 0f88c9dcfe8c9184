"""Held-out prompts: files of chat records, and the usual sets by name.

A prompt belongs to slices, under which its acceptance is reported: its set, `SET/TASK` when its record names a task,
`language/CODE` when it names a language, and its mode: `mode/thinking` or `mode/direct` for a target that can do
both, `mode/tools` when tools are offered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from draftline.data.conversations import Conversation, parse_record, turns_of
from draftline.data.reasons import UnusableRow
from draftline.data.sources import resolve_source
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.decoding.evaluate import Prompt
from draftline.decoding.prompt_sets import SETS, Turns, load_set
from draftline.errors import ConfigError, DataError
from draftline.paths import builtin_prompts
from draftline.target.load import BUILTIN

Thinking = Literal["off", "on", "both"]
_SUFFIX = re.compile(r"\.(jsonl|jsonl\.gz|json|parquet)$")


@dataclass(frozen=True)
class _Ask:
    """A conversation that the target is to go on with."""

    where: str
    messages: tuple[dict[str, Any], ...]
    labels: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    later: Turns = ()
    """User turns that follow the target's answer."""
    thinking: bool | None = None
    """As its record asks, whatever the option says."""


def load_prompts(
    names: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    thinking: Thinking = "off",
) -> list[Prompt]:
    """Prompts of some sources, tokenised with the target's own template.

    A source is a set's name (`prompt_sets.SETS`), `NAME=FOLDER` for a local copy of its hub repository, a file or
    folder of records, or `builtin:all` and `builtin:demo`. A record holds `messages` (the last answer, if there is
    one, is left out; so are token ids beside them) or `prompt` (one user turn), and optionally `task`, `language`,
    `tools`, and `thinking` (true or false, which goes before the argument).

    Args:
        num_prompts: of each source: the first of a file, evenly spread over a set.
        thinking: the template's switch; `both` asks every prompt twice.

    Raises:
        DataError: a source cannot be read, a line is malformed (it is named), or it holds no prompt.
        ConfigError: a source is named twice, or thinking is asked for, by the argument or by a record, and the
            target's template has no switch for it.
    """
    template = ChatTemplate(tokenizer, TemplateOptions())
    if thinking != "off":
        _require_switch(template, f"thinking={thinking}")
    sources = [names] if isinstance(names, str | Path) else list(names)
    labels = [_label(str(source)) for source in sources]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"the prompts {labels} would be reported under one name; give each source another")
    prompts: list[Prompt] = []
    for source, label in zip(sources, labels, strict=True):
        asks = list(_asks(str(source), label, num_prompts))
        if not asks:
            raise DataError(
                f"{source} holds no prompt; evaluation needs at least one line with messages or prompt"
            )
        prompts += [_encode(template, ask, think) for ask in asks for think in _modes(ask, thinking)]
    return prompts


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, think: bool = False) -> Prompt:
    """One user turn as the target is given it.

    Raises:
        ConfigError: it is to think, but the template has no switch for that.
    """
    template = ChatTemplate(tokenizer, TemplateOptions())
    return _encode(template, _Ask("prompt", ({"role": "user", "content": text},), ()), think)


def _require_switch(template: ChatTemplate, asked: str) -> None:
    if template.switch is None:
        raise ConfigError(f"{asked}, but the target's chat template has no switch for it; leave it off")


def _label(source: str) -> str:
    """Name of a source in reports and metrics."""
    name = source.partition("=")[0]
    if name in SETS:
        return name
    return source.removeprefix(BUILTIN) if source.startswith(BUILTIN) else _SUFFIX.sub("", Path(source).name)


def _modes(ask: _Ask, thinking: Thinking) -> tuple[bool, ...]:
    if ask.thinking is not None:
        return (ask.thinking,)
    return {"off": (False,), "on": (True,), "both": (False, True)}[thinking]


def _asks(source: str, label: str, count: int) -> Iterator[_Ask]:
    name, _, folder = source.partition("=")
    if name in SETS:
        for index, (first, *later) in enumerate(load_set(name, folder or None, count)):
            turn = {"role": "user", "content": first}
            yield _Ask(f"{name}, prompt {index}", (turn,), (label,), later=tuple(later))
        return
    for number, (where, record) in enumerate(_records(source)):
        if number == count:
            return
        yield _ask(record, where, label)


def _records(source: str) -> Iterator[tuple[str, Any]]:
    try:
        chunks = resolve_source(builtin_prompts(source)).chunks()
    except DataError as error:
        raise DataError(f"{error}; the sets known by name are {', '.join(SETS)}") from None
    for chunk in chunks:
        for offset, record in chunk.records():
            if isinstance(record, UnusableRow):
                raise DataError(f"{chunk.where(offset)}: {record}")
            yield chunk.where(offset), record


def _ask(record: Any, where: str, label: str) -> _Ask:
    extra = record if isinstance(record, dict) else {}
    if isinstance(extra.get("prompt"), str) and "messages" not in extra:
        record = {"messages": [{"role": "user", "content": extra["prompt"]}], "tools": extra.get("tools")}
    conversation = _conversation(record, where)
    labels = [label]
    if extra.get("task"):
        labels.append(f"{label}/{extra['task']}")
    if extra.get("language"):
        labels.append(f"language/{extra['language']}")
    thinking = extra.get("thinking")
    return _Ask(
        where,
        conversation.messages,
        tuple(labels),
        conversation.tools,
        thinking=thinking if isinstance(thinking, bool) else None,
    )


def _conversation(record: Any, where: str) -> Conversation:
    try:
        parsed = parse_record(turns_of(record))
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


def _encode(template: ChatTemplate, ask: _Ask, think: bool) -> Prompt:
    """Render the turns with the answer's header and tokenise."""
    if think:
        _require_switch(template, f"{ask.where}: thinking=on")
    try:
        text = template.prompt(ask.messages, ask.tools, think=think)
    except UnusableRow as error:
        raise DataError(f"{ask.where}: the target's template refuses it: {error}") from None
    slices = [*ask.labels]
    if template.switch is not None:
        slices.append("mode/thinking" if think else "mode/direct")
    if ask.tools:
        slices.append("mode/tools")
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]

    def go_on(answer: Sequence[int]) -> Prompt:
        said = template.tokenizer.decode(list(answer), skip_special_tokens=True)
        turns = ({"role": "assistant", "content": said}, {"role": "user", "content": ask.later[0]})
        following = _Ask(ask.where, (*ask.messages, *turns), ask.labels, ask.tools, ask.later[1:])
        return _encode(template, following, think)

    return Prompt(tuple(ids), tuple(slices), go_on if ask.later else None)
