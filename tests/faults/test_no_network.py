"""A whole run in a network namespace of its own, with nothing but a loopback that is down; on the way an audit
hook looks for unpickling and commands, and every output is searched for planted secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.real_runs import EVERY, SOURCE, assert_same_state, result_of, settings, train_here

TOKEN = "hf_" + "q7Zp" * 8
SEALED_OFF = """
import sys
EVENTS = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
def watch(event, arguments):
    if event in EVENTS:
        print("AUDIT", event, str(arguments)[:200], file=sys.stderr)
from draftline.run import train
from draftline.settings import parse_run
from draftline.console import Screen
sys.addaudithook(watch)
train(parse_run(sys.argv[1:]), Screen(), sys.argv)
"""


def sealed_off() -> list[str]:
    """The start of a command line that runs without a network."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if (
            shutil.which("unshare")
            and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
        ):
            return command
    # without the right to make a namespace there is no way to take the network away from one process
    pytest.skip(
        "`unshare -n` and `unshare -rn` fail here: run it as root, or where user namespaces are allowed"
    )


def test_training_needs_no_network_runs_no_code_from_files_and_writes_no_secret(
    tmp_path: Path, store: Path, unbroken: Path
) -> None:
    output = tmp_path / "run"
    evaluate = {
        "data__eval_path": "builtin:demo",
        "evaluation__num_prompts": 2,
        "evaluation__max_new_tokens": 16,
    }
    flags = settings(output, data__path=store, evaluation__every=EVERY, **evaluate)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"PYTHONPATH": str(SOURCE), "HF_TOKEN": TOKEN, "WANDB_API_KEY": TOKEN}
    command = [*sealed_off(), sys.executable, "-c", SEALED_OFF, *flags]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "AUDIT" not in done.stderr
    assert_same_state(output, unbroken)
    outputs = done.stdout + done.stderr
    for path in output.rglob("*"):
        if path.is_file():
            outputs += path.read_bytes().decode(errors="replace")
    assert TOKEN not in outputs


def test_a_secret_on_the_command_line_is_not_in_the_result(tmp_path: Path, store: Path) -> None:
    flags = settings(tmp_path, data__path=store, target__path=f"https://user:{TOKEN}@example.org/model")
    with pytest.raises(Exception, match=r"example\.org"):
        train_here(flags)
    assert TOKEN not in (tmp_path / "result.json").read_text()
    assert result_of(tmp_path)["exit_code"] == 2
