"""Files as users have them: marks at the start, Windows line ends, broken lines, tables, folders."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftline.data import sources
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.reasons import Reason
from draftline.data.sources import Source, resolve_source
from draftline.data.store import open_store
from draftline.errors import DataError
from tests.data_tokenizer import make_tokenizer

ROWS = [{"prompt": f"question {n}", "response": f"answer {n}"} for n in range(6)]
LINES = [json.dumps(row) for row in ROWS]


def all_records(path: Path) -> list[Any]:
    return [record for chunk in resolve_source(path).chunks() for _, record in chunk.records()]


def write_as(kind: str, folder: Path) -> Path:
    """The same six rows as one file of some kind."""
    text = "\n".join(LINES) + "\n"
    match kind:
        case "jsonl":
            (path := folder / "a.jsonl").write_text(text)
        case "bom":
            (path := folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
        case "crlf":
            (path := folder / "a.jsonl").write_bytes(text.replace("\n", "\r\n").encode())
        case "no newline at the end":
            (path := folder / "a.jsonl").write_text("\n".join(LINES))
        case "blank lines":
            (path := folder / "a.jsonl").write_text("\n\n".join(LINES) + "\n \n")
        case "gzip":
            (path := folder / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        case "list":
            (path := folder / "a.json").write_text(json.dumps(ROWS))
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path := folder / "a.parquet", row_group_size=4)
        case _:
            path = folder / "parts"
            path.mkdir()
            (path / "b.jsonl").write_text("\n".join(LINES[3:]))
            (path / "a.jsonl").write_text("\n".join(LINES[:3]))
    return path


KINDS = "jsonl", "bom", "crlf", "no newline at the end", "blank lines", "gzip", "list", "parquet", "folder"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_in_any_kind_of_file_are_the_same_records(tmp_path, kind):
    assert all_records(write_as(kind, tmp_path)) == ROWS


def test_the_documents_of_a_table_are_those_of_the_lines(tmp_path):
    stores = []
    for kind in ("jsonl", "parquet", "folder"):
        prepare(write_as(kind, tmp_path), make_tokenizer(), tmp_path / f"{kind}-store")
        stores.append(open_store(tmp_path / f"{kind}-store"))
    assert all(store.keys().tolist() == stores[0].keys().tolist() for store in stores)
    assert all(store.sources().tolist() == list(range(6)) for store in stores)
    assert stores[0].manifest["shards"] == stores[1].manifest["shards"]


def test_tool_calls_of_mixed_types_survive_a_table(tmp_path):
    calls = [{"function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}]
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}, {"messages": plain}]), tmp_path / "a.parquet")
    report = prepare(tmp_path / "a.parquet", make_tokenizer(), tmp_path / "store")
    assert report.kept == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "cut', Reason.NOT_JSON),
        ("\x00\x01", Reason.NOT_JSON),
        ("[" * 100_000, Reason.NOT_JSON),
        ('"only a string"', Reason.NOT_A_ROW),
        ('{"input_ids": [1, 2, 3], "loss_mask": [1]}', Reason.LENGTHS_DIFFER),
        ('{"input_ids": [1, 999999], "loss_mask": [1, 1]}', Reason.BAD_TOKEN),
        ('{"input_ids": [1, -7], "loss_mask": [1, 1]}', Reason.BAD_TOKEN),
    ],
)
def test_a_broken_line_stops_with_file_and_line_or_is_counted_as_asked(tmp_path, line, reason):
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join([*LINES[:3], line, *LINES[3:]]) + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:4: {reason}"):
        prepare(source, make_tokenizer(), tmp_path / "store")
    report = prepare(source, make_tokenizer(), tmp_path / "store", PrepareOptions(on_error="skip"))
    assert report.dropped == {reason: 1}
    assert report.kept == 6
    assert "a.jsonl:4" in report.examples[reason]


def test_bytes_that_are_not_utf8_are_a_broken_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES[0].encode() + b'\n{"prompt": "caf\xe9", "response": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON"):
        prepare(tmp_path / "a.jsonl", make_tokenizer(), tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.jsonl", b'{"prompt": "x"}\n', "none of the 1 rows .* no assistant turn"),
        ("a.txt", b"hello", "has no known ending"),
        ("a.json", b'{"prompt": "x"}', "not a list of conversations"),
        ("a.json", b"{", "is not valid JSON"),
        ("a.parquet", b"PAR1 not really", "damaged or cut short"),
        ("a.jsonl.gz", gzip.compress("\n".join(LINES).encode(), mtime=0)[:-20], "damaged or cut short"),
        ("a.jsonl.gz", b"plain text", "damaged or cut short"),
    ],
)
def test_a_file_that_gives_nothing_is_an_error_that_says_why(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / name, make_tokenizer(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_path_that_is_not_there_and_a_folder_without_data_are_errors(tmp_path):
    with pytest.raises(DataError, match="neither a file, a folder nor the name"):
        resolve_source(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="holds no file that ends in"):
        resolve_source(tmp_path)


def test_a_source_without_a_name_is_not_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINES[0])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the source has no name"):
        resolve_source("")


def test_a_folder_with_the_ending_of_a_file_is_no_file_of_its_parent(tmp_path):
    (tmp_path / "store.jsonl").mkdir()
    with pytest.raises(DataError, match="holds no file that ends in"):
        resolve_source(tmp_path)
    (tmp_path / "a.jsonl").write_text(LINES[0])
    assert resolve_source(tmp_path).files == (tmp_path / "a.jsonl",)


def test_a_row_that_cannot_be_told_from_another_is_counted_as_a_duplicate(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([LINES[0], LINES[1], LINES[0]]))
    assert prepare(tmp_path / "a.jsonl", make_tokenizer(), tmp_path / "store").duplicates == 1


def test_memory_does_not_grow_with_the_length_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_ROWS", 32)

    def peak(rows: int) -> int:
        source = tmp_path / f"{rows}.jsonl"
        with source.open("w") as stream:
            stream.writelines(
                f'{{"prompt": "question {n}", "response": "answer {n}"}}\n' for n in range(rows)
            )
        tracemalloc.start()
        prepare(source, make_tokenizer(), tmp_path / f"{rows}-store", PrepareOptions(workers=1))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(64)  # fills caches that stay; what a few hundred rows need is noise of the allocator
    # What may grow: 8 bytes a document to count duplicates, some for each of the 32-row batches.
    assert peak(3840) - peak(640) < 100_000


def test_a_hub_data_set_is_read_as_a_stream(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write_as("jsonl", tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    # `load_dataset` takes a folder where it takes a name, so the stream is real; only the commit needs the hub.
    monkeypatch.setattr(sources, "_hub_commit", {"owner/name": "main"}.__getitem__)
    chunks = list(Source("owner/name", ()).chunks())
    assert [record for chunk in chunks for _, record in chunk.records()] == ROWS


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:test", ("owner/name", None, "test")),
        ("owner/name/main", ("owner/name", "main", "train")),
        ("owner/name/main:test", ("owner/name", "main", "test")),
    ],
)
def test_a_hub_name_says_repository_subset_and_split(monkeypatch, name, asked):
    datasets = pytest.importorskip("datasets")
    seen: list[Any] = []

    def refuse(repository: str, subset: str | None, *, split: str, streaming: bool, revision: str) -> None:
        seen.append((repository, subset, split, streaming, revision))
        raise ValueError("Config name is missing. Please pick one among: ['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(sources, "_hub_commit", lambda repository: f"commit of {repository}")
    with pytest.raises(DataError, match=r"cannot be read: Config name is missing.*socratic"):
        list(resolve_source(name).chunks())
    assert seen == [(*asked, True, "commit of owner/name")]


def test_a_hub_that_cannot_be_reached_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(
        DataError, match=r"owner/nothing-there is no file or folder here.*no route.*the network"
    ):
        resolve_source("owner/nothing-there").content_hashes()


def unreachable(*_: object) -> None:
    raise OSError("no route to host")


def test_a_hub_name_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = resolve_source("owner/name:train")
    assert source.total_bytes is None
    with pytest.raises(DataError, match="pip install datasets"):
        next(source.chunks())


def test_data_files_in_a_folder_below_are_not_left_out_in_silence(tmp_path):
    write_as("jsonl", tmp_path)
    (tmp_path / ".cache").mkdir()
    write_as("jsonl", tmp_path / ".cache")
    assert len(all_records(tmp_path)) == len(ROWS), "what tools hide is none of the user's data"
    below = tmp_path / "more" / "deep"
    below.mkdir(parents=True)
    write_as("jsonl", below)
    with pytest.raises(DataError, match=rf"has data files in {below} too.*name one of them"):
        resolve_source(tmp_path)


def test_a_store_a_run_and_a_model_in_a_folder_below_are_no_data(tmp_path):
    write_as("jsonl", tmp_path)
    for name in ("store/manifest.json", "run/metrics.jsonl", "run/result.json", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}\n')
    assert len(all_records(tmp_path)) == len(ROWS)
    (tmp_path / "more").mkdir()
    write_as("list", tmp_path / "more")
    with pytest.raises(DataError, match="more too"):
        resolve_source(tmp_path)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_told_to_be_written_in_utf_8(tmp_path, encoding):
    text = json.dumps({"prompt": "Gr\u00fc\u00dfe", "response": "b"}, ensure_ascii=False) + "\n"
    (tmp_path / "a.jsonl").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=r"a\.jsonl:1: not valid JSON: .*; write the file in UTF-8;"):
        prepare(tmp_path / "a.jsonl", make_tokenizer(), tmp_path / "store")
