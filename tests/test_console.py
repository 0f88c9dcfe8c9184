"""What a person sees, on a terminal and in a log."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from draftline import cli
from draftline.console import Bar, Output, OutputClosedError, Screen
from draftline.errors import DataError

LONG = "one message that is longer than the forty columns which this console says it has"


def screen(*, terminal: bool) -> tuple[Screen, io.StringIO]:
    written = io.StringIO()
    made = Screen()
    made.console = Console(file=written, width=40, force_terminal=terminal, highlight=False)
    return made, written


@pytest.mark.parametrize("terminal", [True, False])
def test_a_message_wraps_on_a_terminal_and_is_one_line_in_a_log(terminal: bool):
    made, written = screen(terminal=terminal)
    made.say(LONG)
    assert (written.getvalue().count("\n") > 1) is terminal
    assert terminal or written.getvalue() == LONG + "\n"


def test_progress_in_a_log_is_one_line():
    made, written = screen(terminal=False)
    with Bar(made.console, "step", 2, 0) as bar:
        bar.update(2, LONG)
    assert written.getvalue().strip() == f"step 2/2  {LONG}"


class _Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_run_goes_on_when_nobody_reads_its_messages(monkeypatch):
    monkeypatch.setattr(sys, "stderr", _Closed())
    screen = Screen()
    screen.say("one")
    screen.say("two")
    assert screen.console.quiet


def test_a_report_that_nobody_reads_ends_its_command(monkeypatch):
    monkeypatch.setattr(sys, "stdout", _Closed())
    with pytest.raises(OutputClosedError):
        Output().print("one")


MAIN = """
import sys
from draftline import cli
from draftline.console import Output
sys.argv = ["draftline"]
cli.app = lambda *_, **__: [{print} for _ in range(20000)]
cli.main()
"""


@pytest.mark.parametrize(
    "statement",
    ["Output().print('line')", "cli._print({'line': 0}, json_output=True)"],
    ids=["table", "json"],
)
def test_head_ends_a_command_as_it_ends_others(statement: str):
    code = MAIN.format(print=statement)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        command.stdout.readline()
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == b""
    assert command.returncode == 128 + 13


INTERRUPTED_DEMO = """
from draftline import cli, demo
def run_demo(*_, **__): raise KeyboardInterrupt
demo.run_demo = run_demo
cli.main()
"""


@pytest.mark.parametrize(
    ("words", "code"), [(["train", "nowhere.yaml"], 2), (["prepare"], 2), (["demo"], 130)]
)
def test_a_failure_keeps_its_exit_code_when_nobody_reads_how_it_ended(words: list[str], code: int):
    program = [sys.executable, "-c", INTERRUPTED_DEMO, *words, "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        command.stderr.close()
    assert command.returncode == code


def test_a_command_line_that_cannot_be_read_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(
        sys, "argv", ["draftline", "prepare", "rows.jsonl", "store", "--max-lenth=9", "--target=x"]
    )
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "draftline: Unknown option: --max-lenth. Did you mean --max-length?\n"


def test_control_characters_in_what_a_command_says_act_on_no_terminal(capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        error = DataError("row \x1b[2J: \x9b31m\r")
        error.add_note("seen by \x1b]0;worker\x07")
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["draftline"])
    with pytest.raises(SystemExit):
        cli.main()
    Screen().say("file \x1b[31m")
    cli._print({"first_failure": "HTTP 500: \x1b[2J"}, json_output=False)
    said = capsys.readouterr()
    assert r"draftline: row \x1b[2J: \x9b31m\x0d" in said.err
    assert r"  seen by \x1b]0;worker\x07" in said.err
    assert r"file \x1b[31m" in said.err
    assert r"HTTP 500: \x1b[2J" in said.out
    assert set("\x1b\x9b\x07\r").isdisjoint(said.err + said.out)


def test_letters_that_a_terminal_lacks_are_escaped_and_end_nothing():
    code = MAIN.format(print="Output().print('\u2588 \u65e5')").replace("20000", "1")
    command = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert command.stdout == b"\\u2588 \\u65e5\n"
