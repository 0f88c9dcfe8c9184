"""Our marks against trl's hand-made training templates, for every model family that trl knows.

trl rewrote each template by hand with `{% generation %}` tags; here the border comes from the original template
alone. Where both mark a plain answer they must mean the same text, up to what no target generates: the end of
the generation prompt, an inserted empty think block, what follows the end of turn.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftline.data import witness
from draftline.data.answers import mark_answers
from draftline.data.conversations import Conversation
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.reasons import UnusableRow
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.data.witness import ANSWER, ASK, disagreement
from draftline.errors import DataError
from tests.data_tokenizer import CHATML, TAGGED, make_tokenizer

trl = pytest.importorskip("trl.chat_template_utils")

FAMILIES = sorted(
    name.removesuffix("_training_chat_template")
    for name in dir(trl)
    if name.endswith("_training_chat_template") and not name.startswith("get_")
)
CONTROL = re.compile(
    r"<\|[^|>\s]{1,30}\|>|<\uff5c[^\uff5c]{1,30}\uff5c>|</?s>|<(?:start_of_turn|end_of_turn|end_of_utterance|bos|eos)>"
    r"|<\|(?:turn|channel)>|<(?:turn|channel)\|>"
)
STOPS = {"phi3": "<|end|>", "phi3_5": "<|end|>", "glm4moe": "<|user|>"}
# Their prompt opens a think block, so that an answer without reasoning cannot come from them.
ALWAYS_THINK = {"deepseek_r1_distill", "deepseekv3"}


def templates(family: str) -> tuple[ChatTemplate, str]:
    """The family's own template with a small tokenizer, and trl's training template for it."""
    original = getattr(trl, f"{family}_chat_template")
    tokenizer = make_tokenizer(original)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(CONTROL.findall(original)))})
    tokenizer.bos_token = "<s>"
    stops = [tokenizer.convert_tokens_to_ids(STOPS[family])] if family in STOPS else []
    options = TemplateOptions(stop_token_ids=tuple(stops))
    return ChatTemplate(tokenizer, options), getattr(trl, f"{family}_training_chat_template")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_marked_answer_is_the_one_that_trl_marks_by_hand(family):
    ours, training = templates(family)
    assert disagreement(ours, training) is None
    try:
        mark_answers(ours, Conversation((ASK, ANSWER)))
    except UnusableRow:
        assert family in ALWAYS_THINK


@pytest.mark.parametrize(
    "wrong",
    [
        lambda text: text.replace("{%- generation %}", "").replace("{%- endgeneration %}", ""),
        lambda text: text.replace(
            "+ '<|im_end|>' }}{%- endgeneration %}", "}}{%- endgeneration %}{{- '<|im_end|>' }}"
        ),
        lambda text: (
            "{% generation %}"
            + text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
            + "{% endgeneration %}"
        ),
    ],
    ids=["nothing", "without its end of turn", "the whole text"],
)
def test_a_training_template_that_marks_another_text_is_a_disagreement(wrong):
    own = ChatTemplate(make_tokenizer(CHATML), TemplateOptions())
    assert disagreement(own, TAGGED) is None
    assert disagreement(own, wrong(TAGGED)) is not None


def test_the_report_says_by_what_answers_are_marked(tmp_path, monkeypatch):
    source = tmp_path / "a.jsonl"
    source.write_text('{"prompt": "How many?", "response": "Three."}\n')

    def marked(name: str, tokenizer: PreTrainedTokenizerFast, **options: Any) -> str:
        return prepare(source, tokenizer, tmp_path / name, PrepareOptions(**options)).marked

    known, _ = templates("qwen3")
    (tmp_path / "own.jinja").write_text(CHATML)
    assert "trl's training template marks the same" in marked("known", known.tokenizer)
    assert "trl does not know this template" in marked("unknown", make_tokenizer(CHATML))
    assert "{% generation %} tags" in marked("tagged", make_tokenizer(TAGGED))
    assert "given by the user" in marked("given", known.tokenizer, template=tmp_path / "own.jinja")
    monkeypatch.setattr(witness, "_training_template", lambda _: "{% generation %}{% endgeneration %}")
    with pytest.raises(DataError, match="marks another text than its own template shows: '', not 'There are"):
        marked("wrong", make_tokenizer(CHATML))
    monkeypatch.setattr(witness, "find_spec", {"trl": None}.__getitem__)
    assert "trl is not installed" in marked("without", make_tokenizer(CHATML))
