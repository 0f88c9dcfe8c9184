"""What a person sees before training: counts that add up, and text with the supervised tokens marked."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scripts.report_picture import PICTURE, draw

from draftline.data.commands import inspect_store
from draftline.data.fingerprint import hash_tokenizer
from draftline.data.inspect import (
    Segment,
    marked_text,
    print_documents,
    segments,
    select_documents,
    write_html,
)
from draftline.data.prepare import PrepareOptions, Progress, prepare
from draftline.data.reasons import Note, Reason
from draftline.data.report import PrepareReport, build_report, print_report
from draftline.data.store import TokenStore, open_store
from draftline.data.tally import Tally
from draftline.errors import ConfigError, DataError
from tests.data_tokenizer import REWRITING, make_tokenizer

ROWS = [
    {"prompt": "How many [b]apples[/b]?", "response": "There are three <apples> & a fox."},
    {"prompt": "no answer"},
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "second"},
        ]
    },
]


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[PrepareReport, TokenStore]:
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in ROWS))
    report = prepare(source, make_tokenizer(REWRITING), tmp_path / "store")
    return report, open_store(tmp_path / "store")


def printed(report: PrepareReport, *, colour: bool) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=100, force_terminal=colour, color_system="standard" if colour else None
    )
    print_report(report, console)
    return stream.getvalue()


def test_every_row_is_in_the_report_once(prepared):
    report, store = prepared
    assert report.rows == 3
    assert report.kept + sum(report.dropped.values()) == 3
    assert report.documents == len(store) == 3
    assert report.tokens == store.lengths.sum()
    assert report.supervised == sum(store.document(index).supervised.sum() for index in range(3))
    assert sum(count for _, _, count in report.lengths) == 3
    assert all(low <= high for low, high, _ in report.lengths)


def test_the_report_in_the_store_is_the_report_that_was_returned(prepared):
    report, store = prepared
    assert PrepareReport.read(store.path / "report.json") == report


def test_supervised_text_stands_in_brackets_where_there_is_no_colour(prepared):
    text = printed(prepared[0], colour=False)
    assert "[[There are three <apples> & a fox.<|im_end|>]]" in text
    assert "How many [b]apples[/b]?" in text
    assert "no assistant turn" in text
    assert "\x1b[" not in text


def test_supervised_text_is_coloured_on_a_terminal(prepared):
    text = printed(prepared[0], colour=True)
    assert "\x1b[" in text
    assert "[[" not in text


def test_segments_join_to_the_text_and_change_where_supervision_does(prepared):
    _, store = prepared
    tokenizer = make_tokenizer(REWRITING)
    for index in range(len(store)):
        parts = segments(tokenizer, store.document(index))
        assert [part.supervised for part in parts] == [False, True]
        assert parts[1].text.endswith("<|im_end|>")


def test_any_document_or_source_row_can_be_looked_at(prepared):
    _, store = prepared
    assert select_documents(store, document=2, source=None) == [2]
    assert select_documents(store, document=None, source=2) == [1, 2]
    assert select_documents(store, document=None, source=None) == [0, 1, 2]
    for number in (3, -1):
        with pytest.raises(ConfigError, match=f"document={number} is no number in .*: there are 0 to 2"):
            select_documents(store, document=number, source=None)
    rows = store.num_source_rows()
    for number in (rows, -1):
        with pytest.raises(ConfigError, match=f"source={number} .*: there are 0 to {rows - 1}"):
            select_documents(store, document=None, source=number)
    with pytest.raises(DataError, match="source row 1 gave no document"):
        select_documents(store, document=None, source=1)


def test_documents_print_with_their_source_row(prepared):
    stream = io.StringIO()
    print_documents(Console(file=stream, width=100), prepared[1], make_tokenizer(REWRITING), [2])
    assert "document 2: source row 2" in stream.getvalue()
    assert "[[second<|im_end|>]]" in stream.getvalue()


def test_the_report_shows_the_letters_of_a_row_that_a_console_would_read_as_markup():
    tally = Tally()
    tally.rows = tally.dropped[Reason.CONTENT_LOST] = 1
    tally.examples[Reason.CONTENT_LOST] = "rows[1].jsonl:1: missing: '[/b] so [red]'"
    stream = io.StringIO()
    print_report(build_report(tally, 0, 1.0, ""), Console(file=stream, width=200))
    assert tally.examples[Reason.CONTENT_LOST] in stream.getvalue()


def test_what_was_done_to_kept_rows_comes_with_the_place_of_the_first(tmp_path):
    said = {"role": "assistant", "content": "Three.", "reasoning_content": "left out by this template"}
    turns = [{"role": "user", "content": "one"}, said, *ROWS[2]["messages"][2:]]
    rows = [ROWS[0], {"messages": turns}, {**ROWS[0], "finish_reason": "length"}, {"messages": turns}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    report = prepare(tmp_path / "a.jsonl", make_tokenizer(), tmp_path / "store")
    assert report.notes == {Note.LEFT_OUT: 2, Note.TRUNCATED: 1}
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=400))
    for note, line in ((Note.LEFT_OUT, 2), (Note.TRUNCATED, 3)):
        assert report.examples[note] == f"{tmp_path / 'a.jsonl'}:{line}"
        assert re.search(rf"{re.escape(note)} .* {re.escape(report.examples[note])}", stream.getvalue())


def test_what_a_document_is_stands_whole_on_a_narrow_terminal(prepared):
    stream = io.StringIO()
    print_documents(Console(file=stream, width=40), prepared[1], make_tokenizer(REWRITING), [2])
    assert re.search(
        r"source row 2, \d+ tokens, \d+ supervised \(\d+%\)", " ".join(stream.getvalue().split())
    )


def test_the_page_escapes_what_the_rows_say(prepared, tmp_path):
    _, store = prepared
    write_html(tmp_path / "page.html", store, make_tokenizer(REWRITING), [0, 1])
    page = (tmp_path / "page.html").read_text()
    assert "<mark>There are three &lt;apples&gt; &amp; a fox.&lt;|im_end|&gt;</mark>" in page
    assert page.count("<h2>") == 2


def test_progress_is_told_in_rows_tokens_and_bytes(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(f'{{"prompt": "q", "response": "answer {n}"}}\n' for n in range(600)))
    seen: list[Progress] = []
    prepare(source, make_tokenizer(), tmp_path / "store", PrepareOptions(workers=1), progress=seen.append)
    assert [progress.rows for progress in seen] == [256, 512, 600]
    assert seen[-1].bytes_read == seen[-1].total_bytes == source.stat().st_size
    assert seen[-1].tokens == open_store(tmp_path / "store").lengths.sum()


def test_the_hash_of_a_tokenizer_follows_what_it_does(tmp_path):
    tokenizer, other = make_tokenizer(), make_tokenizer(REWRITING)
    assert hash_tokenizer(tokenizer) == hash_tokenizer(other)  # the template is hashed on its own
    tokenizer("something long", truncation=True, max_length=2)
    assert hash_tokenizer(tokenizer) == hash_tokenizer(other)
    tokenizer.save_pretrained(tmp_path)
    assert hash_tokenizer(type(tokenizer).from_pretrained(tmp_path)) == hash_tokenizer(other)
    other.add_tokens(["extra"])
    assert hash_tokenizer(tokenizer) != hash_tokenizer(other)


def test_a_store_is_inspected_with_the_tokenizer_that_made_it_on_screen_or_as_a_page(prepared, tmp_path):
    _, store = prepared
    tokenizer = make_tokenizer(REWRITING)
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    shown = inspect_store(store.path, tokenizer, console, source=2)
    assert [row["document"] for row in shown["documents"]] == [1, 2]
    first = shown["documents"][0]
    assert (first["source"], first["segments"][-1]) == (2, {"text": "first<|im_end|>", "supervised": True})
    assert "[[first<|im_end|>]]" in stream.getvalue()
    inspect_store(store.path, tokenizer, console, document=0, page=tmp_path / "page.html")
    assert "<mark>There are three" in (tmp_path / "page.html").read_text()
    tokenizer.add_tokens(["extra"])
    with pytest.raises(DataError, match="was made for tokenizer"):
        inspect_store(store.path, tokenizer, console)


def test_the_picture_in_the_docs_is_the_report_as_it_is_now():
    def words(picture: str) -> list[str]:
        return re.findall(r">([^<>]*\w[^<>]*)</text>", picture)

    assert words(draw()) == words(PICTURE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("colour", [True, False])
def test_control_characters_of_a_row_are_shown_and_do_not_act_on_the_terminal(colour: bool):
    text = marked_text([Segment("a\x1b[2J\x00\x9b\tb\n", True)], colour=colour)
    assert text.plain.strip("[]") == "a\\x1b[2J\\x00\\x9b\tb\n"


def test_markup_in_a_dropped_row_is_shown_as_it_stands(prepared):
    written = io.StringIO()
    report = replace(prepared[0], dropped={"roles": 1}, examples={"roles": "a.jsonl:1: '[/x] [red]'"})
    print_report(report, Console(file=written, width=120))
    assert "'[/x] [red]'" in written.getvalue()
