"""What a person sees, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftline.console import Bar, Screen

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
