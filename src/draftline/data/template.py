"""The tokenizer's own chat template, asked for two things: the prompt before an answer, and the text with it.

What the target generates is what follows the generation prompt, up to and with its end-of-turn token. So
the border of an answer is found by rendering `messages[:i]` with a generation prompt and `messages[:i + 1]`
without, and needs no list of template names. Templates that carry `{% generation %}` tags say which turns are
meant; the edges of their marks (headers, newlines after the end of turn, empty think blocks) are checked
against the border.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftline.data.conversations import refuse_half_pairs
from draftline.data.fingerprint import hash_template
from draftline.data.reasons import Reason, UnusableRow
from draftline.errors import ConfigError, DataError

Span = tuple[int, int]
Objects = Sequence[dict[str, Any]]

SAVE_TEMPLATE = "save the template as chat_template.jinja beside the tokenizer"
"""What to do about a target whose own template is missing or another: only `prepare` takes one by a flag."""
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_SWITCHES = ("enable_thinking", "thinking")

# A template is a program from elsewhere: these are what a sandboxed one can raise on input it did not expect.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True)
class TemplateOptions:
    """How conversations are rendered."""

    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's thinking switch: on, off, or by whether the answer itself holds reasoning."""
    turns: Literal["all", "last"] = "all"
    """Which answers of a conversation are supervised."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables for the template, as a server would be given them."""
    template: str | None = None
    """Jinja text to use instead of the tokenizer's own."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the target's answer, besides the tokenizer's eos."""


class ChatTemplate:
    """A tokenizer's template, with the facts about it that marking answers needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._source = _template_source(tokenizer, options)
        """Empty where there is none: token ids need none."""
        variables = _undeclared_variables(self._source)
        self.switch = next((name for name in _SWITCHES if name in variables), None)
        """The variable that turns thinking on and off, or None."""
        self.has_tags = _GENERATION_TAG.search(self._source) is not None
        """Whether the template marks what the assistant generates."""
        self.end_strings = _special_strings(tokenizer)
        """Control tokens that can end a turn, longest first."""
        self.stop_strings = _stop_strings(tokenizer, options.stop_token_ids)
        """Tokens after which the target stops."""
        self.content_in_parts = False
        """Whether the template reads content as a list of parts only, as some image models' templates do."""
        self.content_in_parts = bool(self._source) and self._wants_parts()

    @property
    def source(self) -> str:
        """The Jinja text in use; empty where the tokenizer has none, which only token ids can do without."""
        return self._source

    def prompt(self, messages: Objects, tools: Objects | None, *, think: bool | None) -> str:
        """What the target is given before it writes the next turn; `think` None is the template's default.

        Raises:
            UnusableRow: the template refuses these turns.
        """
        return self._render(messages, tools, think=think, generation_prompt=True)[0]

    def text(self, messages: Objects, tools: Objects | None, *, think: bool) -> tuple[str, list[Span]]:
        """The turns as text, and the characters that the template's own tags mark (none without tags).

        Raises:
            UnusableRow: the template refuses these turns.
        """
        return self._render(messages, tools, think=think, generation_prompt=False)

    def _render(
        self, messages: Objects, tools: Objects | None, *, think: bool | None, generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        if not self._source:
            raise DataError(
                f"the tokenizer at {self.tokenizer.name_or_path!r} has no chat template; {SAVE_TEMPLATE}, or "
                "prepare rows of input_ids + loss_mask, which need none"
            )
        variables = {**self.tokenizer.special_tokens_map, **self.options.variables}
        if self.switch is not None and think is not None and self.switch not in self.options.variables:
            variables[self.switch] = think
        render = functools.partial(
            render_jinja_template,
            tools=list(tools) if tools else None,
            chat_template=self._source,
            return_assistant_tokens_mask=self.has_tags,
            add_generation_prompt=generation_prompt,
            **variables,
        )
        turns = [_in_parts(message) for message in messages] if self.content_in_parts else list(messages)
        try:
            rendered: Any = _render_arguments(render, turns)
        except TEMPLATE_FAILURES as error:
            raise UnusableRow(Reason.REFUSED, f"{type(error).__name__}: {error}") from None
        texts, marks = rendered
        refuse_half_pairs(texts[0])  # here also what stood in a thought, a call or a tool
        return texts[0], marks[0] if marks else []

    def _wants_parts(self) -> bool:
        """Whether content must be a list of parts: with text alone the template loses it, or fails."""
        probe = [{"role": "user", "content": "probe"}]
        try:
            return "probe" not in self._render(probe, None, think=False, generation_prompt=False)[0]
        except UnusableRow:
            return True


def _render_arguments(render: Callable[..., Any], messages: list[dict[str, Any]]) -> Any:
    """Render; a template that joins a call's arguments to text (DeepSeek-V3) gets them as JSON text."""
    try:
        return render([messages])
    except TypeError:
        if not any("tool_calls" in message for message in messages):
            raise
        return render([[_with_text_arguments(message) for message in messages]])


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _template_source(tokenizer: PreTrainedTokenizerBase, options: TemplateOptions) -> str:
    if options.template is not None:
        return options.template
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def refuse_other_template(manifest: dict[str, Any], path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A store must have been rendered with the template that the target is asked with later.

    Args:
        manifest: of the store at `path`; its `chat_template` is None where every row came as token ids.

    Raises:
        DataError: it was made with another one, or does not say.
    """
    if "chat_template" not in manifest:
        raise DataError(
            f"{path} does not say which chat template it was made with (an earlier version made it); run the "
            "same `draftline prepare` again"
        )
    own = ChatTemplate(tokenizer, TemplateOptions()).source
    made_with = manifest["chat_template"]
    if made_with is not None and made_with != hash_template(own):
        theirs = hash_template(own)[:16] if own else "missing"
        raise DataError(
            f"{path} was made with the chat template {made_with[:16]}, the target's own is {theirs}, and it would be "
            f"evaluated and served with that one: {SAVE_TEMPLATE} in {tokenizer.name_or_path}, or prepare the data "
            "again without --template"
        )


def read_template(path: Path) -> str:
    """The Jinja text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from None


def stop_token_ids(path: str) -> tuple[int, ...]:
    """Tokens that end an answer by the target's generation_config.json; none where there is no such file."""
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return ()
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def _undeclared_variables(source: str) -> frozenset[str]:
    # Only parsed, never rendered, so that escaping does not matter.
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols], autoescape=True)
    try:
        parsed = environment.parse(_GENERATION_TAG.sub("", source))
        return frozenset(jinja2.meta.find_undeclared_variables(parsed))
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise DataError(f"the chat template is not valid Jinja, {where}") from None


def _special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted({*added, *_eos(tokenizer)} - {""}, key=len, reverse=True))


def _stop_strings(tokenizer: PreTrainedTokenizerBase, stop_token_ids: tuple[int, ...]) -> frozenset[str]:
    # generation_config.json may name a token that the tokenizer lacks: it stands in no text
    named = (tokenizer.convert_ids_to_tokens(token_id) for token_id in stop_token_ids)
    return frozenset({*_eos(tokenizer), *(token for token in named if isinstance(token, str))})


def _eos(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return (str(tokenizer.eos_token),) if tokenizer.eos_token else ()
