"""What users of other trainers met in their data: each of those inputs, as it comes, and what Draftline does.

The names are those of the list of faults that these tests were made from, D01 to D17; where a module has tests of
its own for one of them, this is the case as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftline.config import TargetConfig
from draftline.data.encoding import decode
from draftline.data.local import LocalModel
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.reasons import Note, Reason
from draftline.data.report import PrepareReport
from draftline.data.rows import row_from_documents
from draftline.data.sampling import Sampling
from draftline.data.store import TokenStore, open_store
from draftline.errors import CheckpointError, ConfigError, DataError, OccupiedError
from draftline.serving.published import spec_from_config
from draftline.target.inspect import resolve_mask_token_id
from draftline.target.load import load_target
from tests.data_tokenizer import CHATML, OPENS_THINK, REWRITING, TAGGED, make_tokenizer
from tests.row_examples import answered, shape
from tests.target_families import SHAPE, save_target

ASK = {"role": "user", "content": "How many apples?"}
ANSWER = {"role": "assistant", "content": "There are three."}
GOOD = {"messages": [ASK, ANSWER]}
END = "<|im_end|>"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepared(
    folder: Path, *rows: Any, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any
) -> tuple[PrepareReport, TokenStore]:
    number = len(list(folder.iterdir()))
    source = write(folder / f"{number}.jsonl", *rows)
    tokenizer = tokenizer or make_tokenizer()
    report = prepare(source, tokenizer, folder / f"{number}.store", PrepareOptions(**options))
    return report, open_store(folder / f"{number}.store")


def taught(store: TokenStore, tokenizer: PreTrainedTokenizerFast | None = None) -> list[str]:
    """The supervised text of every document."""
    tokenizer = tokenizer or make_tokenizer()
    documents = [store.document(number) for number in range(len(store))]
    return [decode(tokenizer, d.input_ids[d.supervised].tolist()) for d in documents]


def test_d01_a_tokenizer_without_pad_needs_none_because_padding_is_never_learned_from(tmp_path):
    padded = make_tokenizer()
    padded.pad_token = "<|endoftext|>"
    assert make_tokenizer().pad_token is None
    stores = [prepared(tmp_path, GOOD, tokenizer=tokenizer)[1] for tokenizer in (make_tokenizer(), padded)]
    assert stores[0].document(0).input_ids.tolist() == stores[1].document(0).input_ids.tolist()
    alone, roomy = (
        row_from_documents(0, [answered(5, 20)], shape(token_budget=budget), seed=1) for budget in (128, 256)
    )
    # Room for padding changes neither what is learned nor how much it weighs.
    assert torch.equal(alone.labels, roomy.labels)
    assert torch.equal(alone.weights, roomy.weights)
    assert alone.weights.sum() > 0


def test_d02_a_mask_token_is_missing_or_ends_text_or_lies_outside_the_head_or_in_its_padding():
    tokenizer = make_tokenizer()
    rows = len(tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    for wanted, words in ((None, "no spare embedding row"), (end, "end-of-text"), (rows, "is outside")):
        with pytest.raises(ConfigError, match=words):
            resolve_mask_token_id(wanted, tokenizer, rows, (end,))
    assert resolve_mask_token_id(rows + 5, tokenizer, rows + 64, (end,)) == rows + 5


def test_d03_ids_of_a_padded_head_are_neither_read_nor_drawn(tmp_path):
    tokenizer = make_tokenizer()
    rows = len(tokenizer) + 512
    for beyond in (len(tokenizer), 2**70, -1):
        with pytest.raises(DataError, match="token ids outside the vocabulary"):
            prepared(tmp_path, {"input_ids": [1, beyond, 2], "loss_mask": [0, 1, 1]})
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "vocab_size": rows}))
    target.generation_config.eos_token_id = None
    model = LocalModel(target, tokenizer, Sampling(max_new_tokens=64, temperature=5.0))
    drawn = {token for answer in model.continue_batch([[1, 2, 3]] * 8, 0) for token in answer}
    assert len(drawn) > 64
    assert max(drawn) < len(tokenizer)


def test_d04_a_tied_head_that_no_file_holds_is_the_embedding(tmp_path):
    target = load_target(TargetConfig(path=str(save_target(tmp_path / "target"))), torch.device("cpu"))
    assert torch.equal(target.head, target.embedding)


def test_d05_a_shard_that_is_cut_short_is_named_before_any_weight_is_read(tmp_path):
    weights = save_target(tmp_path / "target") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes"):
        load_target(TargetConfig(path=str(tmp_path / "target")), torch.device("cpu"))


def test_d06_conversations_that_teach_nothing_are_dropped_by_reason_and_the_run_goes_on(tmp_path):
    report, store = prepared(
        tmp_path,
        {"messages": [ASK, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": [ASK]},
        {"messages": [ASK, ASK, ANSWER]},
        GOOD,
    )
    reasons = (Reason.EMPTY_ASSISTANT, Reason.SYSTEM_ONLY, Reason.USER_ONLY, Reason.ROLES)
    assert report.dropped == {str(reason): 1 for reason in reasons}
    assert report.kept == len(store) == 1


def test_d06_a_role_that_nobody_knows_is_the_reason_and_is_named(tmp_path):
    alien = {"conversations": [{"from": "human", "value": "a"}, {"from": "alien", "value": "b"}]}
    report, _ = prepared(tmp_path, {"messages": [{"role": "robot", "content": "a"}, ANSWER]}, alien, GOOD)
    assert report.dropped == {str(Reason.UNKNOWN_ROLE): 2}
    assert "'robot'; known are" in report.examples[Reason.UNKNOWN_ROLE]
    with pytest.raises(DataError, match=r"unknown role .*'alien'; known are") as refused:
        prepared(tmp_path, alien)
    assert "draftline regenerate" not in str(refused.value)


@pytest.mark.parametrize("length", [1, 2, 7, 251])
def test_d07_an_answer_of_any_length_even_one_that_ends_the_row_teaches_up_to_its_last_token(length):
    # 256 tokens a row: the last case ends it exactly.
    row = row_from_documents(0, [answered(5, length)], shape(block_size=8), seed=0)
    ends = row.anchors[row.anchor_valid, None] + torch.arange(8)
    learned = row.weights[row.anchor_valid] > 0
    assert row.anchor_valid.any() == (length > 1)
    assert torch.isfinite(row.weights).all()
    assert not learned[ends >= 5 + length].any()
    if length > 1:
        assert int(ends[learned].max()) == 5 + length - 1


def test_d08_a_long_row_is_clipped_and_a_prompt_that_fills_it_dropped_both_counted(tmp_path):
    long = {"prompt": "How many?", "response": "apples are " * 50}
    report, store = prepared(
        tmp_path, long, {"prompt": "apples are " * 50, "response": "Three."}, max_length=40
    )
    assert report.notes == {str(Note.CLIPPED): 1}
    assert report.dropped == {str(Reason.PROMPT_TOO_LONG): 1}
    assert store.lengths.tolist() == [40]


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (CHATML, "There are three.", ["There are three." + END]),
        (TAGGED, "There are three.", ["There are three." + END]),
        (REWRITING, "There are three.", ["There are three." + END]),
        (OPENS_THINK, "I count.\n</think>\n\nThree.", ["I count.\n</think>\n\nThree." + END]),
    ],
    ids=["no tags", "tags", "rewrites and adds an empty think block", "closing tag only"],
)
def test_d09_borders_are_right_with_any_template(tmp_path, template, answer, expected):
    tokenizer = make_tokenizer(template)
    _, store = prepared(tmp_path, {"prompt": "How many?", "response": answer}, tokenizer=tokenizer)
    assert taught(store, tokenizer) == expected


def test_d09_a_template_that_rewrites_earlier_turns_makes_a_document_for_each_answer(tmp_path):
    thought = {"role": "assistant", "content": "Three.", "reasoning_content": "Count them."}
    tokenizer = make_tokenizer(REWRITING)
    report, store = prepared(tmp_path, {"messages": [ASK, thought, ASK, ANSWER]}, tokenizer=tokenizer)
    assert report.notes == {str(Note.PER_TURN): 1}
    assert taught(store, tokenizer) == [
        "<think>\nCount them.\n</think>\n\nThree." + END,
        "There are three." + END,
    ]


def test_d10_rows_with_and_without_thinking_are_each_taught_as_the_target_writes_them(tmp_path):
    tokenizer = make_tokenizer(REWRITING)
    rows = [{"messages": [ASK, {**ANSWER, "reasoning_content": "Count."}]}, GOOD]
    _, store = prepared(tmp_path, *rows, tokenizer=tokenizer)
    assert taught(store, tokenizer) == [
        "<think>\nCount.\n</think>\n\nThere are three." + END,
        "There are three." + END,
    ]
    context = decode(tokenizer, store.document(1).input_ids[~store.document(1).supervised].tolist())
    assert context.endswith("<think>\n\n</think>\n\n")


def test_d11_tool_calls_in_any_form_are_the_same_tokens(tmp_path):
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    text = {"name": "weather", "arguments": json.dumps(function["arguments"])}
    forms = [
        [{"type": "function", "function": function}],
        json.dumps([{"type": "function", "function": function}]),
        [{"type": "function", "function": text}],
        {"type": "function", "function": function},
    ]
    rows = [{"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]} for calls in forms]
    _, store = prepared(tmp_path, *rows)
    ids = {tuple(store.document(number).input_ids.tolist()) for number in range(len(store))}
    assert (len(store), len(ids)) == (4, 1)
    assert '"city": "Paris"' in taught(store)[0]


def test_d11_a_row_whose_tool_call_the_template_ignores_is_dropped_by_file_and_line(tmp_path):
    call = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    said = {"role": "assistant", "content": "", "tool_calls": call}
    row = {"messages": [ASK, said, {"role": "tool", "content": "sunny"}, ANSWER]}
    tokenizer = make_tokenizer(TAGGED)
    report, store = prepared(tmp_path, *[GOOD] * 10, row, tokenizer=tokenizer)
    assert report.dropped == {str(Reason.CONTENT_LOST): 1}
    assert report.examples[Reason.CONTENT_LOST].endswith(".jsonl:11: message 1, missing: a call of 'weather'")
    assert (report.rows, report.kept, len(store)) == (11, 10, 10)


def test_d12_a_source_in_which_nothing_is_supervised_is_an_error_that_shows_a_row(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}] * 5
    shown = decode(make_tokenizer(), [1, 2, 3])
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, *rows)
    assert "5 of 5 rows (100%) have no supervised token" in str(refused.value)
    assert shown in str(refused.value)


def test_d13_ids_and_mask_of_different_length_are_an_error_with_the_row(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [1, 2, 3], "loss_mask": [1, 1]}]
    with pytest.raises(DataError, match=r"\.jsonl:2: input_ids and mask differ in length: 3 input_ids, 2 in"):
        prepared(tmp_path, *rows)


SOUND = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
BAD_IDS = [
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, Reason.LABELS_DIFFER),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}, Reason.BAD_MASK),
    ({"input_ids": [True, False, True], "loss_mask": [0, 1, 1]}, Reason.NOT_A_ROW),
]


@pytest.mark.parametrize(("row", "reason"), BAD_IDS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_d13_token_rows_whose_mask_would_be_guessed_stop_or_are_counted_in_any_file(
    tmp_path, row, reason, ending
):
    # A table has one type for a column, so each row has a file of its own.
    for name, each in (("0", row), ("1", SOUND)):
        path = tmp_path / "rows" / f"{name}.{ending}"
        path.parent.mkdir(exist_ok=True)
        if ending == "jsonl":
            write(path, each)
        else:
            pq.write_table(pa.Table.from_pylist([each]), path)
    with pytest.raises(DataError, match=rf"0\.{ending}:1: {reason}: "):
        prepare(tmp_path / "rows", make_tokenizer(), tmp_path / "store")
    options = PrepareOptions(on_error="skip")
    report = prepare(tmp_path / "rows", make_tokenizer(), tmp_path / "store", options)
    assert report.dropped == {str(reason): 1}
    assert report.kept == 1


def test_d14_duplicate_rows_are_counted_and_order_and_shards_do_not_change_what_a_row_is_called(tmp_path):
    other = {"prompt": "And pears?", "response": "None."}
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "b.jsonl", GOOD)
    write(tmp_path / "shards" / "a.jsonl", other, GOOD)
    tokenizer = make_tokenizer()
    report = prepare(tmp_path / "shards", tokenizer, tmp_path / "first")
    assert report.duplicates == 1
    again = prepare(write(tmp_path / "one.jsonl", GOOD, GOOD, other), tokenizer, tmp_path / "second")
    assert again.duplicates == 1
    keys = [sorted(open_store(tmp_path / name).keys().tolist()) for name in ("first", "second")]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a", "response": "b"}\n{"prompt": \n', r"chats\.jsonl:2: not valid JSON"),
        (b"", "is empty"),
        (b"\n\n", "holds no rows"),
        (b'{"prompt": "nobody answers"}\n', "none of the 1 rows .* no assistant turn.*draftline regenerate"),
    ],
    ids=["broken line", "empty file", "blank lines", "nothing left"],
)
def test_d15_a_file_that_cannot_be_used_is_an_error_that_says_where_and_why(tmp_path, content, words):
    (tmp_path / "chats.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        prepare(tmp_path / "chats.jsonl", make_tokenizer(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_d15_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path):
    line = json.dumps(GOOD).encode()
    (tmp_path / "plain.jsonl").write_bytes(line + b"\n" + line + b"\n")
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n")
    made = [prepare(tmp_path / f"{n}.jsonl", make_tokenizer(), tmp_path / n) for n in ("plain", "windows")]
    assert made[0].tokens == made[1].tokens > 0
    assert made[1].kept == 2


def test_d16_a_reduced_vocabulary_is_refused_and_another_tokenizers_store_by_its_hash(tmp_path):
    speculators = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {"vocab_size": 97},
        "aux_hidden_state_layer_ids": [2, 4],
        "draft_vocab_size": 50,
    }
    with pytest.raises(CheckpointError, match="draft_vocab_size=50 of 97"):
        spec_from_config(speculators, "config.json", 6)
    prepared(tmp_path, GOOD)
    other = make_tokenizer()
    other.add_tokens(["pear"])
    with pytest.raises(OccupiedError, match=r"made otherwise: tokenizer [0-9a-f]{16} .*, now [0-9a-f]{16}"):
        prepare(tmp_path / "0.jsonl", other, tmp_path / "0.store")


@pytest.mark.parametrize(("choice", "kept"), [("keep", 1), ("drop", 0)])
def test_d17_answers_that_were_cut_off_are_kept_without_an_end_or_dropped_and_counted(tmp_path, choice, kept):
    cut = {"messages": [ASK, {"role": "assistant", "content": "There are"}], "finish_reason": "length"}
    report, store = prepared(tmp_path, cut, GOOD, truncated=choice)
    assert report.kept == kept + 1
    assert taught(store) == ["There are"] * kept + ["There are three." + END]
    counted = report.notes.get(str(Note.TRUNCATED), 0), report.dropped.get(str(Reason.TRUNCATED), 0)
    assert counted == (kept, 1 - kept)


def test_every_fault_of_the_list_has_its_test():
    names = [name for name in globals() if name.startswith("test_d")]
    assert {name[5:8] for name in names} == {f"d{number:02d}" for number in range(1, 18)}
