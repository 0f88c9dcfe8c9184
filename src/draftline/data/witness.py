"""A second opinion on where answers begin and end: trl's training templates, written by hand for many models.

Draftline finds the borders from the model's own template. Where that has no `{% generation %}` tags, and trl
knows it, both mark one plain answer before a long preparation begins; they must mean the same text.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from draftline.data.answers import mark_answers
from draftline.data.conversations import Conversation
from draftline.data.reasons import UnusableRow
from draftline.data.tally import Tally
from draftline.data.template import TEMPLATE_FAILURES, ChatTemplate, TemplateOptions
from draftline.errors import DataError

ASK = {"role": "user", "content": "How many apples?"}
ANSWER = {"role": "assistant", "content": "There are three apples."}
_EMPTY_THINK = re.compile(r"^\s*<think>\s*</think>\s*")
_BY_IDS = "by the masks or turns of token ids"
_BY_PROMPT = "by the template's generation prompt"


def how_marked(template: ChatTemplate) -> str:
    """By what the template marks answers, for the report of a preparation.

    Raises:
        DataError: trl's training template for this model marks another text.
    """
    if not template.source:
        return _BY_IDS
    if template.has_tags:
        return "by the template's {% generation %} tags, edges checked " + _BY_PROMPT
    if template.options.template is not None:
        return f"{_BY_PROMPT} (given by the user)"
    if find_spec("trl") is None:
        return f"{_BY_PROMPT}; no second opinion: trl is not installed (pip install trl)"
    training = _training_template(template)
    if training is None:
        return f"{_BY_PROMPT}; no second opinion: trl does not know this template"
    if (difference := disagreement(template, training)) is not None:
        raise DataError(
            f"trl's training template for this model marks another text than its own template shows: "
            f"{difference}; give the right template (--template FILE)"
        )
    return f"{_BY_PROMPT}; trl's training template marks the same"


def marked_by(by_template: str, tally: Tally) -> str:
    """Every way in which answers of a preparation were marked, with the rows that it kept."""
    ways = {_BY_IDS: tally.kept_from_ids}
    ways[by_template] = ways.get(by_template, 0) + tally.kept - tally.kept_from_ids
    return "; and ".join(
        f"{way} ({count:,} row{'s' if count != 1 else ''})" for way, count in ways.items() if count
    )


def disagreement(own: ChatTemplate, training: str) -> str | None:
    """How the marks of a training template differ from those by the model's own, or None.

    Not a difference: what no target generates (the end of the generation prompt, an inserted empty think block,
    what follows the end of turn), and a model that answers nothing without reasoning.
    """
    try:
        (document,), _ = mark_answers(own, Conversation((ASK, ANSWER)))
    except UnusableRow:
        return None
    text, marks = ChatTemplate(own.tokenizer, TemplateOptions(template=training)).text(
        [ASK, ANSWER], None, think=False
    )
    by_hand = "".join(text[start:end] for start, end in marks)
    start, end = document.spans[0]
    before, found, after = by_hand.partition(document.text[start:end].strip())
    header = not _EMPTY_THINK.sub("", before).strip() or document.text[:start].endswith(before.strip())
    if found and header and after.strip() in ("", own.tokenizer.eos_token):
        return None
    return f"{by_hand!r}, not {document.text[start:end]!r}"


def _training_template(template: ChatTemplate) -> str | None:
    from trl.chat_template_utils import (  # noqa: PLC0415 - the extra, and slow  # pyright: ignore[reportMissingImports]
        get_training_chat_template,
    )

    try:
        return get_training_chat_template(template.tokenizer)
    except TEMPLATE_FAILURES:
        # A ValueError says that trl has none; the others, that its probes do not fit this template.
        return None
