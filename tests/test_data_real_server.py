"""Regenerate against `transformers serve`, a real server process on this machine, killed and resumed.

About a minute on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftline.cli import app
from draftline.data.local import LocalModel, LocalWriter
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.regenerate import RegenerateOptions, regenerate
from draftline.data.sampling import Sampling
from draftline.data.server import Server, ServerOptions, ServerWriter
from draftline.data.store import open_store
from draftline.embedded import embedded_path
from draftline.embedded import unseen_prompts as embedded_test_prompts
from draftline.errors import ServerError

for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

ROWS = 20
SAMPLING = Sampling(max_new_tokens=64, temperature=0.0)
SERVE = "from transformers.cli.transformers import main; main()"
PROGRAM = """
import sys
from pathlib import Path
from tests.test_data_real_server import run
run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", *sys.path]), "OMP_NUM_THREADS": "1"}


def run(url: str, source: Path, out: Path) -> int:
    where = ServerOptions(url=url, concurrency=4, retries=1, first_delay_s=0.1)
    writer = ServerWriter(Server(where, SAMPLING))
    return regenerate(source, writer, out, SAMPLING, RegenerateOptions(give_up_after=3)).written


@contextmanager
def server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    model = str(embedded_path("tiny"))
    command = [sys.executable, "-c", SERVE, "serve", model, "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen([*command, "--dtype", "float32"], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not healthy(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)


def healthy(port: int) -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).status == 200
    return False


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when_written(command: list[str], out: Path, count: int) -> None:
    process = subprocess.Popen(command, env=ENVIRONMENT)
    deadline = time.monotonic() + 180
    while lines(out) < count:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(embedded_test_prompts().read_text().splitlines(keepends=True)[:ROWS]))
    return path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_target_behind_a_server_writes_prompts_and_answers_them_from_the_command_line(tmp_path):
    port = free_port()
    prompts, chats, url = tmp_path / "p.jsonl", tmp_path / "c.jsonl", f"--url=http://localhost:{port}/v1"
    # This server does not sample by temperature alone.
    sample = json.dumps({"generation_config": json.dumps({"do_sample": True})})
    with server(port):
        command("synthesize", prompts, url, "--target=builtin:tiny", "--count=4", "--extra", sample)
        command("regenerate", prompts, chats, url, "--max-new-tokens=80", "--temperature=0")
    written = [json.loads(line) for line in chats.read_text().splitlines()]
    asked = [json.loads(line)["messages"][0] for line in prompts.read_text().splitlines()]
    assert sorted(row["source"] for row in written) == list(range(4))
    assert {row["messages"][0]["content"] for row in written} == {turn["content"] for turn in asked}
    assert all(row["messages"][1]["content"] for row in written)


def command(*tokens: object) -> None:
    app(
        [str(token) for token in tokens], exit_on_error=False, print_error=False, result_action="return_value"
    )


def test_a_run_killed_twice_and_a_server_killed_once_lose_and_double_no_row(tmp_path, source):
    port = free_port()
    out, url = tmp_path / "out.jsonl", f"http://localhost:{port}/v1"
    program = [sys.executable, "-c", PROGRAM, url, str(source), str(out)]
    with server(port) as process:
        kill_when_written(program, out, 4)
        kill_when_written(program, out, 8)
        client = subprocess.Popen(program, env=ENVIRONMENT, stderr=subprocess.PIPE)
        while lines(out) < 12:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        _, words = client.communicate(timeout=120)
        assert client.returncode != 0
        assert ServerError.__name__.encode() in words
    kept = out.read_bytes()
    with server(port):
        run(url, source, out)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(row["source"] for row in written) == list(range(ROWS))
    assert len({row["id"] for row in written}) == ROWS
    check_against_this_process(tmp_path, source, out)


def check_against_this_process(tmp_path: Path, source: Path, out: Path) -> None:
    """Finished answers that came as text are tokenised to the very ids that the model generates here.

    An answer that was cut off inside a word need not be: its last piece is split in another way.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(embedded_path("tiny"))
    model = AutoModelForCausalLM.from_pretrained(embedded_path("tiny"), dtype=torch.float32)
    writer = LocalWriter(LocalModel(model, tokenizer, SAMPLING), "tiny", batch_size=16)
    regenerate(source, writer, tmp_path / "local.jsonl", SAMPLING)
    documents = []
    for path in (out, tmp_path / "local.jsonl"):
        prepare(path, tokenizer, path.with_suffix(".store"), PrepareOptions(truncated="drop"))
        store = open_store(path.with_suffix(".store"))
        documents.append({tuple(store.document(n).input_ids.tolist()) for n in range(len(store))})
    # Not equal: this server also calls an answer that ends at the very limit cut off.
    assert documents[0] <= documents[1]
    assert len(documents[0]) > ROWS // 2
