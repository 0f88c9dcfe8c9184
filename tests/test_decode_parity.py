"""The check before the first step: it passes on a real row, and fails for a row that is laid out otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftline.data.document import Document
from draftline.data.rows import RowShape, row_from_documents
from draftline.errors import ConfigError
from draftline.greedy import CachedTarget
from draftline.parity import TOLERANCE, prove_parity
from tests.oracles.targets import FAMILIES, fitting_spec, random_target

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
