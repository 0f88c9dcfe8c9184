"""What commands print: strict JSON, counts as lines, and tables that lose no figure on a narrow terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Column, Table

from draftline.console import Screen, fitting
from draftline.decoding.advice import predict_speedups
from draftline.decoding.measure import Measurement, print_measurement
from draftline.outcome import json_document, readable
from draftline.trained import Trained, show_trained
from tests.test_export_card import COMPARISON, EVALUATION, TIMINGS


def test_numbers_that_json_does_not_have_become_null_however_deep_they_lie():
    values = {"a": float("nan"), "b": [1.5, {"c": float("-inf")}], "d": (1, "NaN"), "e": None}
    assert json.loads(json_document(values)) == {
        "a": None,
        "b": [1.5, {"c": None}],
        "d": [1, "NaN"],
        "e": None,
    }


def test_counts_stand_below_their_name_with_the_most_frequent_reason_first():
    outcome = {
        "already_there": 1200,
        "refused": {"repeats itself": 2, "did not end": 15},
        "proof": {"logits": 0.25, "kept": {"few": 1, "many": 3000}, "tau": None},
        "skipped": {},
        "examples": {"did not end": "two\n  lines"},
    }
    assert [" ".join(line.split()) if ":" not in line else line for line in readable(outcome)] == [
        "already there 1,200",
        "refused",
        "  did not end: 15",
        "  repeats itself: 2",
        "proof",
        "  logits: 0.25",
        "  kept:",
        "    many: 3,000",
        "    few: 1",
        "  tau: none",
        "skipped none",
        "examples",
        "  did not end: two lines",
    ]


def shown(print_to, width: int) -> str:
    stream = io.StringIO()
    print_to(Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def measurement() -> Measurement:
    names = ("held-out/arithmetic-in-words", "mode/thinking", "file/a[/b]", "file/[red]")
    evaluation = replace(EVALUATION, slices=dict.fromkeys(names, EVALUATION.overall))
    return Measurement(
        target="owner/[x]",
        device="cpu",
        dtype="float32",
        block_size=4,
        max_new_tokens=256,
        caches="growing",
        evaluation=evaluation,
        decoding=COMPARISON,
        timings=TIMINGS,
        predictions=predict_speedups(evaluation, TIMINGS),
        speedup_model={names[0]: 1.2345, names[1]: 1.5678},
        warnings=("tau of set [a] rests on few steps",),
    )


@pytest.mark.parametrize("width", [30, 200])
def test_names_of_targets_and_sets_are_shown_as_they_are_and_not_read_as_markup(width: int):
    of_users = {"a/[/x]\x1b": EVALUATION.overall}
    named = replace(measurement(), target="models/[red]", evaluation=replace(EVALUATION, slices=of_users))
    text = "".join(shown(lambda console: print_measurement(named, console), width).split())
    assert "models/[red]" in text
    assert "a/[/x]\\x1b" in text


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_the_evaluation_shows_every_figure_at_any_width(width: int):
    text = shown(lambda console: print_measurement(measurement(), console), width)
    overall = EVALUATION.overall
    figures = [
        f"{overall.tau:.2f}", f"{overall.tau_low:.2f} to {overall.tau_high:.2f}", "1.23x", "1.57x", "50.0 tokens/s",
        "90.0 tokens/s", "1.80x",
        "owner/[x] in", "file/a[/b]", "file/[red]", "4.00 ms a step", "20.00 ms a step", "2 of 2", "11.00", "12.00",
        *(f"{share:.3f}" for share in overall.accept_pos),
    ]  # fmt: skip
    assert [figure for figure in figures if figure not in " ".join(text.split())] == []
    assert "\u2026" not in text  # how a cell that was cut ends
    assert "set [a]" in text
    assert max(map(len, text.split("warning")[0].splitlines())) <= width


def test_a_table_is_folded_in_its_words_first_and_stacked_only_where_figures_would_not_fit():
    table = Table("placement", Column("tokens/s", no_wrap=True), Column("GiB", no_wrap=True))
    table.add_row("colocated on eight devices", "127,318,634", "12.5 + 80.1")
    assert "127,318,634" in shown(lambda console: console.print(fitting(table, console)), 50)
    stacked = shown(lambda console: console.print(fitting(table, console)), 25)
    assert [line.rstrip() for line in stacked.splitlines()] == [
        "colocated on eight",
        "devices",
        "  tokens/s: 127,318,634",
        "  GiB: 12.5 + 80.1",
    ]


def test_a_summary_shows_a_path_with_brackets_and_every_figure_on_a_narrow_terminal():
    trained = Trained(
        folder=Path("runs"),
        drafter=Path("runs/[bold]/drafter"),
        steps=600,
        loss=1.25,
        seconds=70.0,
        tokens_per_s=3400.0,
        before=EVALUATION,
        after=EVALUATION,
        exported_step=600,
        skipped_checkpoints=0,
        skipped_documents=0,
    )
    text = shown(lambda console: show_trained(trained, console), 30)
    assert "runs/[bold]/drafter (after step 600)" in text
    assert f"95 % {EVALUATION.overall.tau_low:.2f} to {EVALUATION.overall.tau_high:.2f}" in text


def test_a_line_for_a_log_stays_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen()
    screen.say("word " * 30)
    with screen.counting("answers of the target, of which there are many", 3) as progress:
        progress(3)
    assert len(capsys.readouterr().err.splitlines()) == 2
