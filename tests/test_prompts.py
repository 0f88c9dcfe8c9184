"""Prompts to measure on: sets by name from copies laid out as published, own files, slices, modes, later turns."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from draftline.decoding.prompts import chat_prompt, load_prompts
from draftline.embedded import embedded_path
from draftline.errors import ConfigError, DataError

SWITCHED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_path("tiny"))


@pytest.fixture(scope="module")
def thinker():
    """The same words with a template that has a thinking switch."""
    switched = AutoTokenizer.from_pretrained(embedded_path("tiny"))
    switched.chat_template = SWITCHED
    return switched


def text_of(tokenizer, prompt) -> str:
    return tokenizer.decode(list(prompt.input_ids))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def card(folder: Path, configs: list[tuple[str, str, str]]) -> None:
    """The README of a hub repository, whose front matter names configurations and their files."""
    lines = [
        f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {path}"
        for name, split, path in configs
    ]
    folder.joinpath("README.md").write_text("---\nconfigs:\n" + "\n".join(lines) + "\n---\n")


def gsm8k(folder: Path) -> Path:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(10)]
    parquet(folder / "main" / "test-00000-of-00001.parquet", rows)
    parquet(folder / "socratic" / "test-00000-of-00001.parquet", [{"question": "no", "answer": "no"}])
    card(folder, [("main", "test", "main/test-*"), ("socratic", "test", "socratic/test-*")])
    return folder


def math500(folder: Path) -> Path:
    folder.mkdir()
    row = {
        "problem": "Solve x = 1.",
        "solution": "x",
        "answer": "1",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "a",
    }
    folder.joinpath("test.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def humaneval(folder: Path) -> Path:
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x\n",
        "test": "",
        "entry_point": "f",
    }
    parquet(folder / "openai_humaneval" / "test-00000-of-00001.parquet", [row])
    card(folder, [("openai_humaneval", "test", "openai_humaneval/test-*")])
    return folder


def mbpp(folder: Path) -> Path:
    row = {
        "source_file": "a",
        "task_id": 2,
        "prompt": "Write a function that adds.",
        "code": "",
        "test_imports": ["x"],
        "test_list": ["y"],
    }
    parquet(folder / "sanitized" / "test-00000-of-00001.parquet", [row])
    card(folder, [("sanitized", "test", "sanitized/test-*")])
    return folder


def mt_bench(folder: Path) -> Path:
    row = {
        "category": "writing",
        "prompt": ["Write a poem.", "Make it rhyme."],
        "reference": ["r"],
        "prompt_id": 1,
    }
    parquet(folder / "data" / "train-00000-of-00001.parquet", [row])
    return folder


def alpaca(folder: Path) -> Path:
    rows = [
        {"instruction": "Name a colour.", "input": "", "output": "Red.", "text": "t"},
        {"instruction": "Translate.", "input": "Guten Tag", "output": "Hello.", "text": "t"},
    ]
    parquet(folder / "data" / "train-00000-of-00001.parquet", rows)
    return folder


SETS = {
    "gsm8k": (gsm8k, "What is 0 + 0?\n\nReason step by step"),
    "math500": (math500, "Solve x = 1."),
    "humaneval": (humaneval, "```python\ndef f(x):\n```"),
    "mbpp": (mbpp, "Write a function that adds."),
    "mt-bench": (mt_bench, "Write a poem."),
    "alpaca": (alpaca, "Name a colour."),
}


@pytest.mark.parametrize("name", SETS)
def test_a_copy_laid_out_as_published_gives_the_question_and_never_the_answer(name, tokenizer, tmp_path):
    build, words = SETS[name]

    prompts = load_prompts(f"{name}={build(tmp_path / 'copy')}", tokenizer, 64)

    text = text_of(tokenizer, prompts[0])
    assert words in text
    assert text.endswith("<|im_start|>assistant\n")
    assert not any(answer in text for answer in ("####", "return x", "Red.", "solution"))
    assert prompts[0].slices == (name,)


def test_several_sets_in_one_call_keep_their_names_and_the_most_of_each(tokenizer, tmp_path):
    sources = [f"gsm8k={gsm8k(tmp_path / 'a')}", f"alpaca={alpaca(tmp_path / 'b')}"]
    prompts = load_prompts(sources, tokenizer, 3)
    assert [prompt.slices[0] for prompt in prompts] == ["gsm8k"] * 3 + ["alpaca"] * 2


def test_prompts_of_a_set_are_spread_over_it(tokenizer, tmp_path):
    prompts = load_prompts(f"gsm8k={gsm8k(tmp_path / 'copy')}", tokenizer, 2)
    assert "What is 0 + 0?" in text_of(tokenizer, prompts[0])
    assert "What is 5 + 5?" in text_of(tokenizer, prompts[1])


def test_an_instruction_carries_its_input(tokenizer, tmp_path):
    prompts = load_prompts(f"alpaca={alpaca(tmp_path / 'copy')}", tokenizer, 2)
    assert "Translate.\n\nGuten Tag" in text_of(tokenizer, prompts[1])


def test_a_second_turn_follows_the_answer_to_the_first(tokenizer, tmp_path):
    (first,) = load_prompts(f"mt-bench={mt_bench(tmp_path / 'copy')}", tokenizer, 5)
    assert first.next_turn is not None

    second = first.next_turn(tokenizer.encode("Roses.<|im_end|>", add_special_tokens=False))

    text = text_of(tokenizer, second)
    assert text.index("Write a poem.") < text.index("Roses.<|im_end|>") < text.index("Make it rhyme.")
    assert "Make it rhyme." not in text_of(tokenizer, first)
    assert second.next_turn is None
    assert second.slices == first.slices


def test_a_copy_of_another_set_is_refused_with_its_columns(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"has no column problem .*it has instruction, input"):
        load_prompts(f"math500={renamed(alpaca(tmp_path / 'copy'))}", tokenizer, 5)


def renamed(folder: Path) -> Path:
    """The copy's file as a test split."""
    file = folder / "data" / "train-00000-of-00001.parquet"
    file.rename(file.with_name("test-00000-of-00001.parquet"))
    return folder


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("gsm8k", None, "there is no such folder"),
        ("gsm8k", {}, "it has no data file and no README.md that names the configuration 'main'"),
        ("gsm8k", {"notes.txt": "x"}, "it has no data file and no README.md"),
        ("gsm8k", {"README.md": "# Mine"}, "it has no data file and no README.md that names"),
        ("gsm8k", {"README.md": "# Mine", "test.jsonl": "{}"}, "it has no README.md that names"),
        ("gsm8k", {"test.jsonl": "{}", "other.csv": "a"}, "it has no README.md that names"),
        ("math500", {}, "it has no data file"),
        ("math500", {"train.jsonl": '{"problem": "x"}'}, 'split "test"'),
        ("math500", {"test.jsonl": '{"problem": '}, "JSON|json"),
        ("math500", {"test.parquet": "PAR"}, "Parquet"),
    ],
)
def test_a_folder_that_is_no_copy_is_told_what_it_lacks_and_what_a_copy_has(
    name, files, words, tokenizer, tmp_path
):
    copy = tmp_path / "copy"
    if files is not None:
        copy.mkdir()
        for file, text in files.items():
            copy.joinpath(file).write_text(text)
    with pytest.raises(DataError, match=rf"cannot be read from .*copy: .*({words})") as refused:
        load_prompts(f"{name}={copy}", tokenizer, 5)
    said = str(refused.value)
    assert "has data files (.parquet, .jsonl, .jsonl.gz, .json, .csv) of the split 'test'" in said
    assert f"--repo-type dataset --local-dir FOLDER, then name it as {name}=FOLDER" in said
    assert "Without a network" not in said


