"""A row on a device: what was loaded is what the step reads, at addresses that stay."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftline.data.rows import Row, RowSource, row_from_documents
from draftline.data.transfer import DeviceRow, row_tensors
from tests.row_examples import document_lists, shape, store_of_lengths

CPU = torch.device("cpu")
WINDOWS = ((None, False), (24, True))


def views(device_row: DeviceRow) -> dict[str, Tensor]:
    """What a step reads, by the names of `row_tensors`."""
    named = {name: tensor for name, tensor in vars(device_row).items() if not name.startswith("_")}
    tables = named.pop("tables")
    for index, table in enumerate(tables):
        named |= {f"{index}.{name}": tensor for name, tensor in vars(table).items()}
    return named


def assert_holds(device_row: DeviceRow, row: Row) -> None:
    held, expected = views(device_row), row_tensors(row)
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor), name


@given(st.lists(document_lists(), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_after_a_load_every_tensor_equals_the_rows(rows_of_documents):
    rows = [row_from_documents(i, d, shape(windows=WINDOWS), 0) for i, d in enumerate(rows_of_documents)]
    device_row = DeviceRow(rows[0], CPU)
    assert_holds(device_row, rows[0])
    for row in rows:
        device_row.load(row)
        assert_holds(device_row, row)


def test_addresses_never_change():
    source = RowSource(store_of_lengths([50] * 20), shape(windows=WINDOWS), seed=0)
    device_row = DeviceRow(source.row(0), CPU)
    before = {name: tensor.data_ptr() for name, tensor in views(device_row).items()}
    for index in range(1, 6):
        device_row.load(source.row(index))
    assert {name: tensor.data_ptr() for name, tensor in views(device_row).items()} == before


def test_the_whole_row_is_one_buffer_with_aligned_tensors_that_do_not_overlap():
    row = RowSource(store_of_lengths([50] * 20), shape(windows=WINDOWS), seed=0).row(0)
    held = views(DeviceRow(row, CPU))
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == 1
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in held.values())
    assert all(start % 16 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("windows", [(), WINDOWS[:1], WINDOWS])
def test_there_is_one_set_of_tables_for_each_kind_of_layer(windows):
    row = RowSource(store_of_lengths([50] * 20), shape(windows=windows), seed=0).row(0)
    assert len(DeviceRow(row, CPU).tables) == len(windows)


def test_a_loaded_row_does_not_follow_changes_to_the_host_row():
    row = RowSource(store_of_lengths([50] * 20), shape(windows=()), seed=0).row(0)
    device_row = DeviceRow(row, CPU)
    expected = row.labels.clone()
    row.labels.fill_(-1)
    assert torch.equal(device_row.labels, expected)
