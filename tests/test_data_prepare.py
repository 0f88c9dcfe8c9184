"""From a file of conversations to a token store: what is kept, what is counted, what is refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from draftline.config import DataConfig
from draftline.console import Screen
from draftline.data.encoding import decode
from draftline.data.fingerprint import hash_tokenizer
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.reasons import Note, Reason
from draftline.data.store import StoreWriter, TokenStore, open_store
from draftline.errors import ConfigError, DataError, DiskFullError, FolderInUseError, OccupiedError
from draftline.run import train
from draftline.settings import parse_run
from draftline.setup import open_or_prepare
from tests.data_tokenizer import CHATML, ENDS_TWICE, TAGGED, make_tokenizer

APPLES = {
    "messages": [
        {"role": "user", "content": "How many apples?"},
        {"role": "assistant", "content": "There are three apples."},
    ]
}
FOX = {"prompt": "Who jumps over the lazy dog?", "response": "The quick brown fox \U0001f98a jumps."}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def supervised_texts(store_path: Path, tokenizer: Any) -> list[str]:
    store = open_store(store_path)
    documents = [store.document(index) for index in range(len(store))]
    return [decode(tokenizer, document.input_ids[document.supervised].tolist()) for document in documents]


def opened(store: Path, tokenizer: Any, context: int | None = None) -> TokenStore:
    """The store as a run opens it."""
    config = DataConfig(path=str(store))
    return open_or_prepare(config, store.with_name("unused"), tokenizer, (), context, Screen(quiet=True))


def test_the_supervised_text_is_the_answer_and_its_end_of_turn(tmp_path):
    tokenizer = make_tokenizer()
    report = prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES, FOX]), tokenizer, tmp_path / "store")
    assert report.rows == report.kept == report.documents == 2
    assert supervised_texts(tmp_path / "store", tokenizer) == [
        "There are three apples.<|im_end|>",
        "The quick brown fox \U0001f98a jumps.<|im_end|>",
    ]


def test_token_ids_need_no_chat_template(tmp_path):
    tokenizer = make_tokenizer("")
    source = tmp_path / "ids.jsonl"
    source.write_text('{"prompt_ids": [1, 2], "completion_ids": [3, 4]}\n')
    report = prepare(source, tokenizer, tmp_path / "store")
    assert report.supervised == 2
    assert report.marked == "by the masks or turns of token ids (1 row)"
    source.write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.raises(DataError, match="no chat template"):
        prepare(source, tokenizer, tmp_path / "other")


def test_documents_come_in_the_order_of_the_source_with_their_lengths(tmp_path):
    rows = [{"prompt": "n " * n, "response": f"answer {n}"} for n in range(1, 40)]
    tokenizer = make_tokenizer()
    prepare(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "store")
    store = open_store(tmp_path / "store", hash_tokenizer(tokenizer))
    assert len(store) == 39
    assert store.lengths.dtype == np.int32
    assert [len(store.document(index)) for index in range(39)] == store.lengths.tolist()
    assert [store.entry(index).source for index in range(39)] == list(range(39))


def test_every_row_that_is_not_kept_is_counted_with_its_reason(tmp_path):
    rows = [
        APPLES,
        {"messages": []},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"prompt": "no answer"},
        {"prompt": "empty answer", "response": "  "},
        {"messages": [*APPLES["messages"][:1], *APPLES["messages"]]},
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, APPLES["messages"][1]]},
    ]
    report = prepare(write_jsonl(tmp_path / "a.jsonl", rows), make_tokenizer(), tmp_path / "store")
    assert report.dropped == {
        Reason.NO_MESSAGES: 1,
        Reason.SYSTEM_ONLY: 1,
        Reason.USER_ONLY: 1,
        Reason.EMPTY_ASSISTANT: 1,
        Reason.ROLES: 1,
        Reason.NOT_TEXT: 1,
    }
    assert report.rows == report.kept + sum(report.dropped.values())
    assert "a.jsonl:5" in report.examples[Reason.EMPTY_ASSISTANT]


def test_a_second_run_reads_nothing_again_and_changes_no_byte(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES, FOX])
    first = prepare(source, make_tokenizer(), tmp_path / "store")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "store").iterdir()}
    assert prepare(source, make_tokenizer(), tmp_path / "store") == first
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "store").iterdir()} == before


DIFFERS = {
    "source": r"source a\.jsonl [0-9a-f]{16}, now a\.jsonl [0-9a-f]{16}",
    "options": r"options\.max_length 4096, now 20",
    "template": "template [0-9a-f]{16}, now [0-9a-f]{16}",
    "file of a template": "template [0-9a-f]{16}, now [0-9a-f]{16}",
    "tools": "tools ",
}


@pytest.mark.parametrize("change", DIFFERS)
def test_a_store_made_from_anything_else_is_replaced_only_when_told_to(tmp_path, change):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES, FOX])
    file, tools = tmp_path / "chat.jinja", tmp_path / "tools.json"
    file.write_text(CHATML)
    tools.write_text('[{"name": "weather"}]')
    options = PrepareOptions(template=file, tools=tools) if "tools" in change or "file" in change else None
    prepare(source, make_tokenizer(), tmp_path / "store", options)
    key = open_store(tmp_path / "store").manifest["key"]
    if change == "options":
        options = PrepareOptions(max_length=20)
    if change == "tools":
        tools.write_text('[{"name": "news"}]')
    if change == "file of a template":
        file.write_text("{# second version #}" + CHATML)
    template = "{# second version #}" + CHATML if change == "template" else CHATML
    if change == "source":
        write_jsonl(source, [FOX, APPLES])
    with pytest.raises(OccupiedError, match=rf"was made otherwise: {DIFFERS[change]}.*--overwrite") as error:
        prepare(source, make_tokenizer(template), tmp_path / "store", options)
    assert str(error.value).count(", now ") == 1
    assert open_store(tmp_path / "store").manifest["key"] == key
    prepare(source, make_tokenizer(template), tmp_path / "store", options, overwrite=True)
    assert open_store(tmp_path / "store").manifest["key"] != key
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".store.lock",
        "a.jsonl",
        "chat.jinja",
        "store",
        "tools.json",
    ]


def test_a_store_of_another_tokenizer_is_refused_with_both_hashes(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES])
    tokenizer, other = make_tokenizer(), make_tokenizer()
    other.add_tokens(["fox"])
    prepare(source, tokenizer, tmp_path / "store")
    for attempt, refusal in (
        (lambda: open_store(tmp_path / "store", hash_tokenizer(other)), DataError),
        (lambda: prepare(source, other, tmp_path / "store"), OccupiedError),
    ):
        with pytest.raises(refusal) as error:
            attempt()
        assert hash_tokenizer(tokenizer)[:16] in str(error.value)
        assert hash_tokenizer(other)[:16] in str(error.value)
    prepare(source, other, tmp_path / "store", overwrite=True)
    open_store(tmp_path / "store", hash_tokenizer(other))


def test_a_folder_that_is_no_store_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OccupiedError, match="not a token store"):
        prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES]), make_tokenizer(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_output_that_is_in_the_way_is_a_path_to_change_and_no_fault_of_the_data(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES])
    (tmp_path / "held-out.jsonl").write_text("{}\n")
    with pytest.raises(OccupiedError, match=r"held-out\.jsonl exists and is not a token store") as refused:
        prepare(source, make_tokenizer(), tmp_path / "held-out.jsonl")
    assert refused.value.exit_code == 2
    assert (tmp_path / "held-out.jsonl").read_text() == "{}\n"


def test_a_corrupt_shard_is_named_before_anything_is_read(tmp_path):
    prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES, FOX]), make_tokenizer(), tmp_path / "store")
    shard = tmp_path / "store" / "shard-00000.arrow"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(DataError, match=r"shard-00000\.arrow is corrupt"):
        open_store(tmp_path / "store")


def test_a_long_document_is_clipped_and_counted_a_long_prompt_dropped(tmp_path):
    rows = [APPLES, {"prompt": "apples " * 50, "response": "yes"}, {"prompt": "go", "response": "fox " * 90}]
    options = PrepareOptions(max_length=32)
    report = prepare(write_jsonl(tmp_path / "a.jsonl", rows), make_tokenizer(), tmp_path / "store", options)
    assert report.notes[Note.CLIPPED] == 1
    assert report.dropped == {Reason.PROMPT_TOO_LONG: 1}
    assert open_store(tmp_path / "store").lengths.max() == 32


def test_the_targets_context_limits_the_default_length_and_refuses_a_longer_one_that_was_asked_for(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES, {"prompt": "go", "response": "fox " * 90}])
    report = prepare(source, make_tokenizer(), tmp_path / "store", context=32)
    assert report.notes == {Note.BEYOND_CONTEXT: 1}
    assert open_store(tmp_path / "store").lengths.max() == 32
    with pytest.raises(ConfigError, match=r"max_length=33 .*context of 32 tokens.*at most 32"):
        prepare(source, make_tokenizer(), tmp_path / "s", PrepareOptions(max_length=33), context=32)
    within = prepare(source, make_tokenizer(), tmp_path / "s", PrepareOptions(max_length=31), context=32)
    assert within.notes == {Note.CLIPPED: 1}


def test_the_report_counts_each_way_in_which_answers_were_marked(tmp_path):
    turns = {"token_turns": [{"prompt_ids": [40, 41], "completion_ids": [42, 43]}]}
    tokenizer = make_tokenizer(TAGGED)
    ids = prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES | turns] * 2), tokenizer, tmp_path / "ids")
    assert ids.marked == "by the masks or turns of token ids (2 rows)"
    both = prepare(
        write_jsonl(tmp_path / "b.jsonl", [APPLES | turns] * 2 + [APPLES]), tokenizer, tmp_path / "both"
    )
    assert both.marked == (
        "by the masks or turns of token ids (2 rows); and by the template's {% generation %} tags, edges checked "
        "by the template's generation prompt (1 row)"
    )


def test_a_run_takes_a_store_only_with_the_template_that_the_target_is_asked_with(tmp_path):
    own, other, none = make_tokenizer(), make_tokenizer("{# mine #}" + CHATML), make_tokenizer("")
    store = tmp_path / "store"
    prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES]), own, store)
    assert len(opened(store, own)) == 1
    for tokenizer, words in ((other, "is [0-9a-f]{16}"), (none, "is missing")):
        with pytest.raises(DataError, match=rf"{words}, .*as chat_template\.jinja beside the tokenizer"):
            opened(store, tokenizer)


def test_a_store_of_token_ids_alone_fits_any_template(tmp_path):
    ids = {"prompt_ids": [40, 41], "completion_ids": [42, 43]}
    prepare(write_jsonl(tmp_path / "a.jsonl", [ids]), make_tokenizer(), tmp_path / "store")
    assert len(opened(tmp_path / "store", make_tokenizer("{# mine #}" + CHATML))) == 1


def test_a_store_that_does_not_name_its_template_is_refused_until_it_is_prepared_again(tmp_path):
    source, store = write_jsonl(tmp_path / "a.jsonl", [APPLES]), tmp_path / "store"
    prepare(source, make_tokenizer(), store)
    manifest = json.loads((store / "manifest.json").read_text())
    unnamed = {name: value for name, value in manifest.items() if name != "chat_template"}
    (store / "manifest.json").write_text(json.dumps(unnamed))
    with pytest.raises(DataError, match="does not say which chat template"):
        opened(store, make_tokenizer())
    prepare(source, make_tokenizer(), store)
    assert opened(store, make_tokenizer()).manifest["key"] == manifest["key"]


def test_a_store_with_documents_beyond_the_targets_context_is_refused_by_a_run(tmp_path):
    source, store = write_jsonl(tmp_path / "a.jsonl", [APPLES]), tmp_path / "store"
    prepare(source, make_tokenizer(), store)
    longest = int(open_store(store).lengths.max())
    assert len(opened(store, make_tokenizer(), longest)) == 1
    with pytest.raises(DataError, match=rf"{longest} tokens, the target's context is {longest - 1} tokens"):
        opened(store, make_tokenizer(), longest - 1)


@pytest.mark.parametrize(("choice", "kept"), [("keep", 2), ("drop", 1)])
def test_a_truncated_answer_is_kept_or_dropped_as_asked_and_counted(tmp_path, choice, kept):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES, {**FOX, "finish_reason": "length"}])
    report = prepare(source, make_tokenizer(), tmp_path / "store", PrepareOptions(truncated=choice))
    assert report.kept == kept
    assert report.notes.get(Note.TRUNCATED, 0) + report.dropped.get(Reason.TRUNCATED, 0) == 1


def test_rows_without_any_mark_stop_the_run_and_show_one_of_them(tmp_path):
    rows = [{"input_ids": [40, 41, 42], "loss_mask": [0, 0, 0]}] * 10
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match="no supervised token") as error:
        prepare(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "store")
    assert decode(tokenizer, [40, 41, 42]) in str(error.value)
    assert not (tmp_path / "store").exists()


def test_several_processes_write_the_same_store_as_one(tmp_path):
    rows = [{"prompt": f"question {n}", "response": f"answer {n} " * (n % 7 + 1)} for n in range(900)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    for workers in (1, 2):
        options = PrepareOptions(workers=workers)
        prepare(source, make_tokenizer(), tmp_path / f"store{workers}", options)
    one, two = (open_store(tmp_path / f"store{workers}").manifest for workers in (1, 2))
    assert one["shards"] == two["shards"]
    assert one["key"] == two["key"]


def test_two_processes_never_write_the_same_store(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES])
    with StoreWriter(tmp_path / "store"), pytest.raises(FolderInUseError, match="another process writes"):
        prepare(source, make_tokenizer(), tmp_path / "store")
    assert prepare(source, make_tokenizer(), tmp_path / "store").documents == 1


def test_what_a_killed_preparation_left_is_cleared_away(tmp_path):
    (tmp_path / ".store.writing").mkdir()
    (tmp_path / ".store.writing" / "shard-00000.arrow").write_bytes(b"half")
    prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES]), make_tokenizer(), tmp_path / "store")
    assert len(open_store(tmp_path / "store")) == 1
    assert not (tmp_path / ".store.writing").exists()


def test_a_full_disk_is_said_and_nothing_is_left_behind(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StoreWriter, "append", full)
    with pytest.raises(
        DiskFullError, match=r"no room left to write .*no store was written\. Free some space"
    ):
        prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES]), make_tokenizer(), tmp_path / "store")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".store.lock", "a.jsonl"]


@pytest.mark.parametrize("place", ["/proc", "a.jsonl"])
def test_a_store_that_cannot_be_written_is_refused_in_a_sentence(tmp_path, place):
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES])
    with pytest.raises(ConfigError, match=r"store cannot be written: .*Name another output"):
        prepare(source, make_tokenizer(), tmp_path / place / "store")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_when_the_store_is_synced_leaves_the_old_store(tmp_path, monkeypatch, code):
    source, store = write_jsonl(tmp_path / "a.jsonl", [APPLES]), tmp_path / "store"
    key = prepare(source, make_tokenizer(), store) and open_store(store).manifest["key"]

    def full(_: int) -> None:
        raise OSError(code, "full")

    monkeypatch.setattr("os.fsync", full)
    write_jsonl(source, [FOX])
    with pytest.raises(DiskFullError, match="no store was written") as error:
        prepare(source, make_tokenizer(), store, overwrite=True)
    assert "heckpoint" not in str(error.value)
    assert open_store(store).manifest["key"] == key


@pytest.mark.parametrize(
    ("supervised", "reason"), [(0, Reason.NO_SUPERVISED), (1, Reason.TOO_FEW), (2, None)]
)
def test_a_document_needs_an_anchor_and_a_label_after_it(tmp_path, supervised, reason):
    short = {"input_ids": [40, 41, 42], "loss_mask": [0] * (3 - supervised) + [1] * supervised}
    source = write_jsonl(tmp_path / "a.jsonl", [short] + [APPLES] * 20)
    report = prepare(source, make_tokenizer(), tmp_path / "store")
    assert report.dropped == ({reason: 1} if reason else {})
    assert report.kept == 20 + (reason is None)


def test_supervised_tokens_that_never_stand_together_are_too_few(tmp_path):
    row = {"input_ids": [40, 41, 42, 43], "loss_mask": [1, 0, 1, 0]}
    report = prepare(write_jsonl(tmp_path / "a.jsonl", [row, APPLES]), make_tokenizer(), tmp_path / "store")
    assert report.dropped == {Reason.TOO_FEW: 1}


def test_a_template_that_does_not_fit_is_found_out_early_in_a_long_source(tmp_path):
    rows = [{"input_ids": [40, 41], "loss_mask": [0, 0]}] * 3000 + ["not reached"]
    with pytest.raises(DataError, match=r"2048 of 2048 rows \(100%\) have no supervised token"):
        prepare(write_jsonl(tmp_path / "a.jsonl", rows), make_tokenizer(), tmp_path / "store")


def test_a_row_has_the_same_key_wherever_it_stands(tmp_path):
    rows = [APPLES, FOX, {"prompt": "third", "response": "one more"}]
    prepare(write_jsonl(tmp_path / "a.jsonl", rows), make_tokenizer(), tmp_path / "one")
    prepare(write_jsonl(tmp_path / "b.jsonl", rows[::-1]), make_tokenizer(), tmp_path / "two")
    one, two = (open_store(tmp_path / name).keys().tolist() for name in ("one", "two"))
    assert one == two[::-1]


def test_end_tokens_of_the_target_are_read_beside_its_tokenizer(tmp_path):
    tokenizer = make_tokenizer(ENDS_TWICE)
    tokenizer.eos_token = "<|endoftext|>"
    source = write_jsonl(tmp_path / "a.jsonl", [APPLES])
    tokenizer.save_pretrained(tmp_path / "target")
    for stops, expected in (
        (None, "<|im_end|>\n<|endoftext|>"),
        ([tokenizer.vocab["<|im_end|>"]], "<|im_end|>"),
    ):
        if stops is not None:
            GenerationConfig(eos_token_id=stops).save_pretrained(tmp_path / "target")
        loaded = type(tokenizer).from_pretrained(tmp_path / "target")
        prepare(source, loaded, tmp_path / "store", overwrite=True)
        assert supervised_texts(tmp_path / "store", loaded) == ["There are three apples." + expected]


def test_a_store_that_holds_other_files_is_not_replaced(tmp_path):
    prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES]), make_tokenizer(), tmp_path / "store")
    (tmp_path / "store" / "checkpoints").mkdir()
    other = write_jsonl(tmp_path / "b.jsonl", [FOX])
    with pytest.raises(
        OccupiedError, match="holds more than a token store: checkpoints; replacing it would delete"
    ):
        prepare(other, make_tokenizer(), tmp_path / "store", overwrite=True)
    assert (tmp_path / "store" / "checkpoints").is_dir()


def test_a_run_whose_output_is_a_token_store_is_refused_and_leaves_nothing_there(tmp_path):
    store = tmp_path / "store"
    prepare(write_jsonl(tmp_path / "a.jsonl", [APPLES]), make_tokenizer(), store)
    before = sorted(store.iterdir())
    config = parse_run(
        ["--target.path=builtin:tiny", f"--data.path={store}", f"--output={store}", "--optim.steps=1"]
    )
    with pytest.raises(ConfigError, match="is a token store; choose another folder"):
        train(config, Screen(quiet=True))
    assert sorted(store.iterdir()) == before
