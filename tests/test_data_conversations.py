"""Every common form of a row becomes the same conversation; everything else is named."""

from __future__ import annotations

import pytest

from draftline.data.conversations import (
    Conversation,
    TokenRow,
    TokenText,
    has_reasoning,
    parse_record,
    trim_to_last_answer,
)
from draftline.data.reasons import Reason, UnusableRow

ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}

SAME = [
    {"messages": [ASK, ANSWER]},
    {"messages": '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]'},
    {"messages": [{**ASK, "tool_calls": None}, {**ANSWER, "tool_calls": []}], "id": 7, "domain": "chat"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWER]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"conversation": [{"role": "User", "content": "hi"}, {"role": "ASSISTANT", "content": "hello"}]},
    {"prompt": "hi", "response": "hello"},
    {"prompt": "hi", "completion": "hello"},
    {"prompt": [ASK], "completion": [ANSWER]},
    {"instruction": "hi", "input": "", "output": "hello"},
]


@pytest.mark.parametrize("record", SAME)
def test_every_form_of_the_same_turns_is_the_same_conversation(record):
    conversation = parse_record(record)
    assert isinstance(conversation, Conversation)
    assert conversation.messages == (ASK, ANSWER)
    assert conversation.key == parse_record(SAME[0]).key


def test_a_system_prompt_beside_the_turns_comes_first():
    for record in ({"prompt": "hi", "response": "hello"}, {"messages": [ASK, ANSWER]}):
        conversation = parse_record({**record, "system": "Be brief."})
        assert isinstance(conversation, Conversation)
        assert conversation.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_name_is_reasoning(name):
    conversation = parse_record({"messages": [ASK, {**ANSWER, name: "say hello"}]})
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1]["reasoning_content"] == "say hello"
    assert has_reasoning(conversation.messages[1])


def test_a_sharegpt_function_call_becomes_a_tool_call_and_its_result_a_tool_turn():
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    turns = [("human", "hi"), ("function_call", call), ("observation", "sunny"), ("gpt", "hello")]
    conversation = parse_record({"conversations": [{"from": who, "value": text} for who, text in turns]})
    assert isinstance(conversation, Conversation)
    assert [message["role"] for message in conversation.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


@pytest.mark.parametrize(
    ("role", "known"),
    [
        ("system", "system"),
        ("developer", "developer"),
        ("user", "user"),
        ("human", "user"),
        ("assistant", "assistant"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("function", "tool"),
        ("function_response", "tool"),
        ("ipython", "tool"),
        ("GPT", "assistant"),
    ],
)
def test_every_usual_name_of_a_role_is_known(role, known):
    for turn in ({"role": role, "content": "hi"}, {"from": role, "value": "hi"}):
        conversation = parse_record({"messages": [turn]})
        assert isinstance(conversation, Conversation)
        assert conversation.messages[0]["role"] == known


def test_roles_that_nobody_knows_are_named_with_those_that_are_known():
    turns = [ASK, {"role": "robot", "content": "a"}, {"role": "Alien", "content": "b"}, ANSWER]
    with pytest.raises(UnusableRow, match=r"'alien', 'robot'; known are .*user, .*human, gpt,") as refused:
        parse_record({"messages": turns})
    assert refused.value.reason is Reason.UNKNOWN_ROLE
    assert not refused.value.reason.malformed


def test_arguments_that_are_not_json_stay_the_text_that_was_written():
    calls = [{"function": {"name": "run", "arguments": "not { json"}}]
    conversation = parse_record({"messages": [ASK, {"role": "assistant", "tool_calls": calls}]})
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == "not { json"


@pytest.mark.parametrize("mask", ["loss_mask", "assistant_masks"])
@pytest.mark.parametrize("values", [[0, 1, 1], [False, True, True]])
def test_token_ids_with_a_mask_need_no_template(mask, values):
    row = parse_record({"input_ids": [5, 6, 7], mask: values})
    assert row == TokenRow((TokenText((5, 6, 7), (False, True, True)),))


def test_labels_mark_what_is_not_supervised_by_minus_100():
    row = parse_record({"input_ids": [5, 6], "labels": [-100, 6]})
    assert row == TokenRow((TokenText((5, 6), (False, True)),))


def test_a_mask_decides_beside_labels_that_are_the_input_ids():
    row = parse_record({"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [5, 6]})
    assert row == TokenRow((TokenText((5, 6), (False, True)),))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"input_ids": [1, 5], "labels": [-100, 7]},
            "label 7 at place 1 of input id 5; .* must equal input_ids at its own place",
        ),
        (
            {"input_ids": [1, 5], "loss_mask": [0, 2]},
            "'loss_mask' has 2 at place 1; give 0 or 1, false or true",
        ),
        (
            {"input_ids": [1, True], "loss_mask": [0, 1]},
            "'input_ids' is not a list of integers: it has true at place 1",
        ),
    ],
)
def test_a_bad_value_of_a_token_row_is_shown_with_its_place_and_what_belongs_there(record, words):
    with pytest.raises(UnusableRow, match=words):
        parse_record(record)