def test_a_file_in_place_of_a_copy_is_said_to_be_one(tokenizer, tmp_path):
    file = write(tmp_path / "test.jsonl", {"question": "x"})
    with pytest.raises(DataError, match="it is a file, not a folder"):
        load_prompts(f"gsm8k={file}", tokenizer, 5)


def test_a_full_disk_under_the_librarys_own_error_stays_a_full_disk(tokenizer, tmp_path, monkeypatch):
    from datasets.exceptions import DatasetGenerationError

    def full(*_: Any, **__: Any) -> None:
        raise DatasetGenerationError("An error occurred") from OSError(
            errno.ENOSPC, "No space left on device"
        )

    monkeypatch.setattr("datasets.load_dataset", full)
    with pytest.raises(OSError, match="No space left"):
        load_prompts(f"math500={math500(tmp_path / 'copy')}", tokenizer, 5)


def test_without_a_network_the_hub_name_and_the_way_round_it_are_named(tokenizer, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"openai/gsm8k on the hub.*name a local copy of .* as gsm8k=FOLDER"):
        load_prompts("gsm8k", tokenizer, 5)


def test_without_the_package_its_extra_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install datasets"):
        load_prompts("gsm8k", tokenizer, 5)


def test_a_name_that_is_nothing_gets_the_names_that_are(tokenizer):
    with pytest.raises(DataError, match=r"gsm8k, math500, humaneval, mbpp, mt-bench, alpaca"):
        load_prompts("gsm9k", tokenizer, 5)


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_record_names_its_task_language_and_tools(tokenizer, tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    file = write(
        tmp_path / "held.out.jsonl",
        {"prompt": "Hi", "task": "chat", "language": "de"},
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}],
            "tools": [tool],
        },
    )

    first, second = load_prompts(file, tokenizer, 5)

    assert first.slices == ("held.out", "held.out/chat", "language/de")
    assert second.slices == ("held.out", "mode/tools")
    assert "no" not in text_of(tokenizer, second)


