"""What the package embeds: the grammar's honest split, the tokenizer, the targets, their conversations."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from random import Random
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftline.embedded import embedded_path, train_conversations, unseen_prompts
from draftline.embedded.grammar import TASKS, sample, task_at
from draftline.embedded.prompts import NUM_HELD_OUT_TOPICS, TOPICS, held_out_prompts, training_prompts

Name = Literal["tiny", "hybrid"]
NAMES: tuple[Name, ...] = ("tiny", "hybrid")
SAMPLES = 10_000


@cache
def tokenizer_of(name: Name):
    return AutoTokenizer.from_pretrained(embedded_path(name))


@cache
def model_of(name: Name):
    return AutoModelForCausalLM.from_pretrained(embedded_path(name), dtype=torch.float32).eval()


@cache
def conversations() -> list[list[dict[str, str]]]:
    with gzip.open(train_conversations(), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def greedy_ids(name: Name, prompt: str) -> list[int]:
    inputs = tokenizer_of(name).apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        ids = model_of(name).generate(**inputs, max_new_tokens=144, do_sample=False)[0]
    return ids[inputs["input_ids"].shape[1] :].tolist()


def greedy_answer(name: Name, prompt: str) -> str:
    return tokenizer_of(name).decode(greedy_ids(name, prompt), skip_special_tokens=True)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def test_no_test_prompt_and_no_test_answer_occurs_in_training() -> None:
    train = [sample(0, index, "train") for index in range(SAMPLES)]
    for seed in (0, 1):
        test = [sample(seed, index, "test") for index in range(SAMPLES)]
        assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in test}
        assert not {answer for _, answer in train} & {answer for _, answer in test}


def test_a_sample_depends_on_its_seed_index_and_split_alone() -> None:
    assert sample(5, 8, "train") == sample(5, 8, "train")
    assert len({sample(seed, index, "train") for seed in (0, 1) for index in range(8, 200, 10)}) == 40
    assert sample(5, 8, "train") != sample(5, 8, "test")


def test_kinds_of_request_take_turns() -> None:
    assert [task_at(index).name for index in range(len(TASKS))] == [task.name for task in TASKS]
    assert task_at(len(TASKS)) is TASKS[0]


@pytest.mark.parametrize(
    "task", [task for task in TASKS if task.is_deterministic], ids=lambda task: task.name
)
def test_the_prompt_alone_leaves_one_answer(task) -> None:
    first = TASKS.index(task)
    pairs = [sample(0, index, "train") for index in range(first, 20_000, len(TASKS))]
    assert len(set(pairs)) == len({prompt for prompt, _ in pairs})


def test_sums_counts_and_orders_are_right() -> None:
    for index in range(0, 2_000, len(TASKS)):
        count, addition, sort = (
            sample(0, index + [task.name for task in TASKS].index(name), "test")
            for name in ("count", "add", "sort")
        )
        first, last, *step = map(int, re.findall(r"\d+", count[0]))
        assert list(map(int, re.findall(r"\d+", count[1]))) == list(range(first, last + 1, *step))
        assert int(re.findall(r"\d+", addition[1])[-1]) == sum(map(int, re.findall(r"\d+", addition[0])))
        assert words(sort[1]) == sorted(words(sort[0].split(": ")[1]))


def test_one_prompt_allows_many_stories_and_letters() -> None:
    for task in TASKS:
        content = task.draw(Random(0))
        answers = {task.answer(Random(seed), content) for seed in range(200)}
        assert (len(answers) == 1) if task.is_deterministic else (len(answers) > 190)


def test_both_targets_have_the_same_tokenizer_of_512_ids() -> None:
    tiny, hybrid = (tokenizer_of(name) for name in NAMES)
    assert tiny.backend_tokenizer.to_str() == hybrid.backend_tokenizer.to_str()
    assert tiny.chat_template == hybrid.chat_template
    assert len(tiny) == 512
    assert (tiny.pad_token_id, tiny.bos_token_id, tiny.eos_token_id, tiny.mask_token_id) == (0, 1, 2, 3)


def test_text_survives_the_tokenizer() -> None:
    tokenizer = tokenizer_of("tiny")
    for index in range(200):
        for text in (*sample(0, index, "test"), "Grüße, 世界!\n\n  tab\there"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_marks_exactly_what_the_assistant_writes() -> None:
    tokenizer = tokenizer_of("tiny")
    chat = [
        {"role": "user", "content": "Repeat: a."},
        {"role": "assistant", "content": "a."},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "a. a."},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    written = [id for id, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(written) == "a.<|im_end|>a. a.<|im_end|>"


@pytest.mark.parametrize(("name", "most_bytes"), [("tiny", 5_000_000), ("hybrid", 3_000_000)])
def test_a_target_is_small_and_stored_in_bfloat16(name: Name, most_bytes: int) -> None:
    assert sum(path.stat().st_size for path in embedded_path(name).iterdir()) < most_bytes
    assert model_of(name).config.dtype == torch.float32
    assert json.loads((embedded_path(name) / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_config_has_both_forms_of_the_rope_settings(name: Name) -> None:
    config = json.loads((embedded_path(name) / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_the_hybrid_has_linear_and_full_attention() -> None:
    assert set(model_of("hybrid").config.layer_types) == {"linear_attention", "full_attention"}


@pytest.mark.parametrize("name", NAMES)
def test_a_target_ends_its_answers_to_unseen_prompts(name: Name) -> None:
    prompts = [sample(11, index, "test")[0] for index in range(len(TASKS))]
    ended = sum(greedy_ids(name, prompt)[-1] == tokenizer_of(name).eos_token_id for prompt in prompts)
    assert ended >= 0.8 * len(prompts)


def test_tiny_answers_unseen_prompts_exactly() -> None:
    deterministic = [index for index in range(20) if task_at(index).is_deterministic]
    pairs = [sample(12, index, "test") for index in deterministic]
    right = sum(greedy_answer("tiny", prompt) == answer for prompt, answer in pairs)
    assert right >= 0.9 * len(pairs)


def test_the_conversations_are_what_tiny_says() -> None:
    for user, assistant in conversations()[::200]:
        assert greedy_answer("tiny", user["content"]) == assistant["content"]


def test_the_conversations_are_many_and_small() -> None:
    assert len(conversations()) >= 1_500
    assert train_conversations().stat().st_size < 200_000
    assert all([message["role"] for message in chat] == ["user", "assistant"] for chat in conversations())


def test_no_conversation_contains_a_test_prompt_or_a_test_answer() -> None:
    lines = [json.loads(line) for line in unseen_prompts().read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 200
    assert {line["task"] for line in lines} == {task.name for task in TASKS}
    asked = {chat[0]["content"] for chat in conversations()}
    assert not asked & {line["messages"][0]["content"] for line in lines}
    answered = {chat[1]["content"] for chat in conversations()}
    assert not answered & {sample(seed, index, "test")[1] for seed in range(5) for index in range(2_000)}


def test_no_training_prompt_for_real_models_is_about_a_held_out_topic() -> None:
    train, held_out = training_prompts(), held_out_prompts()
    assert len(TOPICS) == len(set(TOPICS))
    assert len(train) + len(held_out) == 20 * len(TOPICS)
    topics = {topic for topic in TOPICS if f"Describe {topic} to a child." in held_out}
    assert len(topics) == NUM_HELD_OUT_TOPICS
    assert not [prompt for prompt in train for topic in topics if re.search(rf"\b{topic}\b", prompt)]
