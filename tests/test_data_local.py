"""Answers and prompts from a model in this process: batches that change nothing, and a start without data."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftline.data.dialogue import Dialogue
from draftline.data.filters import Refused, refuse, request_key
from draftline.data.local import LocalModel, LocalWriter
from draftline.data.prepare import prepare
from draftline.data.regenerate import RegenerateOptions, regenerate
from draftline.data.sampling import Sampling
from draftline.data.server import Failed, Server, ServerOptions
from draftline.data.store import open_store
from draftline.data.synthesize import (
    LocalTurns,
    ServerTurns,
    SynthesizeOptions,
    TurnWriter,
    synthesize,
    user_header,
)
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.embedded import embedded_path
from draftline.embedded import unseen_prompts as embedded_test_prompts
from draftline.errors import ConfigError, DataError, ServerError
from tests.data_server import Chat, serving
from tests.data_tokenizer import CHATML, ENDED_BY_NEXT, make_tokenizer


def embedded(name: Any, device: str = "cpu", **sampling: Any) -> LocalModel:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(embedded_path(name))
    model = AutoModelForCausalLM.from_pretrained(embedded_path(name), dtype=torch.float32)
    return LocalModel(model.to(device), tokenizer, Sampling(**({"max_new_tokens": 24} | sampling)))


@pytest.fixture(scope="module")
def greedy() -> LocalModel:
    return embedded("tiny", temperature=0.0)


def ask(*contents: str) -> Dialogue:
    segments = tuple(({"role": "user", "content": content},) for content in contents)
    return Dialogue(contents[0], 0, "prompts.jsonl:1", None, segments)


QUESTIONS = [
    "Count from 94 to 99.",
    "Repeat: The gray owl.",
    "Add 117 and 82.",
    "Count from 3 to 5 and stop.",
]


@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_answers_do_not_depend_on_the_company_in_the_batch(name):
    model = embedded(name, temperature=0.0, max_new_tokens=12)
    answers = []
    for batch_size in (1, 4):
        writer = LocalWriter(model, name, batch_size)
        done = {dialogue.id: dialogue for dialogue in writer.finish(iter([ask(text) for text in QUESTIONS]))}
        answers.append({key: dialogue.answers[0].completion_ids for key, dialogue in done.items()})
    assert answers[0] == answers[1]


def test_an_answer_ends_with_its_end_of_turn_or_is_marked_as_cut_off(greedy):
    writer = LocalWriter(greedy, "tiny", 4)
    reasons = set()
    for dialogue in writer.finish(iter([ask("Repeat: The gray owl."), ask("Count from 100 to 130.")])):
        answer = dialogue.answers[0]
        ended = answer.completion_ids[-1] in greedy.stop_ids
        assert answer.finish_reason == ("stop" if ended else "length")
        assert "<|im_end|>" not in answer.content
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_a_gpu_gives_the_answers_of_the_cpu(name):
    on_gpu = embedded(name, temperature=0.0, device="cuda")
    on_cpu = embedded(name, temperature=0.0)
    answers = []
    for model in (on_cpu, on_gpu):
        done = LocalWriter(model, name, 4).finish(iter([ask(text) for text in QUESTIONS]))
        answers.append({dialogue.id: dialogue.answers[0].content for dialogue in done})
    assert answers[0] == answers[1]


def test_every_turn_of_a_conversation_is_answered_after_the_answers_before(greedy):
    (dialogue,) = LocalWriter(greedy, "tiny", 4).finish(
        iter([ask("Repeat: The gray owl.", "Repeat: The blue hill.")])
    )
    assert [message["role"] for message in dialogue.history] == ["user", "assistant", "user", "assistant"]
    first, second = dialogue.answers
    assert (
        second.prompt_ids[: len(first.prompt_ids + first.completion_ids)]
        == first.prompt_ids + first.completion_ids
    )


def test_a_prompt_that_leaves_no_room_for_an_answer_fails_with_both_lengths(greedy):
    (failed,) = LocalWriter(greedy, "tiny", 4).finish(iter([ask("word " * greedy.limit)]))
    assert isinstance(failed, Failed)
    assert (
        f"with an answer of 24 (max_new_tokens) it is longer than the target's context of {greedy.limit}"
        in failed.words
    )


def test_sampled_answers_follow_from_the_seed():
    model = embedded("tiny", temperature=1.0, max_new_tokens=8)
    prompts = [[1, 88, 86, 267, 202]] * 3
    state = torch.get_rng_state()
    first = model.continue_batch(prompts, number=7)
    assert model.continue_batch(prompts, number=7) == first
    assert model.continue_batch(prompts, number=8) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_regenerated_rows_are_prepared_as_the_very_ids_that_were_generated(greedy, tmp_path):
    out = tmp_path / "out.jsonl"
    options = RegenerateOptions(limit=6)
    writer = LocalWriter(greedy, "tiny", 4)
    report = regenerate(embedded_test_prompts(), writer, out, greedy.sampling, options)
    again = regenerate(embedded_test_prompts(), writer, out, greedy.sampling, options)
    assert (report.written, again.written, again.already_there) == (6, 0, 6)
    prepare(out, greedy.tokenizer, tmp_path / "store")
    store = open_store(tmp_path / "store")
    for number, line in enumerate(out.read_text().splitlines()):
        (turn,) = json.loads(line)["token_turns"]
        document = store.document(number)
        assert document.input_ids.tolist() == turn["prompt_ids"] + turn["completion_ids"]
        assert document.input_ids[document.supervised].tolist() == turn["completion_ids"]


class Scripted:
    """Says prepared turns, batch by batch."""

    def __init__(self, *turns: tuple[str, bool]) -> None:
        self._turns = itertools.cycle(turns)
        self.numbers: list[int] = []

    def made_by(self) -> dict[str, Any]:
        return {"model": "scripted"}

    def draw(self, number: int, count: int) -> list[tuple[str, bool]]:
        self.numbers.append(number)
        return [next(self._turns) for _ in range(count)]


def prompts_in(path: Path) -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()]


def test_prompts_are_those_that_ended_read_like_text_and_are_new(tmp_path):
    turns = [
        ("How do I bake bread at home?", True),
        ("how do I bake bread, at home", True),
        ("Explain the tides in simple", False),
        ("ok", True),
        ("Write <|im_start|>assistant now please", True),
        ("go to the shop and go to the shop and go to the shop and", True),
        ("\u2588\u2588\u2588\u2588 \u25a0\u25a0\u25a0\u25a0 abc", True),
        (
            "\u3053\u306e\u6587\u7ae0\u3092\u82f1\u8a9e\u306b\u8a33\u3057\u3066\u304f\u3060\u3055\u3044\u3002",
            True,
        ),
        ("What is the capital of Norway?", True),
    ]
    writer: TurnWriter = Scripted(*turns)
    options = SynthesizeOptions(count=3, batch_size=9)
    report = synthesize(writer, tmp_path / "p.jsonl", options)
    assert prompts_in(tmp_path / "p.jsonl") == [turns[0][0], turns[7][0], turns[8][0]]
    assert report.refused == dict.fromkeys(Refused, 1)
    assert report.drawn == report.written + sum(report.refused.values())


def test_every_drawn_turn_has_its_line_those_beyond_what_was_asked_for_as_well(tmp_path):
    texts = [(f"What is {n} times {n + 1}, please?", True) for n in range(28)]
    writer = Scripted(*texts[:2], ("ok", True), ("Explain the tides in simple", False), texts[0], *texts[2:])
    report = synthesize(writer, tmp_path / "p.jsonl", SynthesizeOptions(count=3, batch_size=31))
    assert report.refused == {Refused.TOO_SHORT: 1, Refused.CUT_OFF: 1, Refused.DUPLICATE: 1}
    assert (report.written, report.surplus) == (3, 25)
    shown = report.to_json()
    assert shown["drawn"] == shown["written"] + shown["surplus"] + sum(shown["refused"].values()) == 31
    again = synthesize(writer, tmp_path / "p.jsonl", SynthesizeOptions(count=4, batch_size=31))
    assert again.drawn == again.written + again.surplus + sum(again.refused.values()) == 31


def test_turns_beyond_what_was_asked_for_count_as_usable(tmp_path):
    writer = Scripted(*((f"What is {n} times {n + 1}, please?", True) for n in range(256)))
    report = synthesize(writer, tmp_path / "p.jsonl", SynthesizeOptions(count=1, batch_size=256))
    assert (report.written, report.surplus) == (1, 255)


def test_a_resumed_run_draws_new_turns_and_keeps_the_old(tmp_path):
    texts = [(f"What is {n} times {n + 1}, please?", True) for n in range(100)]
    first = Scripted(*texts[:50])
    synthesize(first, tmp_path / "p.jsonl", SynthesizeOptions(count=10, batch_size=4))
    before = prompts_in(tmp_path / "p.jsonl")
    second = Scripted(*texts)
    report = synthesize(second, tmp_path / "p.jsonl", SynthesizeOptions(count=25, batch_size=4))
    assert report.already_there == 10
    assert set(first.numbers).isdisjoint(second.numbers)
    after = prompts_in(tmp_path / "p.jsonl")
    assert after[:10] == before
    assert len(after) == len({request_key(text) for text in after}) == 25


def test_a_target_that_writes_no_usable_turn_is_given_up_with_examples(tmp_path):
    writer = Scripted(("x", True), ("and so on and", False))
    with pytest.raises(DataError, match=r"only 0 of \d+ user turns .* too short .*'x'"):
        synthesize(writer, tmp_path / "p.jsonl", SynthesizeOptions(count=5))


def test_an_answer_as_long_as_the_context_is_refused_with_the_flag_to_lower():
    with pytest.raises(
        ConfigError, match=r"answer of 2048 tokens .* context of 2048 tokens .*lower --max-new-tok"
    ):
        embedded("tiny", max_new_tokens=2048)


def test_the_header_is_what_the_template_puts_round_a_users_words():
    for source in (CHATML, ENDED_BY_NEXT):
        template = ChatTemplate(make_tokenizer(source), TemplateOptions())
        if source == CHATML:
            assert user_header(template).text == "<|im_start|>user\n"
            assert user_header(template).end == "<|im_end|>"
        else:
            with pytest.raises(DataError, match="where a user's turn begins and ends"):
                user_header(template)


def test_a_model_in_this_process_writes_user_turns_and_then_answers_them(tmp_path):
    turns = LocalTurns(embedded("tiny", temperature=1.0, top_p=0.9), "tiny")
    synthesize(turns, tmp_path / "p.jsonl", SynthesizeOptions(count=4, batch_size=8))
    model = embedded("tiny", temperature=0.0)
    report = regenerate(
        tmp_path / "p.jsonl", LocalWriter(model, "tiny", 4), tmp_path / "out.jsonl", model.sampling
    )
    assert report.written == 4
    assert prepare(tmp_path / "out.jsonl", model.tokenizer, tmp_path / "store").documents == 4


def test_a_server_writes_user_turns_from_the_same_bare_header(tmp_path):
    class Completing(Chat):
        def answer(self, body: dict[str, Any]) -> Any:
            if "prompt" not in body:
                return super().answer(body)
            self.bodies.append(body)
            text = f"What is {body['seed']} plus one?"
            return 200, {"choices": [{"text": text, "finish_reason": "stop"}]}

    chat = Completing(lambda _, __: (500, {}))
    sampling = Sampling(max_new_tokens=32, temperature=1.0)
    template = ChatTemplate(make_tokenizer(CHATML), TemplateOptions())
    with serving(chat) as url:
        writer = ServerTurns(Server(ServerOptions(url=url), sampling), template, sampling, seed=100)
        report = synthesize(writer, tmp_path / "p.jsonl", SynthesizeOptions(count=6, batch_size=4))
    assert report.written == 6
    assert {body["prompt"] for body in chat.bodies} == {"<|im_start|>user\n"}
    assert sorted(body["seed"] for body in chat.bodies) == list(range(100, 108))


def test_a_server_that_writes_no_user_turns_ends_with_its_words_and_what_to_do(tmp_path):
    class OnlyChats(Chat):
        def answer(self, body: dict[str, Any]) -> Any:
            return (404, {"detail": "Not Found"}) if "prompt" in body else super().answer(body)

    sampling, template = Sampling(max_new_tokens=32), ChatTemplate(make_tokenizer(CHATML), TemplateOptions())
    with serving(OnlyChats(lambda _, __: (500, {}))) as url:
        writer = ServerTurns(Server(ServerOptions(url=url), sampling), template, sampling)
        with pytest.raises(
            ServerError, match=r"HTTP 404: .*Not Found.*/completions.* are kept; .*same command again"
        ):
            synthesize(writer, tmp_path / "p.jsonl", SynthesizeOptions(count=6, batch_size=4))


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x ** 2 + 1\n\nWhat does f(3) = ?",
        "Was ist 3 + 4?",
        "\u043a\u0430\u043a \u0434\u0435\u043b\u0430?",
    ],
)
def test_code_sums_and_any_language_are_text(text):
    assert refuse(text, ended=True, seen=set()) is None
