"""The check before the first step: it passes on a real row, and fails for a row that is laid out otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftline import parity
from draftline.data.document import Document
from draftline.data.rows import RowShape, RowSource, row_from_documents
from draftline.decoding.greedy import CachedTarget
from draftline.drafter.blocks import opening_tokens
from draftline.errors import ConfigError
from draftline.parity import TOLERANCE, prove_parity, prove_start, prove_taps, prove_token_rows
from draftline.pipeline.job import forward_of
from tests.oracles.targets import FAMILIES, fitting_spec, random_target
from tests.pipeline_fixtures import make_job

SHAPE = RowShape(
    token_budget=128, block_budget=32, block_size=4, anchors_per_document=12, decay_gamma=4.0, windows=()
)
LAYOUTS = [
    {},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": False},
]


@pytest.fixture(scope="module")
def row():
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 10, size=length).astype(np.int32) for length in (30, 41, 19)]
    return row_from_documents(0, [Document(text, np.arange(len(text)) >= 4) for text in texts], SHAPE, seed=1)


def row_taps(target, spec, row):
    """Taps of every document on its own, in their places."""
    taps = torch.zeros(len(row.input_ids), spec.num_taps * spec.hidden_size)
    for start, end in zip(row.starts, row.starts[1:], strict=False):
        fed = CachedTarget(target, spec.target_layer_ids).feed(row.input_ids[start:end], num_logits=1)
        taps[start:end] = fed.taps
    return taps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_and_decoding_agree_on_every_kind_of_target(family, layout, row):
    target = random_target(family)
    spec = fitting_spec(target, **layout)
    assert prove_parity(target, spec, row, row_taps(target, spec, row)) <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"document_ids": torch.zeros(128, dtype=torch.int32)},
        {"positions": torch.arange(128) + torch.arange(128) // 40},
    ],
    ids=["documents run together", "positions skip"],
)
def test_a_row_that_is_laid_out_otherwise_stops_the_run(changes, row):
    target = random_target()
    spec = fitting_spec(target)
    wrong = replace(row, **changes)
    with pytest.raises(ConfigError, match="training and decoding disagree on random qwen3"):
        prove_parity(target, spec, wrong, row_taps(target, spec, row))


def test_labels_that_are_off_by_one_stop_the_run(row):
    target = random_target()
    spec = fitting_spec(target)
    wrong = replace(row, labels=row.labels.roll(-1, dims=1))
    with pytest.raises(ConfigError, match="not the token that follows its anchor"):
        prove_parity(target, spec, wrong, row_taps(target, spec, row))


def test_a_row_without_a_block_proves_nothing_and_passes(row):
    target = random_target()
    spec = fitting_spec(target)
    empty = replace(row, anchor_valid=torch.zeros_like(row.anchor_valid))
    assert prove_parity(target, spec, empty, torch.zeros(128, 64)) == 0.0


def test_the_targets_head_is_compared_in_part_and_its_own_dtype_is_kept(row):
    target = random_target(dtype=torch.bfloat16)
    spec = fitting_spec(target)
    assert 0 < prove_parity(target, spec, row, row_taps(target, spec, row)) <= TOLERANCE


def test_taps_in_another_order_are_noticed(row):
    target = random_target()
    spec = fitting_spec(target)
    taps = row_taps(target, spec, row)

    assert prove_taps(target, spec.target_layer_ids, row, taps) < 1e-5
    with pytest.raises(ConfigError, match="the taps that training reads of random qwen3 are not those"):
        prove_taps(target, spec.target_layer_ids, row, taps.unflatten(1, (2, -1)).flip(1).flatten(1))


def test_taps_that_are_not_finite_are_not_those_of_decoding(row):
    target = random_target()
    spec = fitting_spec(target)
    taps = row_taps(target, spec, row)
    taps[row.starts[1], 0] = torch.nan

    with pytest.raises(ConfigError, match="they are nan apart"):
        prove_taps(target, spec.target_layer_ids, row, taps)


class Texts:
    """Documents of a random target's vocabulary."""

    lengths = np.array([30, 41, 19], dtype=np.int32)

    def document(self, index: int) -> Document:
        text = np.random.default_rng(index).integers(0, 10, size=self.lengths[index]).astype(np.int32)
        return Document(text, np.arange(len(text)) >= 4)


def job_on(family, form):
    target = random_target(family)
    source = RowSource(Texts(), SHAPE, seed=0)
    spec = fitting_spec(target)
    return make_job(spec=spec, shape=SHAPE, source=source, target=target, max_documents=3, form=form)


@pytest.mark.parametrize(
    ("family", "form"), [("qwen3", "packed"), ("qwen3", "batched"), ("hybrid", "batched")]
)
def test_a_run_proves_itself_on_its_own_first_row(family, form):
    proved = prove_start(job_on(family, form))

    assert proved.blocks > 0
    assert proved.logits <= TOLERANCE
    assert proved.taps < 1e-4
    assert f"{proved.blocks} blocks" in proved.describe()


def test_embedding_rows_that_are_not_those_of_the_blocks_tokens_are_refused(row):
    target = random_target("qwen3")
    spec = fitting_spec(target)
    ids = opening_tokens(row.input_ids, row.anchors, row.anchor_valid, spec.mask_token_id)
    rows = target.embedding[ids]
    prove_token_rows(target, spec, row, rows)
    for wrong in (rows.roll(1, 0), rows * (1 + 1e-6), target.embedding[ids.where(ids != ids[-1], 0)]):
        with pytest.raises(
            ConfigError, match="the embedding rows that training reads of random qwen3 are not"
        ):
            prove_token_rows(target, spec, row, wrong)


def test_a_run_whose_forward_looks_up_another_mask_token_never_starts(monkeypatch):
    job = job_on("qwen3", "packed")
    wrong = replace(job, spec=job.spec.model_copy(update={"mask_token_id": job.spec.mask_token_id - 1}))
    monkeypatch.setattr(parity, "forward_of", lambda _, model: forward_of(wrong, model))
    with pytest.raises(ConfigError, match="the embedding rows that training reads"):
        prove_start(job)


def test_a_forward_that_runs_documents_of_a_hybrid_together_never_starts():
    with pytest.raises(ConfigError, match="the taps that training reads of random hybrid are not those"):
        prove_start(job_on("hybrid", "packed"))
