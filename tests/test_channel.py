"""The channel: slots in row order, no deadlock in any interleaving, waits that end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftline.data.rows import Row, row_from_documents
from draftline.errors import StallError
from draftline.pipeline.channel import Channel, Slot
from draftline.pipeline.schedule import Schedule
from draftline.pipeline.supervise import Abort, AbortedError
from tests.row_examples import answered, shape


def row(index: int) -> Row:
    return row_from_documents(index, [answered(2, 6)], shape(windows=()), seed=0)


def channel(
    num_slots: int, first: int = 0, stride: int = 1, seconds: float = 20.0, abort: Abort | None = None
):
    slots = [Slot(torch.zeros(1)) for _ in range(num_slots)]
    return Channel(slots, first, stride, abort or Abort(), seconds)


def is_ready(operation: Callable[[], object]) -> bool:
    """Whether an operation on a channel without patience goes through; a blocked one changes nothing."""
    try:
        operation()
    except StallError:
        return False
    return True


class Model:
    """The real channels of two producers and two consumers, driven one operation at a time by one thread.

    Each worker is a list of operations in its own program order: a producer acquires and publishes its rows,
    a consumer takes and releases its own. `advance` tries a worker's next operation.
    """

    def __init__(self, capacity: int, num_rows: int) -> None:
        schedule = Schedule(1, num_rows, num_targets=2, num_drafters=2)
        self.channels = [channel(capacity, first, stride=2, seconds=0.0) for first in range(2)]
        self.schedule = schedule
        self.held: dict[int, int] = {}  # slot -> row
        self.learned: list[list[int]] = [[], []]
        producers = [
            [step for r in schedule.rows_of_target(p) for step in (("acquire", r), ("publish", r))]
            for p in range(2)
        ]
        consumers = [
            [step for r in schedule.rows_of_drafter(c, 0) for step in (("take", r), ("release", r))]
            for c in range(2)
        ]
        self.programs = producers + consumers
        self.done = [0] * 4

    @property
    def finished(self) -> bool:
        return all(done == len(program) for done, program in zip(self.done, self.programs, strict=True))

    def advance(self, worker: int) -> bool:
        """Do the worker's next operation; False if it would have to wait or has ended."""
        if self.done[worker] == len(self.programs[worker]):
            return False
        kind, index = self.programs[worker][self.done[worker]]
        if not is_ready(lambda: getattr(self, kind)(index)):
            return False
        self.done[worker] += 1
        return True

    def acquire(self, index: int) -> None:
        slot = self._channel(index).acquire(index)
        assert id(slot) not in self.held, f"row {index} got the slot of row {self.held[id(slot)]}"
        self.held[id(slot)] = index
        slot.buffer.fill_(index)

    def publish(self, index: int) -> None:
        self._channel(index).publish(ROWS[index])

    def take(self, index: int) -> None:
        taken, slot = self._channel(index).take(index)
        assert taken.index == index == slot.buffer.item() == self.held[id(slot)]
        self.learned[self.schedule.drafter_of(index)].append(index)

    def release(self, index: int) -> None:
        del self.held[next(slot for slot, held in self.held.items() if held == index)]
        self._channel(index).release()

    def _channel(self, index: int) -> Channel:
        return self.channels[self.schedule.drafter_of(index)]


ROWS = [row(index) for index in range(8)]


def replayed(history: tuple[int, ...], capacity: int, num_rows: int) -> Model:
    model = Model(capacity, num_rows)
    for worker in history:
        assert model.advance(worker)
    return model


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_no_interleaving_of_two_producers_and_two_consumers_deadlocks_or_shares_a_slot(capacity: int):
    """Every reachable state, by replay: where a state is reached from does not matter, so each is visited once."""
    num_rows = 6
    seen: set[tuple[int, ...]] = {(0, 0, 0, 0)}
    frontier: list[tuple[int, ...]] = [()]
    num_ends = 0
    while frontier:
        history = frontier.pop()
        moves = 0
        for worker in range(4):
            model = replayed(history, capacity, num_rows)
            if not model.advance(worker):
                continue
            moves += 1
            if tuple(model.done) not in seen:
                seen.add(tuple(model.done))
                frontier.append((*history, worker))
        if not moves:
            assert replayed(history, capacity, num_rows).finished, f"deadlock after {history}"
            num_ends += 1
    assert num_ends == 1
    assert len(seen) > 60 * capacity


