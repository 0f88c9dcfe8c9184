"""The target's own answers through a server: retries, limits, resume, and nothing lost or written twice."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import parse_record
from draftline.data.prepare import prepare
from draftline.data.reasons import Note, Reason
from draftline.data.regenerate import RegenerateOptions, RegenerateReport, regenerate
from draftline.data.sampling import Sampling
from draftline.data.server import Server, ServerOptions, ServerWriter, in_flight
from draftline.errors import ConfigError, DiskFullError, FolderInUseError, ServerError
from tests.data_server import Chat, Reply, completion, serving
from tests.data_tokenizer import make_tokenizer


def echo(body: dict[str, Any], _: int) -> Reply:
    return 200, completion(f"You said: {body['messages'][-1]['content']}")


def prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(count)))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(
    url: str,
    source: Path,
    out: Path,
    sampling: Sampling | None = None,
    options: RegenerateOptions | None = None,
    progress: Callable[[RegenerateReport], None] | None = None,
    **server: Any,
) -> RegenerateReport:
    sampling = sampling or Sampling(max_new_tokens=64)
    where = ServerOptions(url=url, first_delay_s=0.01, **({"concurrency": 4} | server))
    writer = ServerWriter(Server(where, sampling))
    return regenerate(source, writer, out, sampling, options, progress=progress)


def test_every_prompt_gets_the_answer_of_the_server(tmp_path):
    with serving(Chat(echo)) as url:
        report = run(url, prompts(tmp_path / "p.jsonl", 20), tmp_path / "out.jsonl")
    assert (report.written, report.failed, report.already_there) == (20, 0, 0)
    written = {row["source"]: row["messages"] for row in rows(tmp_path / "out.jsonl")}
    assert written == {
        n: [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"You said: question {n}"},
        ]
        for n in range(20)
    }


def test_no_more_requests_are_in_flight_than_asked_for(tmp_path):
    def slowly(body: dict[str, Any], times: int) -> Reply:
        time.sleep(0.02)
        return echo(body, times)

    chat = Chat(slowly)
    with serving(chat) as url:
        run(url, prompts(tmp_path / "p.jsonl", 24), tmp_path / "out.jsonl", concurrency=3)
    assert 2 <= chat.most_in_work <= 3


@pytest.mark.parametrize("trouble", [(429, {"detail": "busy"}), (503, {}), (200, b"<html>gateway</html>")])
def test_a_passing_failure_is_tried_again_and_the_row_is_written_once(tmp_path, trouble):
    chat = Chat(lambda body, times: trouble if times <= 2 else echo(body, times))
    with serving(chat) as url:
        report = run(url, prompts(tmp_path / "p.jsonl", 6), tmp_path / "out.jsonl")
    assert (report.written, report.failed) == (6, 0)
    assert set(chat.seen.values()) == {3}
    assert len({row["id"] for row in rows(tmp_path / "out.jsonl")}) == 6


def test_a_source_is_read_only_as_far_as_there_is_room():
    read: list[int] = []
    numbers = (read.append(number) or number for number in range(100))
    for done, _ in enumerate(in_flight(numbers, lambda number, _: number, 3), start=1):
        assert len(read) <= done + 3
    assert len(read) == 100


def test_a_lasting_failure_costs_its_row_only_and_is_not_tried_again(tmp_path):
    def refuse_three(body: dict[str, Any], times: int) -> Reply:
        if body["messages"][-1]["content"] == "question 3":
            return 400, {"error": {"message": "maximum context length is 8 tokens"}}
        return echo(body, times)

    chat = Chat(refuse_three)
    with serving(chat) as url:
        report = run(url, prompts(tmp_path / "p.jsonl", 6), tmp_path / "out.jsonl")
    assert (report.written, report.failed) == (5, 1)
    assert report.first_failure.startswith(f"{tmp_path / 'p.jsonl'}:4: HTTP 400")  # as prepare names it
    assert "maximum context length is 8 tokens" in report.first_failure
    assert chat.seen["question 3"] == 1


def test_a_run_that_gets_no_answer_at_all_is_a_failure_however_short_it_is(tmp_path):
    refusing = Chat(lambda _body, _times: (400, {"error": {"message": "unknown chat template"}}))
    source = prompts(tmp_path / "p.jsonl", 3)
    with (
        serving(refusing) as url,
        pytest.raises(
            ServerError,
            match=r"none of 3 rows got an answer, the first was .*p\.jsonl:\d: .*unknown chat template",
        ),
    ):
        run(url, source, tmp_path / "out.jsonl")
    with serving(Chat(echo)) as url:
        run(url, source, tmp_path / "out.jsonl")
    more = prompts(tmp_path / "p.jsonl", 4)
    with serving(refusing) as url:
        assert run(url, more, tmp_path / "out.jsonl").failed == 1, "earlier answers are worth going on with"


def test_failures_in_a_row_end_the_run_with_the_servers_words_and_keep_what_was_written(tmp_path):
    def break_down(body: dict[str, Any], times: int) -> Reply:
        number = int(body["messages"][-1]["content"].split()[1])
        return echo(body, times) if number < 5 else (500, {"error": "CUDA out of memory"})

    chat = Chat(break_down)
    source = prompts(tmp_path / "p.jsonl", 200)
    with serving(chat) as url, pytest.raises(ServerError, match=r"CUDA out of memory.*--give-up-after"):
        run(url, source, tmp_path / "out.jsonl", None, RegenerateOptions(give_up_after=4), retries=1)
    assert sorted(row["source"] for row in rows(tmp_path / "out.jsonl")) == [0, 1, 2, 3, 4]
    assert len(chat.seen) < 30
    with serving(Chat(echo)) as url:
        report = run(url, source, tmp_path / "out.jsonl")
    assert (report.already_there, report.written) == (5, 195)


def test_a_truncated_answer_is_marked_counted_and_ends_its_conversation(tmp_path):
    chat = Chat(lambda _, __: (200, completion("and so on and", finish_reason="length")))
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}] * 2
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with serving(chat) as url:
        report = run(url, tmp_path / "p.jsonl", tmp_path / "out.jsonl")
    (row,) = rows(tmp_path / "out.jsonl")
    assert report.truncated == 1
    assert row["finish_reason"] == "length"
    assert len(row["messages"]) == 2
    prepared = prepare(tmp_path / "out.jsonl", make_tokenizer(), tmp_path / "store")
    assert prepared.notes[Note.TRUNCATED] == 1


def test_every_answer_of_a_conversation_is_written_anew_after_the_new_ones_before(tmp_path):
    chat = Chat(echo)
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "two"},
    ]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with serving(chat) as url:
        run(url, tmp_path / "p.jsonl", tmp_path / "all.jsonl")
        run(url, tmp_path / "p.jsonl", tmp_path / "last.jsonl", None, RegenerateOptions(turns="last"))
    contents = [message["content"] for message in rows(tmp_path / "all.jsonl")[0]["messages"]]
    assert contents == ["s", "one", "You said: one", "two", "You said: two"]
    contents = [message["content"] for message in rows(tmp_path / "last.jsonl")[0]["messages"]]
    assert contents == ["s", "one", "old answer", "two", "You said: two"]


def test_token_ids_are_kept_where_the_server_gives_them_and_prepared_as_they_are(tmp_path):
    def with_ids(body: dict[str, Any], _: int) -> Reply:
        assert body["return_token_ids"]
        return 200, completion("hey", token_ids=[60, 61, 62]) | {"prompt_token_ids": [50, 51]}

    with serving(Chat(with_ids, takes_token_ids=True)) as url:
        run(url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out.jsonl")
    (row,) = rows(tmp_path / "out.jsonl")
    assert row["token_turns"] == [{"prompt_ids": [50, 51], "completion_ids": [60, 61, 62]}]
    assert parse_record(row) == parse_record({"prompt_ids": [50, 51], "completion_ids": [60, 61, 62]})


def test_rows_of_an_earlier_run_are_asked_again_by_their_messages(tmp_path):
    def with_ids(_: dict[str, Any], __: int) -> Reply:
        return 200, completion("hey", token_ids=[60, 61, 62]) | {"prompt_token_ids": [50, 51]}

    with serving(Chat(with_ids, takes_token_ids=True)) as url:
        run(url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "one.jsonl")
        assert all("token_turns" in row for row in rows(tmp_path / "one.jsonl"))
        assert run(url, tmp_path / "one.jsonl", tmp_path / "two.jsonl").written == 2


@pytest.mark.parametrize("place", ["/proc/out.jsonl", "p.jsonl/out.jsonl", "folder.jsonl"])
def test_an_output_that_cannot_be_written_is_refused_in_a_sentence(tmp_path, place):
    (tmp_path / "folder.jsonl").mkdir()
    source = prompts(tmp_path / "p.jsonl", 1)
    with (
        serving(Chat(echo)) as url,
        pytest.raises(ConfigError, match=r"jsonl cannot be written: .*Name another"),
    ):
        run(url, source, tmp_path / place)


def test_a_full_disk_is_said_with_what_to_do_and_the_same_command_goes_on(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source, out = prompts(tmp_path / "p.jsonl", 3), tmp_path / "out.jsonl"
    with serving(Chat(echo)) as url:
        with monkeypatch.context() as disk:
            disk.setattr("os.fsync", full)
            with pytest.raises(
                DiskFullError, match=r"out\.jsonl.* are kept\. Free some space and run"
            ) as error:
                run(url, source, out)
        assert "heckpoint" not in str(error.value)
        run(url, source, out)
    assert sorted(row["source"] for row in rows(out)) == [0, 1, 2]


def test_a_server_that_refuses_the_field_for_token_ids_is_asked_without_it(tmp_path):
    chat = Chat(echo)
    with serving(chat) as url:
        run(url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out.jsonl")
    assert all("return_token_ids" not in body for body in chat.bodies)
    assert all("token_turns" not in row for row in rows(tmp_path / "out.jsonl"))


def test_sampling_thinking_tools_and_extra_fields_reach_the_server(tmp_path):
    tool = {"type": "function", "function": {"name": "weather"}}
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [tool]}) + "\n"
    )
    chat = Chat(echo)
    sampling = Sampling(max_new_tokens=9, temperature=0.7, top_p=0.8, thinking=False)
    with serving(chat) as url:
        run(url, tmp_path / "p.jsonl", tmp_path / "out.jsonl", sampling, extra={"seed": 3})
    (body,) = chat.bodies
    assert body["model"] == "tiny"
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (9, 0.7, 0.8, 3)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["tools"] == [tool]


def test_rows_that_were_offered_other_tools_are_not_continued(tmp_path):
    source = prompts(tmp_path / "p.jsonl", 1)
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "weather"}}]')
    with serving(Chat(echo)) as url:
        run(url, source, tmp_path / "out.jsonl", options=RegenerateOptions(tools=tmp_path / "tools.json"))
        with pytest.raises(ConfigError, match="tools="):
            run(url, source, tmp_path / "out.jsonl")
    assert rows(tmp_path / "out.jsonl")[0]["tools"][0]["function"]["name"] == "weather"


def test_reasoning_and_tool_calls_of_the_answer_are_kept(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    reply = completion("", finish_reason="tool_calls")
    reply["choices"][0]["message"] |= {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
    with serving(Chat(lambda _, __: (200, reply))) as url:
        run(url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out.jsonl")
    answer = rows(tmp_path / "out.jsonl")[0]["messages"][-1]
    assert answer == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}


def test_rows_without_a_prompt_are_counted_and_the_same_prompt_twice_is_two_rows(tmp_path):
    lines = [
        {"prompt": "x"},
        {"prompt": "x"},
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}]},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(Chat(echo)) as url:
        report = run(url, tmp_path / "p.jsonl", tmp_path / "out.jsonl")
    assert report.written == 2
    assert report.skipped == {Reason.NO_MESSAGES: 1, Reason.SYSTEM_ONLY: 1}
    assert len({row["id"] for row in rows(tmp_path / "out.jsonl")}) == 2


def test_a_chat_with_a_role_that_nobody_knows_is_skipped_and_the_role_named(tmp_path):
    alien = [{"from": "human", "value": "a"}, {"from": "alien", "value": "b"}]
    lines = [{"prompt": "x"}, {"conversations": alien}, {"conversations": alien}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(Chat(echo)) as url:
        report = run(url, tmp_path / "p.jsonl", tmp_path / "out.jsonl")
    assert report.written == 1
    assert report.to_json()["skipped"] == {str(Reason.UNKNOWN_ROLE): 2}
    (example,) = report.to_json()["examples"].values()
    assert re.search(r"p\.jsonl:2: 'alien'; known are .*user, .*human, gpt,", example)


def test_a_line_cut_off_by_a_kill_is_written_again_and_whole_ones_are_not(tmp_path):
    source, out = prompts(tmp_path / "p.jsonl", 5), tmp_path / "out.jsonl"
    with serving(Chat(echo)) as url:
        run(url, source, out, None, RegenerateOptions(limit=3))
        whole = out.read_bytes()
        out.write_bytes(whole[:-15])
        report = run(url, source, out)
    assert (report.already_there, report.written) == (2, 3)
    assert out.read_bytes().startswith(whole[: whole[:-1].rindex(b"\n") + 1])
    assert sorted(row["source"] for row in rows(out)) == [0, 1, 2, 3, 4]


def test_other_settings_a_strange_file_and_a_second_writer_are_refused(tmp_path):
    source, out = prompts(tmp_path / "p.jsonl", 2), tmp_path / "out.jsonl"
    with serving(Chat(echo)) as url:
        run(url, source, out)
        with pytest.raises(ConfigError, match=r"temperature=None \(now 0\.5\)"):
            run(url, source, out, Sampling(max_new_tokens=64, temperature=0.5))
        with pytest.raises(ConfigError, match=r"must end in \.jsonl"):
            run(url, source, tmp_path / "out.txt")
        (tmp_path / "mine.jsonl").write_text('{"prompt": "mine"}\n')
        with pytest.raises(ConfigError, match=r"mine\.jsonl:1 was not written by this command"):
            run(url, source, tmp_path / "mine.jsonl")

        def run_again(_: RegenerateReport) -> None:
            with pytest.raises(FolderInUseError, match="another process writes"):
                run(url, source, tmp_path / "other.jsonl")

        run(url, source, tmp_path / "other.jsonl", progress=run_again)


def test_a_server_that_cannot_be_used_is_named_before_anything_is_written(tmp_path):
    source = prompts(tmp_path / "p.jsonl", 2)
    with pytest.raises(
        ServerError, match=r"http://127\.0\.0\.1:9/v1 cannot be used.*Start it, or correct --url"
    ):
        run("http://127.0.0.1:9/v1", source, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="does not begin with http"):
        run("localhost:8000", source, tmp_path / "out.jsonl")
    with pytest.raises(ServerError, match=r"http://\[::1/v1 cannot be used.*correct --url"):
        run("http://[::1/v1", source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("listing", "error", "words"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, ConfigError, "lists 2 models: a, b; name one by --model"),
        ({"data": []}, ConfigError, "lists no model; load one there, or name it by --model"),
        ({"data": [{}]}, ServerError, "not a list of models.*correct --url or --model"),
        ({"data": ["a"]}, ServerError, "not a list of models"),
        ({"data": None}, ServerError, "not a list of models"),
        ({"detail": "ok"}, ServerError, "not a list of models"),
    ],
)
def test_a_server_whose_only_model_cannot_be_told_is_refused_with_what_to_name(
    tmp_path, listing: dict[str, Any], error: type[Exception], words: str
):
    with serving(Chat(echo, listing=listing)) as url:
        with pytest.raises(error, match=words):
            run(url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out.jsonl")
        assert run(url, tmp_path / "p.jsonl", tmp_path / "out.jsonl", model="mine").written == 2


@pytest.mark.parametrize("key", ["sk-hidden\n", "sk-hidden\u20ac"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(tmp_path, monkeypatch, key: str):
    monkeypatch.setenv("MY_KEY", key)
    chat = Chat(echo)
    with (
        serving(chat) as url,
        pytest.raises(ConfigError, match=r"key in MY_KEY .*--api-key-variable") as refused,
    ):
        run(url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out.jsonl", api_key_variable="MY_KEY")
    assert "hidden" not in str(refused.value)
    assert chat.keys == []


PROGRAM = """
import sys
from pathlib import Path
from tests.test_data_regenerate import run
url, source, out = sys.argv[1:]
run(url, Path(source), Path(out))
"""


def test_a_run_killed_again_and_again_loses_no_row_and_asks_for_none_it_has(tmp_path):
    def slowly(body: dict[str, Any], times: int) -> Reply:
        time.sleep(0.02)
        return echo(body, times)

    chat, out = Chat(slowly), tmp_path / "out.jsonl"
    source = prompts(tmp_path / "p.jsonl", 300)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])}
    with serving(chat) as url:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), url, str(source), str(out)]
        for stage in (60, 120):
            process = subprocess.Popen(command, env=environment)
            deadline = time.monotonic() + 120
            while (out.read_bytes().count(b"\n") if out.exists() else 0) < stage:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
        written_before = out.read_bytes().count(b"\n")
        report = run(url, source, out)
    assert report.already_there == written_before
    assert sorted(row["source"] for row in rows(out)) == list(range(300))
    # A kill may catch each request in flight before its answer is written: those alone are asked for twice.
    assert sum(chat.seen.values()) <= 300 + 2 * 4