def test_the_first_prompts_of_a_file_are_used(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", *({"prompt": f"Number {n}"} for n in range(9)))
    texts = [text_of(tokenizer, prompt) for prompt in load_prompts(file, tokenizer, 2)]
    assert ["Number 0" in texts[0], "Number 1" in texts[1], len(texts)] == [True, True, 2]


@pytest.mark.parametrize(
    ("thinking", "slices"),
    [
        ("off", ["mode/direct"]),
        ("on", ["mode/thinking"]),
        ("both", ["mode/direct", "mode/thinking"]),
    ],
)
def test_thinking_is_switched_and_reported_as_a_mode(thinking, slices, thinker, tmp_path):
    prompts = load_prompts(write(tmp_path / "a.jsonl", {"prompt": "Hi"}), thinker, 5, thinking)

    assert [prompt.slices[-1] for prompt in prompts] == slices
    for prompt in prompts:
        assert ("(no thoughts)" in text_of(thinker, prompt)) == (prompt.slices[-1] == "mode/direct")


def test_a_record_that_asks_for_thinking_gets_it(thinker, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "Hi", "thinking": True}, {"prompt": "Hi"})
    assert [prompt.slices[-1] for prompt in load_prompts(file, thinker, 5)] == [
        "mode/thinking",
        "mode/direct",
    ]


def test_a_switch_that_the_template_lacks_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="has no switch"):
        load_prompts(write(tmp_path / "a.jsonl", {"prompt": "Hi"}), tokenizer, 5, "on")


def test_a_record_or_a_single_prompt_that_asks_for_a_missing_switch_is_refused_too(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "Hi"}, {"prompt": "Hi", "thinking": True})
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: thinking=on, but .* has no switch"):
        load_prompts(file, tokenizer, 5)
    with pytest.raises(ConfigError, match=r"thinking=on, but .* has no switch"):
        chat_prompt(tokenizer, "Hi", think=True)


def test_a_regenerated_conversation_is_asked_by_its_messages_not_its_token_ids(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ids = {"token_turns": [{"prompt_ids": [1, 2], "completion_ids": [3, 4]}]}
    file = write(tmp_path / "a.jsonl", {"messages": turns, **ids}, {"messages": turns})
    regenerated, plain = load_prompts(file, tokenizer, 5)
    assert regenerated == plain
    assert text_of(tokenizer, plain).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


def test_two_sources_of_one_name_are_refused(tokenizer, tmp_path):
    (tmp_path / "b").mkdir()
    files = [write(tmp_path / folder / "x.jsonl", {"prompt": "Hi"}) for folder in ("", "b")]
    with pytest.raises(ConfigError, match="reported under one name"):
        load_prompts(files, tokenizer, 5)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "holds token ids"),
        ({"messages": [{"role": "assistant", "content": "Hello."}]}, "not a prompt|no turn"),
        (5, "not a prompt"),
    ],
)
def test_a_record_that_is_no_prompt_is_named_by_its_line(record, reason, tokenizer, tmp_path):
    with pytest.raises(DataError, match=rf"a\.jsonl:2.*({reason})"):
        load_prompts(write(tmp_path / "a.jsonl", {"prompt": "Hi"}, record), tokenizer, 5)
