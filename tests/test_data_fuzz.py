"""Any conversation through any template: nothing crashes, every row is accounted for, masks are exact."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftline.data.answers import mark_answers
from draftline.data.conversations import Conversation, parse_record, trim_to_last_answer
from draftline.data.encoding import decode, encode
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.reasons import UnusableRow
from draftline.data.store import open_store
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.errors import DataError
from tests.data_tokenizer import (
    CHATML,
    ENDED_BY_NEXT,
    ENDS_TWICE,
    OPENS_THINK,
    PARTS_ONLY,
    REWRITING,
    TAGGED,
    TEXT_ARGUMENTS,
    make_tokenizer,
)

TEMPLATES = {
    name: ChatTemplate(tokenizer := make_tokenizer(source), TemplateOptions(stop_token_ids=stops))
    for name, source in {
        "chatml": CHATML,
        "tagged": TAGGED,
        "rewriting": REWRITING,
        "opens think": OPENS_THINK,
        "parts only": PARTS_ONLY,
        "ends twice": ENDS_TWICE,
        "ended by next": ENDED_BY_NEXT,
        "text arguments": TEXT_ARGUMENTS,
    }.items()
    for stops in [tuple(make_tokenizer(source).convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|user|>"))]
}

# Text with what templates trip over: control tokens, think tags, braces, white space at the ends, no ASCII.
text = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [
                "<|im_end|>",
                "<|im_start|>",
                "<think>",
                "</think>",
                "{{ x }}",
                "\n",
                "  ",
                "apples",
                "\U0001f98a",
            ]
        ),
    ),
    max_size=4,
).map("".join)
call = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["weather", "add"]), "arguments": st.just({"a": 1})}
        )
    }
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "assistant", "user", "tool"]), "content": text},
    optional={"reasoning_content": text, "tool_calls": st.lists(call, max_size=2)},
)
well_formed = st.lists(
    st.tuples(text, text, st.booleans()).map(
        lambda turn: [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]} | ({"reasoning_content": "hm"} if turn[2] else {}),
        ]
    ),
    min_size=1,
    max_size=3,
).map(lambda turns: [message for turn in turns for message in turn])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
record = st.one_of(
    anything,
    st.fixed_dictionaries({"messages": st.lists(message, max_size=5) | anything}),
    st.fixed_dictionaries({"messages": well_formed}),
    st.fixed_dictionaries({"input_ids": anything, "loss_mask": anything}),
    st.fixed_dictionaries({"prompt": anything, "response": anything}),
)
slow_is_fine = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@slow_is_fine
@given(record)
def test_any_json_value_is_a_conversation_or_a_counted_reason(value):
    with contextlib.suppress(UnusableRow):
        parse_record(value)


@pytest.mark.parametrize("name", TEMPLATES)
@slow_is_fine
@given(messages=st.one_of(well_formed, st.lists(message, min_size=2, max_size=5)))
def test_supervised_tokens_are_exactly_the_marked_text(name, messages):
    chat_template = TEMPLATES[name]
    try:
        conversation = parse_record({"messages": messages})
        assert isinstance(conversation, Conversation)
        documents, _ = encode(chat_template, conversation)
        marked, _ = mark_answers(chat_template, Conversation(conversation.messages))
    except UnusableRow:
        return
    for document, expected in zip(documents, marked, strict=True):
        spans = [expected.text[start:end] for start, end in expected.spans]
        ids = document.input_ids[document.supervised].tolist()
        assert decode(chat_template.tokenizer, ids) == "".join(spans)
        assert decode(chat_template.tokenizer, document.input_ids.tolist()) == expected.text


@pytest.mark.parametrize("name", TEMPLATES)
@slow_is_fine
@given(messages=well_formed)
def test_each_supervised_text_holds_one_answer_and_one_end_of_turn(name, messages):
    chat_template = TEMPLATES[name]
    try:
        documents, _ = mark_answers(chat_template, trim_to_last_answer(Conversation(tuple(messages))))
    except UnusableRow:
        return
    answers = [text for document in documents for text in (document.text[s:e] for s, e in document.spans)]
    # a think block that the prompt opened already belongs to the prompt
    said = [
        turn["content"].rpartition("</think>")[2].removeprefix("<think>").strip()
        for turn in messages
        if turn["role"] == "assistant"
    ]
    for answer in answers:
        assert any(part in answer for part in said)
        assert sum(answer.count(token) for token in chat_template.stop_strings) == 1
        assert answer.endswith(tuple(chat_template.stop_strings))


HEADERS = ("<|im_start|>{}\n", "<|{}|>\n", "<|{}|>", "{}: ", "[{}] ")
ENDS = ("<|im_end|>\n", "<|im_end|>", "<|endoftext|>", "\n<|im_end|>\n\n", "\n")
TOKENIZER = make_tokenizer()


def show(text: str) -> str:
    """Jinja that prints a constant."""
    return f"{{{{- {text!r} }}}}"


@st.composite
def template_sources(draw: st.DrawFn) -> str:
    """A chat template put together at random from habits of real ones."""
    header, end = draw(st.sampled_from(HEADERS)), draw(st.sampled_from(ENDS))
    start = draw(st.sampled_from(["", "<|endoftext|>", "You are helpful.\n"]))
    said = draw(st.sampled_from(["message.content", "message.content | trim"]))
    block = show("<think>\n\n</think>\n\n") if draw(st.booleans()) else ""
    inserted = f"{{%- if {draw(st.sampled_from(['loop.last', 'true']))} %}}{block}{{%- endif %}}"
    prompted = f"{{%- if enable_thinking is false %}}{block}{{%- endif %}}"
    open_tag, close_tag = "{%- generation %}", "{%- endgeneration %}"
    opening, content, closing = show(header.format("assistant")) + inserted, f"{{{{- {said} }}}}", show(end)
    answer = draw(
        st.sampled_from(
            [
                opening + content + closing,
                opening + open_tag + content + closing + close_tag,
                opening + open_tag + content + close_tag + closing,
                open_tag + opening + content + closing + close_tag,
            ]
        )
    )
    other = f"{{{{- {header!r}.replace('{{}}', message.role) + message.content }}}}" + closing
    return (
        show(start)
        + "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        + answer
        + "{%- else %}"
        + other
        + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
        + show(header.format("assistant"))
        + prompted
        + "{%- endif %}"
    )


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(source=template_sources(), turns=st.lists(st.tuples(text, text), min_size=1, max_size=3))
def test_any_template_marks_what_follows_its_own_prompt(source, turns):
    chat_template = ChatTemplate(TOKENIZER, TemplateOptions(template=source))
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    try:
        documents, _ = mark_answers(chat_template, trim_to_last_answer(Conversation(tuple(messages))))
        encoded, _ = encode(chat_template, Conversation(tuple(messages)))
    except UnusableRow:
        return
    prompts = [chat_template.prompt(messages[:at], None, think=False) for at in range(1, len(messages), 2)]
    for document in documents:
        for start, end in document.spans:
            before = document.text[:start]
            assert any(
                before.startswith(prompt) and re.fullmatch(r"(\s|</?think>)*", before[len(prompt) :])
                for prompt in prompts
            )
            answer = document.text[start:end]
            assert any(turn[1].rpartition("</think>")[2].strip() in answer for turn in turns)
            assert answer.count("<|im_end|>") <= 1
            assert "<|im_end|>" not in answer or answer.endswith(("<|im_end|>", "<|endoftext|>"))
    for document, marked in zip(encoded, documents, strict=True):
        ids = document.input_ids[document.supervised].tolist()
        assert decode(TOKENIZER, ids) == "".join(marked.text[start:end] for start, end in marked.spans)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(record, min_size=1, max_size=12))
def test_every_row_of_any_file_is_kept_or_counted(rows):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = PrepareOptions(on_error="skip", max_unmasked_share=1.0)
        try:
            report = prepare(source, make_tokenizer(), Path(folder) / "store", options)
        except DataError:  # nothing of use in any row
            return
        assert report.rows == len(rows) == report.kept + sum(report.dropped.values())
        store = open_store(Path(folder) / "store")
        for index in range(len(store)):
            document = store.document(index)
            assert (document.supervised[:-1] & document.supervised[1:]).any()
