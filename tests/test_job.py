"""What a run consists of: bounds that its workers allocate by."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.rows import RowSource
from draftline.pipeline.job import max_documents
from tests.pipeline_fixtures import make_job
from tests.row_examples import shape, store_of_lengths


@given(st.lists(st.integers(1, 256), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_row_holds_more_documents_than_the_tables_have_room_for(lengths: list[int]):
    store = store_of_lengths(lengths)
    source = RowSource(store, shape(windows=()), seed=0)
    most = max_documents(torch.from_numpy(store.lengths), 256)
    for index in range(source.rows_in(3)):
        assert len(source.row(index).documents) <= most


@pytest.mark.parametrize(
    ("lengths", "most"), [([256], 1), ([200, 100], 1), ([100, 100], 2), ([1] * 300, 256), ([128, 128, 1], 2)]
)
def test_the_bound_is_the_shortest_documents_together(lengths: list[int], most: int):
    assert max_documents(torch.from_numpy(np.array(lengths, dtype=np.int32)), 256) == most


def test_the_state_is_taken_at_every_boundary_and_at_the_end():
    job = make_job(steps=7, boundaries=frozenset({2, 5}))
    assert [step + 1 for step in range(7) if job.is_boundary(step)] == [2, 4, 5, 6, 7]