def test_the_ids_a_server_gave_are_supervised_after_its_prompt():
    row = parse_record({"prompt_ids": [5, 6], "completion_ids": [7], "finish_reason": "length"})
    assert row == TokenRow((TokenText((5, 6, 7), (False, False, True)),), truncated=True)


def test_turns_given_as_ids_are_one_document_as_long_as_each_goes_on_from_the_last():
    turns = [
        {"prompt_ids": [1, 2], "completion_ids": [3]},
        {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6]},
        {"prompt_ids": [1, 9, 4, 5, 6, 7], "completion_ids": [8]},
    ]
    row = parse_record({"token_turns": turns})
    assert isinstance(row, TokenRow)
    assert [document.input_ids for document in row.documents] == [(1, 2, 3, 4, 5, 6), (1, 9, 4, 5, 6, 7, 8)]
    assert row.documents[0].supervised == (False, False, True, False, True, True)
    assert row.documents[1].supervised == (False,) * 6 + (True,)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["not", "an", "object"], Reason.NOT_A_ROW),
        ({"text": "raw"}, Reason.NOT_A_ROW),
        ({"messages": "hello"}, Reason.NOT_A_ROW),
        ({"messages": [["user", "hi"]]}, Reason.NOT_A_ROW),
        ({"messages": [{"content": "hi"}]}, Reason.NOT_A_ROW),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"no": "name"}]}]}, Reason.NOT_A_ROW),
        ({"messages": [ASK, ANSWER], "tools": "weather"}, Reason.NOT_A_ROW),
        ({"input_ids": [1, 2]}, Reason.NOT_A_ROW),
        ({"input_ids": "12", "loss_mask": [1]}, Reason.NOT_A_ROW),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, Reason.LENGTHS_DIFFER),
        ({"input_ids": [1, True, 9], "loss_mask": [0, 1, 1]}, Reason.NOT_A_ROW),
        ({"input_ids": [1, None, 9], "loss_mask": [0, 1, 1]}, Reason.NOT_A_ROW),
        ({"input_ids": [1, 9], "labels": [-100, True]}, Reason.NOT_A_ROW),
        ({"prompt_ids": [1, False], "completion_ids": [9]}, Reason.NOT_A_ROW),
        ({"token_turns": [{"prompt_ids": [1], "completion_ids": [True]}]}, Reason.NOT_A_ROW),
        ({"input_ids": [1, 5, 9], "loss_mask": [0, 2, 1]}, Reason.BAD_MASK),
        ({"input_ids": [1, 5, 9], "assistant_masks": [-100, 1, 1]}, Reason.BAD_MASK),
        ({"input_ids": [1, 5, 9], "loss_mask": [0, 0.5, 1]}, Reason.BAD_MASK),
        ({"input_ids": [1, 5, 9], "labels": [-100, 7, 9]}, Reason.LABELS_DIFFER),
        ({"input_ids": [1, 5, 9], "labels": [5, 9, -100]}, Reason.LABELS_DIFFER),
        ({"input_ids": [1, 5, 9], "loss_mask": [1, 1, 0], "labels": [5, 9, -100]}, Reason.LABELS_DIFFER),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, Reason.NOT_TEXT),
        ({"messages": [{"role": "user", "content": 5}]}, Reason.NOT_TEXT),
        ({"messages": [{"role": "user", "content": "half of an emoji \ud83d"}]}, Reason.NOT_TEXT),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(record, reason):
    with pytest.raises(UnusableRow) as refused:
        parse_record(record)
    assert refused.value.reason is reason
    assert reason.malformed is (reason is not Reason.NOT_TEXT)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((), Reason.NO_MESSAGES),
        (({"role": "system", "content": "s"},), Reason.SYSTEM_ONLY),
        ((ASK,), Reason.USER_ONLY),
        ((ASK, {"role": "assistant", "content": " \n"}), Reason.EMPTY_ASSISTANT),
        ((ASK, ASK, ANSWER), Reason.ROLES),
        ((ASK, ANSWER, ANSWER), Reason.ROLES),
    ],
)
def test_a_conversation_with_nothing_to_learn_from_is_refused_with_the_reason(messages, reason):
    with pytest.raises(UnusableRow) as refused:
        trim_to_last_answer(Conversation(messages))
    assert refused.value.reason is reason
    assert not reason.malformed
