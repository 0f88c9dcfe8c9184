"""The supervised characters are those the target generates, for templates of every kind met in the wild."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftline.data.answers import mark_answers
from draftline.data.conversations import Conversation, parse_record, trim_to_last_answer
from draftline.data.encoding import decode, encode, tokenize
from draftline.data.reasons import Note, Reason, UnusableRow
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

ASK = {"role": "user", "content": "How many apples?"}
ASK_AGAIN = {"role": "user", "content": "And 2 * 4?"}
ANSWER = {"role": "assistant", "content": "Three."}
EIGHT = {"role": "assistant", "content": "Eight."}
THOUGHT = {"role": "assistant", "content": "Three.", "reasoning_content": "Count them."}
THOUGHT_INLINE = {"role": "assistant", "content": "<think>\nCount them.\n</think>\n\nThree."}
ONLY_CLOSING_TAG = {"role": "assistant", "content": "Count them.\n</think>\n\nThree."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
}
END = "<|im_end|>"


def template(source: str, **options: Any) -> ChatTemplate:
    tokenizer = make_tokenizer(source)
    ids = options.pop("stop_strings", ())
    stops = tuple(tokenizer.convert_tokens_to_ids(token) for token in ids)
    return ChatTemplate(tokenizer, TemplateOptions(**options, stop_token_ids=stops))


def answers(chat_template: ChatTemplate, *messages: dict[str, Any]) -> list[list[str]]:
    """Supervised texts of each document."""
    documents, _ = mark_answers(chat_template, Conversation(messages))
    return [[document.text[start:end] for start, end in document.spans] for document in documents]


@pytest.mark.parametrize("source", [CHATML, TAGGED])
def test_every_answer_of_an_append_only_template_is_supervised_in_one_document(source):
    assert answers(template(source), ASK, ANSWER, ASK_AGAIN, EIGHT) == [["Three." + END, "Eight." + END]]


def test_only_the_last_answer_is_supervised_when_asked():
    found = answers(template(CHATML, turns="last"), ASK, ANSWER, ASK_AGAIN, EIGHT)
    assert found == [["Eight." + END]]


def test_a_template_that_rewrites_earlier_turns_gives_one_document_per_answer():
    documents, notes = mark_answers(template(REWRITING), Conversation((ASK, THOUGHT, ASK_AGAIN, EIGHT)))
    assert [document.text[slice(*document.spans[0])] for document in documents] == [
        "<think>\nCount them.\n</think>\n\nThree." + END,
        "Eight." + END,
    ]
    assert "Count them." not in documents[1].text
    assert notes[Note.PER_TURN] == 1


def test_an_inserted_empty_think_block_is_context_not_an_answer():
    for thinking in ("auto", "on", "off"):
        documents, _ = mark_answers(template(REWRITING, thinking=thinking), Conversation((ASK, ANSWER)))
        assert documents[0].text[: documents[0].spans[0][0]].endswith("<think>\n\n</think>\n\n")
        assert documents[0].text[slice(*documents[0].spans[0])] == "Three." + END


@pytest.mark.parametrize("message", [THOUGHT, THOUGHT_INLINE, ONLY_CLOSING_TAG])
@pytest.mark.parametrize(
    ("source", "opening"), [(REWRITING, "<think>\n"), (OPENS_THINK, "")], ids=["closed prompt", "open prompt"]
)
def test_reasoning_is_supervised_in_whatever_form_the_row_gives_it(source, opening, message):
    assert answers(template(source), ASK, message) == [[f"{opening}Count them.\n</think>\n\nThree.{END}"]]


def test_rows_with_and_without_reasoning_follow_the_prompt_of_their_own_mode():
    chat_template = template(REWRITING)
    (on,), _ = mark_answers(chat_template, Conversation((ASK, THOUGHT)))
    (off,), _ = mark_answers(chat_template, Conversation((ASK, ANSWER)))
    assert on.text.startswith(chat_template.prompt([ASK], None, think=True) + "<think>\nCount")
    assert off.text.startswith(chat_template.prompt([ASK], None, think=False) + "Three.")


def test_a_row_whose_reasoning_the_chosen_mode_excludes_is_dropped_with_that_reason():
    with pytest.raises(UnusableRow) as dropped:
        answers(template(REWRITING, thinking="off"), ASK, THOUGHT)
    assert dropped.value.reason is Reason.NO_BOUNDARY


def test_an_answer_without_reasoning_to_a_prompt_that_opens_a_think_block_is_not_what_the_target_writes():
    with pytest.raises(UnusableRow, match=r"the prompt ends in .*<think>"):
        answers(template(OPENS_THINK), ASK, ANSWER)


def test_reasoning_that_the_template_leaves_out_is_never_trained_around():
    with pytest.raises(UnusableRow) as dropped:
        answers(template(CHATML), ASK, THOUGHT)
    assert dropped.value.reason is Reason.CONTENT_LOST


@pytest.mark.parametrize("thought", ["<", "think", "im_end", "Thr", "\0", "\0\0"])
def test_a_thought_left_out_is_not_found_in_the_templates_own_tags_nor_in_the_answer(thought: str):
    shows_an_empty_block = CHATML.replace("+ message.content", "+ '<think></think>' + message.content")
    assert shows_an_empty_block != CHATML
    said = {"role": "assistant", "content": f"{thought}</think>Three."}
    with pytest.raises(UnusableRow) as dropped:
        answers(template(shows_an_empty_block), ASK, said)
    assert dropped.value.reason is Reason.CONTENT_LOST


@pytest.mark.parametrize("source", [CHATML, REWRITING, OPENS_THINK])
def test_a_thought_that_a_row_gives_by_its_name_and_in_the_content_is_one_thought(source: str):
    both = {**THOUGHT_INLINE, "reasoning": "Count them.\n"}
    once, twice = (parse_record({"messages": [ASK, said]}) for said in (THOUGHT_INLINE, both))
    assert isinstance(twice, Conversation)
    assert twice == once
    ((answer,),) = answers(template(source), *twice.messages)
    assert answer.count("Count them.") == 1
    other = parse_record({"messages": [ASK, {**both, "reasoning": "Add them."}]})
    assert isinstance(other, Conversation)
    assert other.messages[1]["reasoning_content"] == "Add them."


def test_half_a_surrogate_pair_is_refused_wherever_it_stands_in_the_text():
    half = "\ud800"
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": half}}}
    for source, said in (
        (REWRITING, {"role": "assistant", "content": "Three.", "reasoning_content": half}),
        (CHATML, {"role": "assistant", "content": "", "tool_calls": [call]}),
    ):
        with pytest.raises(UnusableRow) as dropped:
            answers(template(source), ASK, said)
        assert dropped.value.reason is Reason.NOT_TEXT


def test_a_stop_token_that_the_tokenizer_does_not_have_stands_in_no_answer():
    tokenizer = make_tokenizer(CHATML)
    unknown = ChatTemplate(tokenizer, TemplateOptions(stop_token_ids=(len(tokenizer) + 7,)))
    said = {"role": "assistant", "content": "It returns None."}
    assert answers(unknown, ASK, said) == [["It returns None." + END]]


def test_a_thought_that_would_stop_the_target_is_refused_also_where_the_template_leaves_it_out():
    said = {"role": "assistant", "content": f"{END}</think>Three."}
    with pytest.raises(UnusableRow) as dropped:
        answers(template(CHATML), ASK, said)
    assert dropped.value.reason is Reason.STOP_INSIDE


def test_an_answer_that_cannot_be_marked_stays_as_context_of_the_others():
    documents, notes = mark_answers(template(CHATML), Conversation((ASK, THOUGHT, ASK_AGAIN, EIGHT)))
    assert [document.text[slice(*document.spans[0])] for document in documents] == ["Eight." + END]
    assert notes[Note.LEFT_OUT] == 1


WITHOUT_CALLS = CHATML.replace("message.tool_calls or []", "[]")
ONE_CALL_ONLY = CHATML.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
CALLS_WITHOUT_WORDS = CHATML.replace("+ message.content", "+ ('' if message.tool_calls else message.content)")
SUNNY = {"role": "tool", "content": "sunny"}


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize(
    ("source", "said", "missing"),
    [
        (WITHOUT_CALLS, CALL, "weather"),
        (WITHOUT_CALLS, {**CALL, "content": "Let me look up the weather."}, "weather"),
        (WITHOUT_CALLS, {**CALL, "reasoning_content": "I look up the weather."}, "weather"),
        (ONE_CALL_ONLY, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, "weather"),
        (CALLS_WITHOUT_WORDS, {**CALL, "content": "Let me see."}, "Let me see."),
    ],
    ids=["call", "call named in words", "call after a thought", "second call", "words before a call"],
)
def test_no_answer_is_trained_after_one_that_the_template_cannot_show(source, said, missing, turns):
    with pytest.raises(UnusableRow, match=f"message 1.*{missing}") as dropped:
        answers(template(source, turns=turns), ASK, said, SUNNY, ANSWER)
    assert dropped.value.reason is Reason.CONTENT_LOST


@pytest.mark.parametrize("turns", ["all", "last"])
def test_words_that_a_template_takes_out_of_earlier_turns_are_missing_when_serving_too(turns):
    forgetful = CHATML.replace(
        "+ message.content", "+ (message.content if loop.last or not message.tool_calls else '')"
    )
    said = {**CALL, "content": "Let me see."}
    found = answers(template(forgetful, turns=turns), ASK, said, SUNNY, ANSWER)
    assert found[-1] == ["Three." + END]


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("thinking", ["auto", "on", "off"])
@pytest.mark.parametrize("source", [CHATML, REWRITING])
def test_a_call_whose_thought_is_not_shown_stays_as_context(source, thinking, turns):
    said = {**CALL, "content": "Thus.", "reasoning_content": "I look up the weather."}
    shows_calls = source.replace(
        "{{- content + '<|im_end|>", "{{- content + (message.tool_calls or '') | string + '<|im_end|>"
    )
    found = answers(template(shows_calls, turns=turns, thinking=thinking), ASK, said, SUNNY, ANSWER)
    assert found[-1][-1] == "Three." + END


def test_a_greeting_that_the_template_refuses_alone_is_context_of_the_last_answer():
    alone = "messages[0].role == 'assistant' and messages | length == 1"
    asks_first = f"{{%- if {alone} %}}{{{{ raise_exception('ask first') }}}}{{% endif %}}"
    found = answers(template(asks_first + CHATML, turns="last"), {**ANSWER, "content": "Hello."}, ASK, ANSWER)
    assert found == [["Three." + END]]


def test_the_first_token_that_stops_the_target_ends_the_answer():
    chat_template = template(ENDS_TWICE, stop_strings=("<|im_end|>",))
    assert answers(chat_template, ASK, ANSWER) == [["Three." + END]]


def test_a_stop_token_that_belongs_to_the_next_turn_still_ends_the_answer():
    chat_template = template(ENDED_BY_NEXT, stop_strings=("<|user|>",))
    expected = [["\nThree.<|user|>", "\nEight.<|user|>"]]
    assert answers(chat_template, ASK, ANSWER, ASK_AGAIN, EIGHT) == expected


def test_an_answer_without_any_end_of_turn_is_kept_and_noted():
    _, notes = mark_answers(template(ENDED_BY_NEXT), Conversation((ASK, ANSWER)))
    assert notes[Note.NO_END] == 1


def test_a_truncated_answer_is_not_given_an_end_of_turn_that_the_target_did_not_write():
    messages = (ASK, ANSWER, ASK_AGAIN, EIGHT)
    (document,), notes = mark_answers(template(CHATML), Conversation(messages, truncated=True))
    assert [document.text[slice(*span)] for span in document.spans] == ["Three." + END, "Eight."]
    assert document.text.endswith("Eight.")
    assert not notes[Note.NO_END]


def test_an_answer_with_an_end_of_turn_token_inside_is_dropped():
    with pytest.raises(UnusableRow) as dropped:
        answers(template(CHATML), ASK, {"role": "assistant", "content": f"Three.{END} Four."})
    assert dropped.value.reason is Reason.STOP_INSIDE


def test_marks_that_cover_too_much_are_cut_to_what_the_target_generates():
    wide = TAGGED.replace("+ '<|im_end|>' }}{%- endgen", "+ '<|im_end|>\\n\\n' }}{%- endgen")
    documents, notes = mark_answers(template(wide), Conversation((ASK, ANSWER)))
    assert documents[0].text[slice(*documents[0].spans[0])] == "Three." + END
    assert notes[Note.MARKS_CORRECTED] == 1


def test_a_turn_that_the_templates_own_tags_leave_out_is_not_supervised():
    last_only = TAGGED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
    documents, _ = mark_answers(template(last_only), Conversation((ASK, ANSWER, ASK_AGAIN, EIGHT)))
    assert [document.text[slice(*document.spans[0])] for document in documents] == ["Eight." + END]


@pytest.mark.parametrize("source", [CHATML, TEXT_ARGUMENTS])
def test_tool_calls_as_list_string_or_mapping_give_the_same_tokens(source):
    arguments = {"city": "Paris", "days": 3}
    function = {"name": "weather", "arguments": arguments}
    text_function = {"name": "weather", "arguments": '{"city": "Paris", "days": 3}'}
    forms = [
        [{"type": "function", "function": function}],
        [{"type": "function", "function": text_function}],
        '[{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}}}]',
        {"function": function},
        [function],
        ['{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}}'],
    ]
    chat_template = template(source)
    rows = []
    for form in forms:
        record = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": form}]}
        (document,), _ = encode(chat_template, parse_record(record))
        rows.append((document.input_ids.tolist(), document.supervised.tolist()))
    assert all(row == rows[0] for row in rows)
    marked = decode(chat_template.tokenizer, [i for i, s in zip(*rows[0], strict=True) if s])
    assert '"city": "Paris"' in marked
    assert marked.endswith(END)


def test_what_a_tool_returns_is_context_and_the_call_is_supervised():
    tool = {"role": "tool", "content": "sunny"}
    assert answers(template(CHATML), ASK, CALL, tool, ANSWER) == [
        [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' + END,
            "Three." + END,
        ]
    ]


def test_a_template_that_reads_parts_only_is_given_parts():
    assert answers(template(PARTS_ONLY), ASK, ANSWER) == [["Three." + END]]


def test_turns_after_the_last_answer_are_left_out():
    conversation = parse_record({"messages": [ASK, ANSWER, ASK_AGAIN]})
    (document,), notes = encode(template(CHATML), conversation)
    assert notes[Note.TRIMMED] == 1
    assert document.supervised[-1]


def test_a_template_error_is_a_reason_to_drop_the_row_not_to_stop():
    picky = "{{ raise_exception('I only like cats') }}"
    with pytest.raises(UnusableRow, match="I only like cats"):
        answers(template(picky), ASK, ANSWER)


def test_a_tokenizer_without_template_and_a_template_that_is_not_jinja_are_explained():
    with pytest.raises(DataError, match="no chat template"):
        answers(template(""), ASK, ANSWER)
    with pytest.raises(DataError, match="not valid Jinja, line 1"):
        template("{% if %}")


def test_a_token_across_the_border_of_the_answer_is_split_as_a_server_would():
    glued = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    glued += "{% if add_generation_prompt %}assistant:{% endif %}"
    chat_template = template(glued)
    conversation = trim_to_last_answer(Conversation((ASK, {"role": "assistant", "content": "apples are"})))
    (marked,), _ = mark_answers(chat_template, conversation)
    for start in range(1, len(marked.text) - 2):
        document = tokenize(chat_template.tokenizer, type(marked)(marked.text, ((start, len(marked.text)),)))
        supervised = document.input_ids[document.supervised].tolist()
        assert decode(chat_template.tokenizer, supervised) == marked.text[start:]
        assert np.all(np.diff(document.supervised.astype(int)) >= 0)
