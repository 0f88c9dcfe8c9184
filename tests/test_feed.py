"""Rows built ahead: in order, by any number of threads, with waits that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from draftline.data.feed import ROWS_AHEAD, RowFeed, RowLoader
from draftline.data.rows import Row, RowSource
from draftline.errors import StallError
from draftline.pipeline.supervise import Abort, AbortedError, Supervisor
from draftline.resilience.faults import Fault, InjectedFaultError, armed
from tests.row_examples import shape, store_of_lengths


class Watched(RowSource):
    """A real source that notes what it was asked for, and waits until it may answer."""

    def __init__(self) -> None:
        super().__init__(store_of_lengths([20] * 30), shape(windows=()), seed=0)
        self.asked: list[int] = []
        self.open = threading.Event()
        self.open.set()

    def row(self, index: int) -> Row:
        self.asked.append(index)
        self.open.wait(20)
        return super().row(index)


@contextmanager
def loading(source: RowSource, num_threads: int = 2) -> Iterator[tuple[RowLoader, Supervisor]]:
    supervisor = Supervisor(Abort())
    loader = RowLoader(source, supervisor.abort)
    for index in range(num_threads):
        supervisor.start(f"loader-{index}", loader.run)
    try:
        yield loader, supervisor
    finally:
        supervisor.abort.raise_now()
        supervisor.join(5)
        assert not supervisor.running


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_rows_come_in_order_and_are_the_sources_own(num_threads: int):
    source = Watched()
    with loading(source, num_threads) as (loader, _):
        feed = RowFeed(loader, iter([3, 4, 9, 10, 11]), 20)
        rows = list(iter(feed.next, None))
    assert [row.index for row in rows] == [3, 4, 9, 10, 11]
    for row in rows:
        assert torch.equal(row.input_ids, RowSource.row(source, row.index).input_ids)
    assert sorted(source.asked) == [3, 4, 9, 10, 11]  # each built once


def test_several_workers_share_one_loader():
    with loading(Watched()) as (loader, _):
        feeds = [RowFeed(loader, iter(range(start, 12, 3)), 20) for start in range(3)]
        taken = [[row.index for row in iter(feed.next, None)] for feed in feeds]
    assert taken == [list(range(start, 12, 3)) for start in range(3)]


def test_a_few_rows_are_built_before_anyone_asks_and_no_more():
    source = Watched()
    with loading(source) as (loader, _):
        feed = RowFeed(loader, iter(range(100)), 20)
        wait_until(lambda: len(source.asked) == ROWS_AHEAD)
        time.sleep(0.05)
        assert len(source.asked) == ROWS_AHEAD
        feed.next()
        wait_until(lambda: len(source.asked) == ROWS_AHEAD + 1)


def test_an_empty_list_of_rows_is_at_its_end():
    with loading(Watched()) as (loader, _):
        assert RowFeed(loader, iter([]), 20).next() is None


def test_a_row_that_takes_too_long_is_a_stall_that_names_it():
    source = Watched()
    source.open.clear()
    with loading(source) as (loader, _):
        feed = RowFeed(loader, iter([7]), 0.05)
        with pytest.raises(StallError, match="row 7 from the loader"):
            feed.next()
        source.open.set()


def test_an_abort_ends_the_wait_for_a_row_within_a_second():
    source = Watched()
    source.open.clear()
    with loading(source) as (loader, supervisor):
        feed = RowFeed(loader, iter([7]), 20)
        threading.Timer(0.05, supervisor.abort.raise_now).start()
        begin = time.monotonic()
        with pytest.raises(AbortedError):
            feed.next()
        assert time.monotonic() - begin < 1
        source.open.set()


def test_a_row_that_cannot_be_built_ends_the_run_with_its_cause_and_the_loaders_name():
    with armed(Fault(worker="loader", where="row", at=8, kind="raise")):
        supervisor = Supervisor(Abort())
        loader = RowLoader(Watched(), supervisor.abort)
        supervisor.start("loader-0", loader.run)
        feed = RowFeed(loader, iter([8, 9, 10]), 20)
        with pytest.raises(AbortedError):
            feed.next()
        with pytest.raises(InjectedFaultError) as error:
            supervisor.join(5)
    assert error.value.__notes__ == ["worker: loader-0, row 8"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
