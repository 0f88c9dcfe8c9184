"""The data commands as they are typed: every flag reaches what it is for, and a flag without effect is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftline.cli import app
from draftline.data.reasons import Note, Reason
from draftline.embedded import embedded_path
from draftline.errors import ConfigError, DataError, ServerError
from tests.data_server import Chat, Reply, completion, serving
from tests.data_tokenizer import CHATML

TOOL = {"type": "function", "function": {"name": "weather"}}
ROWS: list[Any] = [
    {
        "messages": [
            {"role": "user", "content": "Add 117 and 82."},
            {"role": "assistant", "content": "So 117 + 82 = 199."},
            {"role": "user", "content": "Add 3."},
            {"role": "assistant", "content": "So 199 + 3 = 202."},
        ]
    },
    {"prompt": "Count to 100.", "response": "1, 2, 3, 4,", "finish_reason": "length"},
    {"prompt": "How many apples?", "response": "Three apples.", "reasoning_content": "Count."},
]
SWITCHED = CHATML.replace(
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + (mood or '') }}",
)


def draftline(*tokens: object) -> None:
    app(
        [str(token) for token in tokens], exit_on_error=False, print_error=False, result_action="return_value"
    )


def answered(capsys: pytest.CaptureFixture[str], *tokens: object) -> dict[str, Any]:
    capsys.readouterr()
    draftline(*tokens, "--json")
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def prepared(chats: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*flags: object) -> dict[str, Any]:
        out = chats.with_name(f"store-{len(list(chats.parent.iterdir()))}")
        return answered(capsys, "prepare", chats, out, "--target=builtin:tiny", *flags)

    return run


def echo(body: dict[str, Any], _: int) -> Reply:
    return 200, completion(f"You said: {body['messages'][-1]['content']}")


def test_prepare_clips_at_the_length_asked_for(prepared):
    assert prepared()["notes"].get(str(Note.CLIPPED)) is None
    assert prepared("--max-length=30")["notes"][str(Note.CLIPPED)] >= 1


def test_prepare_refuses_a_length_beyond_the_targets_context(prepared):
    assert prepared("--max-length=2048")["kept"] == 3
    with pytest.raises(ConfigError, match=r"max_length=4096 .*context of 2048 tokens"):
        prepared("--max-length=4096")


def test_prepare_supervises_the_last_turn_only_when_asked(prepared):
    assert prepared("--turns=last")["supervised"] < prepared()["supervised"]


def test_prepare_drops_truncated_answers_when_asked(prepared):
    assert prepared("--truncated=drop")["dropped"] == {str(Reason.TRUNCATED): 1}


def test_prepare_goes_past_a_line_that_is_no_conversation_when_asked(prepared, chats):
    with chats.open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(DataError, match=r"chats\.jsonl:4: not valid JSON.*--on-error skip"):
        prepared()
    assert prepared("--on-error=skip")["dropped"] == {str(Reason.NOT_JSON): 1}


def test_prepare_takes_a_template_its_variables_and_tools_from_files(prepared, tmp_path, capsys):
    (tmp_path / "chat.jinja").write_text(
        SWITCHED.replace("{%- for", "{{- tools | tojson if tools }}{%- for", 1)
    )
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    file = f"--template={tmp_path / 'chat.jinja'}"
    plain, offered = prepared(file), prepared(file, f"--tools={tmp_path / 'tools.json'}")
    assert "weather" not in plain["samples"][0][0]["text"]
    assert '"weather"' in offered["samples"][0][0]["text"]
    # The prompt now ends in words that the rendered answers do not have: nothing can be marked.
    with pytest.raises(DataError, match="does not show where the answer starts"):
        prepared(file, "--template-variables", '{"mood": "gladly: "}')


def test_a_share_of_rows_without_supervision_is_allowed_when_asked(prepared, tmp_path):
    (tmp_path / "chat.jinja").write_text(SWITCHED)
    flags = (f"--template={tmp_path / 'chat.jinja'}", "--template-variables", '{"mood": "gladly: "}')
    with pytest.raises(DataError, match=r"--max-unmasked-share"):
        prepared(*flags)
    with pytest.raises(DataError, match="none of the 3 rows"):
        prepared(*flags, "--max-unmasked-share=1")


def test_the_thinking_switch_reaches_the_template(prepared, tmp_path):
    text = SWITCHED.replace("(mood or '')", "('' if enable_thinking else '<think></think>')")
    (tmp_path / "chat.jinja").write_text(text)
    file = f"--template={tmp_path / 'chat.jinja'}"
    assert prepared(file, "--thinking=on")["kept"] == 3
    off = prepared(file, "--thinking=off")
    assert "<think></think>" in off["samples"][0][0]["text"]
    assert "<think></think>" not in prepared(file, "--thinking=on")["samples"][0][0]["text"]


def test_a_token_named_as_one_that_ends_answers_may_not_stand_inside_one(prepared, chats):
    tokenizer = AutoTokenizer.from_pretrained(embedded_path("tiny"))
    with chats.open("a") as stream:
        stream.write('{"prompt": "x", "response": "It begins <|im_start|> here."}\n')
    assert prepared()["kept"] == 4
    flag = f"--stop-token-ids={tokenizer.convert_tokens_to_ids('<|im_start|>')}"
    assert prepared(flag)["dropped"] == {str(Reason.STOP_INSIDE): 1}


def test_a_stop_token_beyond_the_vocabulary_is_refused_with_the_range(prepared):
    with pytest.raises(ConfigError, match=r"stop_token_ids=\[-1, 9999999\] .* which has tokens 0 to \d+"):
        prepared("--stop-token-ids=-1", "--stop-token-ids=9999999")


def test_a_file_of_a_flag_that_cannot_be_read_is_named(prepared, tmp_path):
    (tmp_path / "tools.json").write_text("[]")
    for flag, words in (
        ("--template=nowhere.jinja", r"template nowhere\.jinja cannot be read"),
        ("--tools=nowhere.json", r"tools of nowhere\.json cannot be read"),
        (f"--tools={tmp_path / 'tools.json'}", "holds no tools"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepared(flag)


def test_prepare_replaces_another_tokenizers_store_only_when_told_to(chats, tmp_path, capsys):
    arguments = ("prepare", chats, tmp_path / "store")
    answered(capsys, *arguments, "--target=builtin:tiny")
    manifest = tmp_path / "store" / "manifest.json"
    made = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(made | {"tokenizer": "another", "key": "another"}))
    with pytest.raises(ConfigError, match="--overwrite"):
        draftline(*arguments, "--target=builtin:tiny")
    assert answered(capsys, *arguments, "--target=builtin:tiny", "--overwrite")["kept"] == 3
    assert json.loads(manifest.read_text())["tokenizer"] == made["tokenizer"]


def test_prepare_shows_the_report_and_how_far_it_is(chats, tmp_path, capsys):
    draftline("prepare", chats, tmp_path / "store", "--target=builtin:tiny")
    shown = capsys.readouterr()
    assert "[[So 117 + 82 = 199.<|im_end|>]]" in shown.out
    assert "MiB read 1/1  3 rows" in shown.err
    draftline("prepare", chats, tmp_path / "store", "--target=builtin:tiny")
    assert "MiB read" not in capsys.readouterr().err  # nothing had changed


def test_regenerate_passes_every_flag_on_to_the_server(chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KEY_OF_TODAY", "hush")
    (tmp_path / "tools.json").write_text(json.dumps(TOOL))
    chat = Chat(echo, models=["large", "small"], takes_token_ids=False)
    with serving(chat) as url:
        report = answered(
            capsys, "regenerate", chats, tmp_path / "out.jsonl", f"--url={url}", "--model=small",
            "--max-new-tokens=77", "--temperature=0.5", "--top-p=0.9", "--no-thinking", "--turns=last",
            "--limit=2", f"--tools={tmp_path / 'tools.json'}", "--extra", '{"top_k": 20}', "--concurrency=1",
            "--api-key-variable=KEY_OF_TODAY",
        )  # fmt: skip
    assert report["written"] == len(chat.bodies) == 2
    assert chat.most_in_work == 1
    assert set(chat.keys) == {"Bearer hush"}
    assert "hush" not in (tmp_path / "out.jsonl").read_text()
    body = chat.bodies[0]
    assert (body["model"], body["max_tokens"], body["top_k"]) == ("small", 77, 20)
    assert (body["temperature"], body["top_p"], body["tools"]) == (0.5, 0.9, [TOOL])
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]


def test_regenerate_gives_up_and_tries_again_as_told(chats, tmp_path, capsys):
    chat = Chat(lambda _, __: (503, b"the GPU is on fire"))
    flags = ("--retries=2", "--first-delay-s=0.01", "--give-up-after=2", "--timeout-s=30")
    with serving(chat) as url, pytest.raises(ServerError, match=r"2 rows in a row .*the GPU is on fire"):
        draftline("regenerate", chats, tmp_path / "out.jsonl", f"--url={url}", "--concurrency=1", *flags)
    assert len(chat.bodies) == 6


def test_a_row_that_cannot_be_asked_is_in_the_report_of_the_command(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"messages": []}\n{"prompt": "x"}\n')
    with serving(Chat(echo)) as url:
        report = answered(capsys, "regenerate", tmp_path / "p.jsonl", tmp_path / "o.jsonl", f"--url={url}")
    assert report["skipped"] == {str(Reason.NO_MESSAGES): 1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "name either --url"),
        (("--url=http://x/v1", "--target=builtin:tiny"), "name either --url"),
        (
            ("--target=builtin:tiny", "--concurrency=3", "--model=x"),
            "--concurrency, --model say how a server .* leave them out",
        ),
        (("--target=builtin:tiny", "--concurrency=3"), "--concurrency says how a server .* leave it out"),
        (("--url=http://x/v1", "--seed=1"), "--seed is for a model .* leave it out"),
        (("--url=http://x/v1", "--batch-size=3", "--seed=1"), "--batch-size, --seed are for a model"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(chats, tmp_path, flags, words):
    with pytest.raises(ConfigError, match=words):
        draftline("regenerate", chats, tmp_path / "out.jsonl", *flags)


def test_a_model_in_this_process_answers_by_seed_and_batch(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "What is 12 + 5?"}\n{"prompt": "Add 3 and 4."}\n')

    def answers(name: str, *flags: str) -> list[str]:
        arguments = ("regenerate", tmp_path / "p.jsonl", tmp_path / name, "--target=builtin:tiny")
        answered(capsys, *arguments, "--max-new-tokens=12", "--temperature=3", *flags)
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [row["messages"][-1]["content"] for row in rows]

    first = answers("a.jsonl", "--seed=1")
    assert answers("b.jsonl", "--seed=1") == first
    assert answers("c.jsonl", "--seed=2") != first
    assert answers("d.jsonl", "--seed=1", "--batch-size=1") != first


class Completing(Chat):
    """A server that also continues raw text."""

    def answer(self, body: dict[str, Any]) -> Any:
        if "prompt" not in body:
            return super().answer(body)
        with self.lock:
            self.bodies.append(body)
            if len(self.bodies) == 1:
                return 503, b"starting"
        text = f"What is {body['seed']} plus one?"
        return 200, {"choices": [{"text": text, "finish_reason": "stop"}]}


def test_synthesize_asks_a_server_for_user_turns_and_again_after_a_passing_failure(tmp_path, capsys):
    chat = Completing(echo)
    with serving(chat) as url:
        report = answered(
            capsys, "synthesize", tmp_path / "p.jsonl", "--target=builtin:tiny", f"--url={url}", "--count=5",
            "--batch-size=8", "--concurrency=2", "--seed=40", "--max-new-tokens=33", "--temperature=0.9",
            "--top-p=0.8", "--first-delay-s=0.01",
        )  # fmt: skip
    assert report["written"] == 5
    assert len(chat.bodies) == 9  # eight turns, one of them twice
    assert {body["seed"] for body in chat.bodies} == set(range(40, 48))
    assert {(body["max_tokens"], body["temperature"], body["top_p"]) for body in chat.bodies} == {
        (33, 0.9, 0.8)
    }
    assert all(body["prompt"].endswith("user\n") for body in chat.bodies)


def test_synthesize_here_gives_up_at_the_yield_asked_for(tmp_path):
    flags = ("--target=builtin:tiny", "--count=300", "--max-new-tokens=2", "--batch-size=256")
    with pytest.raises(DataError, match="user turns of this target are usable"):
        draftline("synthesize", tmp_path / "p.jsonl", *flags, "--min-yield=0.9")


def test_inspect_refuses_a_page_that_cannot_be_written_and_two_selections_at_once(chats, tmp_path, capsys):
    store = tmp_path / "store"
    answered(capsys, "prepare", chats, store, "--target=builtin:tiny")
    for page in (tmp_path, tmp_path / "nowhere" / "p.html"):
        with pytest.raises(ConfigError, match=f"{page} cannot be written"):
            draftline("inspect", store, "--target=builtin:tiny", f"--html={page}")
    with pytest.raises(ConfigError, match=r"document=1 and source=2 .* give one of them"):
        draftline("inspect", store, "--target=builtin:tiny", "--document=1", "--source=2")


def test_inspect_replaces_a_page_of_its_own_and_no_other_file(chats, tmp_path, capsys):
    store, page = tmp_path / "store <b>", tmp_path / "page.html"
    answered(capsys, "prepare", chats, store, "--target=builtin:tiny")
    for text in ("target: {path: builtin:tiny}\n", "<!doctype html>\n<p>mine</p>\n"):
        page.write_text(text)
        with pytest.raises(ConfigError, match=r"page\.html exists and is no page .* Name another"):
            draftline("inspect", store, "--target=builtin:tiny", f"--html={page}")
        assert page.read_text() == text
    page.write_text("")  # as mktemp leaves one
    for number in (0, 1):
        draftline("inspect", store, "--target=builtin:tiny", f"--document={number}", f"--html={page}")
        assert f"document {number}</h2>" in page.read_text()


@pytest.mark.parametrize("text", ["my only note", '{"prompt": "without an end of line"}', "a\nb\n"])
def test_prompts_and_answers_are_written_into_no_file_of_somebody_elses(text, chats, tmp_path):
    out = tmp_path / "mine.jsonl"
    out.write_text(text)
    for command in (["regenerate", chats, out], ["synthesize", out, "--count=1"]):
        with pytest.raises(ConfigError, match=r"mine\.jsonl exists and was not written by this command"):
            draftline(*command, "--target=/nowhere")
        assert out.read_text() == text


def test_a_file_in_place_of_a_store_is_said_to_be_one(chats):
    with pytest.raises(DataError, match=r"chats\.jsonl is a file, not a token store"):
        draftline("inspect", chats, "--target=builtin:tiny")


def test_inspect_writes_a_page_or_json_as_asked(chats, tmp_path, capsys):
    store, page = tmp_path / "store", tmp_path / "page.html"
    answered(capsys, "prepare", chats, store, "--target=builtin:tiny")
    draftline("inspect", store, "--target=builtin:tiny", "--source=1", f"--html={page}")
    assert "1 of 3 documents" in capsys.readouterr().out
    assert "<mark>1, 2, 3, 4,</mark>" in page.read_text()
    shown = answered(capsys, "inspect", store, "--target=builtin:tiny", "--document=0")
    texts = [part["text"] for part in shown["documents"][0]["segments"] if part["supervised"]]
    assert texts == ["So 117 + 82 = 199.<|im_end|>", "So 199 + 3 = 202.<|im_end|>"]
