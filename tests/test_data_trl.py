"""Our marks against trl's hand-made training templates, for every model family that trl knows.

trl rewrote each template by hand with `{% generation %}` tags; here the border comes from the original template
alone. Where both mark a plain answer they must mean the same text, up to what no target generates: the end of
the generation prompt, an inserted empty think block, what follows the end of turn.
"""

from __future__ import annotations

import re

import pytest

from draftline.data.answers import mark_answers
from draftline.data.conversations import Conversation
from draftline.data.reasons import UnusableRow
from draftline.data.template import ChatTemplate, TemplateOptions
from tests.data_tokenizer import make_tokenizer

trl = pytest.importorskip("trl.chat_template_utils")

FAMILIES = sorted(
    name.removesuffix("_training_chat_template")
    for name in dir(trl)
    if name.endswith("_training_chat_template") and not name.startswith("get_")
)
ASK = {"role": "user", "content": "How many apples?"}
ANSWER = {"role": "assistant", "content": "There are three apples."}
CONTROL = re.compile(
    r"<\|[^|>\s]{1,30}\|>|<\uff5c[^\uff5c]{1,30}\uff5c>|</?s>|<(?:start_of_turn|end_of_turn|end_of_utterance|bos|eos)>"
    r"|<\|(?:turn|channel)>|<(?:turn|channel)\|>"
)
STOPS = {"phi3": "<|end|>", "phi3_5": "<|end|>", "glm4moe": "<|user|>"}
EMPTY_THINK = re.compile(r"^\s*<think>\s*</think>\s*")
# Their prompt opens a think block, so that an answer without reasoning cannot come from them.
ALWAYS_THINK = {"deepseek_r1_distill", "deepseekv3"}


def templates(family: str) -> tuple[ChatTemplate, ChatTemplate]:
    original = getattr(trl, f"{family}_chat_template")
    tokenizer = make_tokenizer(original)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(CONTROL.findall(original)))})
    tokenizer.bos_token = "<s>"
    stops = [tokenizer.convert_tokens_to_ids(STOPS[family])] if family in STOPS else []
    options = TemplateOptions(stop_token_ids=tuple(stops))
    training = TemplateOptions(template=getattr(trl, f"{family}_training_chat_template"))
    return ChatTemplate(tokenizer, options), ChatTemplate(tokenizer, training)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_marked_answer_is_the_one_that_trl_marks_by_hand(family):
    ours, theirs = templates(family)
    text, marks = theirs.text([ASK, ANSWER], None, think=False)
    by_hand = "".join(text[start:end] for start, end in marks)
    try:
        (document,), _ = mark_answers(ours, Conversation((ASK, ANSWER)))
    except UnusableRow:
        assert family in ALWAYS_THINK
        return
    start, end = document.spans[0]
    before, found, after = by_hand.partition(document.text[start:end].strip())
    assert found
    assert EMPTY_THINK.sub("", before).strip() == "" or document.text[:start].endswith(before.strip())
    assert after.strip() in ("", ours.tokenizer.eos_token)
