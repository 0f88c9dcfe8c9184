"""Every command with --json leaves exactly one JSON document on standard output, also when it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftline import demo
from draftline.cli import main
from draftline.config import RunConfig
from draftline.errors import Interrupted
from tests.test_cli import SETTINGS


def document(text: str) -> dict[str, Any]:
    """The only JSON document of a text, read strictly."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def failed(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(sys, "argv", ["draftline", *words, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    found = document(printed.out)
    assert found["exit_code"] == ended.value.code
    return found, printed.err


TARGET = "--target=builtin:tiny"


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        (["train", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["train", *SETTINGS, "--optim.steps=1"], 2, "output"),
        (["plan", "builtin:nope"], 2, "builtin:tiny"),
        (["prepare", "nowhere.jsonl", "store", TARGET], 4, "nowhere.jsonl"),
        (["prepare", "a", "b", TARGET, "--max-lenth=9"], 2, "Did you mean --max-length?"),
        (["prepare", "a", "b", TARGET, "--max-length=0"], 2, "max_length='0'"),
        (["inspect", "nowhere", TARGET], 4, "not a token store"),
        (["regenerate", "nowhere.jsonl", "out.jsonl"], 2, "--url"),
        (["synthesize", "out.jsonl", TARGET], 2, "count"),
        (["evaluate", "nowhere", "builtin:demo", TARGET], 2, "neither a drafter"),
        (["export", "nowhere", "out"], 2, "neither a drafter"),
        (["generate", "nowhere", "Hi", TARGET], 2, "neither a drafter"),
        (["replay", "nowhere"], 2, "nowhere"),
        (["demo", "--target=large"], 2, "large"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_a_command_that_is_refused_says_so_in_one_document_and_in_a_sentence(
    words, code, cause, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    found, said = failed(words, capsys, monkeypatch)
    assert found["exit_code"] == code
    assert found["error"] in {2: ["ConfigError"], 4: ["DataError"]}[code]
    assert cause in found["cause"]
    assert "draftline: " in said


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyError("surprise"), 1, "Traceback"),
        (KeyboardInterrupt(), 130, "draftline: interrupted; what is finished stays"),
    ],
)
def test_a_bug_and_ctrl_c_are_told_on_standard_error_and_in_one_document(
    error, code, words, capsys, monkeypatch
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    found, said = failed(["demo"], capsys, monkeypatch)
    assert (found["exit_code"], found["error"]) == (code, type(error).__name__)
    assert words in said


@pytest.mark.parametrize(
    ("words", "is_json"),
    [
        (["--json"], True),
        (["--json=true"], True),
        (["--json=Yes"], True),
        (["--json", "--json=false"], False),
        (["--json=0"], False),
        (["--", "--json"], False),
        (["--jsonl"], False),
    ],
)
def test_a_failure_is_a_document_however_json_is_asked_for_and_only_then(words, is_json, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draftline", "generate", "nowhere", TARGET, *words, "Hi"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert (document(printed)["exit_code"] == 2) if is_json else printed == ""


def test_a_second_ctrl_c_does_not_hide_that_the_run_was_saved(capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        try:
            raise Interrupted("stopped by SIGINT after step 4")
        finally:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", fail)
    found, said = failed(["demo"], capsys, monkeypatch)
    assert (found["exit_code"], found["cause"]) == (75, "stopped by SIGINT after step 4")
    assert "interrupted" not in said


@pytest.mark.parametrize("value", ["[cuda:0]", "[/b]"])
def test_a_refused_value_is_shown_letter_by_letter_also_where_a_console_would_read_markup(
    value, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    for words in (["prepare", "a", "b", TARGET, f"--max-length={value}"], [value]):
        found, said = failed(words, capsys, monkeypatch)
        assert found["exit_code"] == 2
        assert value in said
        assert said.startswith("draftline: ")


def test_without_json_a_failure_leaves_standard_output_empty(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draftline", "replay", "nowhere"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("draftline: ")


def test_the_demo_shows_its_answers_beside_the_document(capsys, monkeypatch, tmp_path: Path):
    def short(_target: str, output: Path) -> RunConfig:
        recipe = {
            "target": {"path": "builtin:tiny"},
            "data": {"path": "builtin:demo", "eval_path": "builtin:demo", "max_length": 256},
            "output": output,
            "rows": {"token_budget": 256, "block_budget": 32},
            "drafter": {"num_layers": 1, "block_size": 8, "num_taps": 2, "intermediate_size": 64},
            "optim": {"rows_per_step": 2, "steps": 2},
            "evaluation": {"num_prompts": 2, "max_new_tokens": 16},
            "placement": {"mode": "split", "targets": ["cpu"], "drafters": ["cpu"]},
        }
        return RunConfig.model_validate(recipe)

    monkeypatch.setattr(demo, "demo_config", short)
    monkeypatch.setattr(demo, "NUM_COMPARED", {"tiny": 2})
    monkeypatch.setattr(sys, "argv", ["draftline", "demo", f"--output={tmp_path / 'demo'}", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert document(printed.out)["steps"] == 2
    assert "Draftline demo" in printed.err
    assert "tokens/s" in printed.err