def test_producers_that_run_ahead_cannot_hold_the_slots_of_lower_rows():
    """Five producers, three slots: first come, first served would fill them with rows 1, 2 and 3 while row 0
    is due, and everything would wait for ever."""
    ring = channel(3, seconds=0.0)
    assert is_ready(lambda: ring.acquire(1))
    assert is_ready(lambda: ring.acquire(2))
    assert not is_ready(lambda: ring.acquire(3))
    assert not is_ready(lambda: ring.acquire(4))
    assert is_ready(lambda: ring.acquire(0))


@pytest.mark.parametrize("seed", range(20))
def test_threads_in_any_rhythm_hand_over_every_row_in_order(seed: int):
    draw = random.Random(seed)
    num_producers, num_consumers, num_rows = (*draw.choice([(5, 1), (5, 3), (2, 2), (1, 3)]), 60)
    schedule = Schedule(1, num_rows, num_producers, num_consumers)
    abort = Abort()
    rings = [channel(draw.randint(1, 3), m, num_consumers, abort=abort) for m in range(num_consumers)]
    learned: list[list[float]] = [[] for _ in range(num_consumers)]

    def produce(producer: int) -> None:
        for index in schedule.rows_of_target(producer):
            ring = rings[schedule.drafter_of(index)]
            pause()
            ring.acquire(index).buffer.fill_(index)
            ring.publish(replace(ROWS[0], index=index))

    def consume(consumer: int) -> None:
        for index in schedule.rows_of_drafter(consumer, 0):
            _, slot = rings[consumer].take(index)
            pause()
            learned[consumer].append(slot.buffer.item())
            rings[consumer].release()

    def pause() -> None:
        if draw.random() < 0.2:
            time.sleep(draw.random() * 1e-3)

    threads = [threading.Thread(target=produce, args=(p,), daemon=True) for p in range(num_producers)]
    threads += [threading.Thread(target=consume, args=(c,), daemon=True) for c in range(num_consumers)]
    for thread in draw.sample(threads, len(threads)):
        thread.start()
    for thread in threads:
        thread.join(20)
    assert learned == [list(schedule.rows_of_drafter(c, 0)) for c in range(num_consumers)]


def test_fill_is_the_share_of_slots_with_a_row_nobody_has_taken():
    ring = channel(2)
    assert ring.fill == 0
    ring.acquire(0)
    ring.publish(ROWS[0])
    ring.acquire(1)
    assert ring.fill == 0.5
    ring.take(0)
    assert ring.fill == 0


def test_a_free_slot_that_does_not_come_is_a_stall_that_names_the_row():
    ring = channel(1, first=1, stride=2, seconds=0.05)
    ring.acquire(1)
    with pytest.raises(StallError, match=r"a free slot for row 3 .*stall_timeout_s"):
        ring.acquire(3)


def test_a_row_that_does_not_come_is_a_stall_that_names_it():
    with pytest.raises(StallError, match=r"MainThread waited 0.05 s for row 5 from its target"):
        channel(1, seconds=0.05).take(5)


WAITS: dict[str, Callable[[Channel], object]] = {
    "a producer without a slot": lambda ring: ring.acquire(1),
    "a consumer without a row": lambda ring: ring.take(0),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_an_abort_ends_every_wait_within_a_second(wait: Callable[[Channel], object]):
    abort = Abort()
    ring = channel(1, abort=abort)
    ring.acquire(0)
    ended: list[BaseException] = []

    def work() -> None:
        try:
            wait(ring)
        except AbortedError as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    abort.raise_now()
    thread.join(1)
    assert len(ended) == 1


def test_nobody_goes_on_after_an_abort_even_when_what_it_waited_for_is_there():
    abort = Abort()
    ring = channel(2, abort=abort)
    ring.acquire(0)
    ring.publish(ROWS[0])
    abort.raise_now()
    with pytest.raises(AbortedError):
        ring.take(0)
    with pytest.raises(AbortedError):
        ring.acquire(1)
