"""The threads of a run: build every worker inside the gate, seal, let them run, hand events to the main thread.

The main thread never touches a GPU, so that signals, the screen and deadlines are always served.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftline.compiling import gate, tripwire
from draftline.compiling.proof import prepare_profiler
from draftline.compiling.seal import seal, unseal
from draftline.data.feed import RowFeed, RowLoader
from draftline.drafter.supply import ChannelSupply, LocalSupply, Supply
from draftline.drafter.worker import DrafterWorker, StepRecord
from draftline.errors import StallError, blame_of
from draftline.pipeline.build import BuiltDrafter, BuiltTarget, build_drafter, build_target
from draftline.pipeline.channel import Channel, Slot
from draftline.pipeline.devices import Place, Replicas
from draftline.pipeline.job import Job
from draftline.pipeline.reduce import Reducer
from draftline.pipeline.schedule import StopLine
from draftline.pipeline.state import ShardState
from draftline.pipeline.supervise import Abort, Supervisor
from draftline.resilience import faults
from draftline.resilience.watchdog import Watchdog
from draftline.target.worker import TargetWorker

LOADER_THREADS = 2
"""Host threads that build rows; one alone makes about two million tokens a second."""
LEAVE_S = 5.0
"""Seconds that workers get to leave after a failure."""


@dataclass(frozen=True)
class Ready:
    """A worker is built and proved."""

    worker: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    """A drafter has done its last step."""

    index: int
    wait_s: float


@dataclass(frozen=True)
class TargetFinished:
    """A target has done its last row."""

    index: int
    wait_s: float
    rows: int


@dataclass(frozen=True)
class BadStep:
    """A step whose gradient is not finite; its error follows."""

    step: int
    weights: Mapping[str, Tensor]
    """The drafter's compute weights in that step, on the host."""


Event = Ready | StepRecord | ShardState | BadStep | Finished | TargetFinished


class Engine:
    """One training run's workers. `events()` yields what they report until all of them have ended."""

    def __init__(self, job: Job, is_safe: Callable[[], bool] = lambda: True) -> None:
        """`is_safe`: whether the last state that the reader took is where a kill cannot lose it; until then
        drafters wait at the next boundary. Called from any thread."""
        self.job = job
        self.watchdog = Watchdog()
        self.abort = Abort(self.watchdog)
        self.stop_line = StopLine()
        self._supervisor = Supervisor(self.abort)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._replicas = Replicas(job.target)
        self._loader = RowLoader(job.source, self.abort)
        self._go = self.abort.condition()
        self._released = False
        self._is_safe = is_safe
        self._boundary = self.abort.condition()
        self._on_the_way: Counter[int] = Counter()  # steps done -> states that the reader has not dealt with
        # Waits give up later than the watchdog, which tells the cause from those who wait behind it.
        self._wait_s = 2 * job.deadlines.stall_timeout_s
        self._reducer = Reducer(len(job.plan.drafters), self.abort, self._wait_s)
        self._channels: dict[int, Channel] = {}
        self._num_workers = len(job.plan.drafters) + (
            len(job.plan.targets) if job.plan.mode == "split" else 0
        )

    def events(self) -> Iterator[Event | None]:
        """Start everything and yield reports; None about ten times a second when there are none.

        Raises:
            The first failure of any worker.
        """
        try:
            with tripwire.armed():
                self._start()
                yield from self._until_ready()
                self._replicas.release_initial()
                # A CPU run compiles nothing, so the seal would only forbid what others in the process do.
                sealed = seal() if self.job.plan.backend != "sdpa" else None
                try:
                    self._release()
                    yield from self._until_finished()
                    if sealed is not None:
                        sealed.check()
                finally:
                    if sealed is not None:
                        unseal()
        finally:
            self.abort.raise_now()
            self._supervisor.join(LEAVE_S)

    def _start(self) -> None:
        plan = self.job.plan
        if plan.backend != "sdpa":
            prepare_profiler()  # its first start belongs to the main thread
        for index in range(LOADER_THREADS):
            self._supervisor.start(f"loader-{index}", self._loader.run)
        if plan.mode == "split":
            for index, device in enumerate(plan.targets):
                self._supervisor.start(f"target-{index}", partial(self._run_target, index, Place.on(device)))
        for index, device in enumerate(plan.drafters):
            self._supervisor.start(f"drafter-{index}", partial(self._run_drafter, index, Place.on(device)))

    def _until_ready(self) -> Iterator[Event | None]:
        num_ready = 0
        while num_ready < self._num_workers and not self.abort.raised:
            event = self._next_event()
            num_ready += isinstance(event, Ready)
            yield event
            self._require_progress(self.job.deadlines.startup_timeout_s)

    def _until_finished(self) -> Iterator[Event | None]:
        num_drafters = len(self.job.plan.drafters)
        while num_drafters and not self.abort.raised:
            event = self._next_event()
            num_drafters -= isinstance(event, Finished)
            yield event
            self._dealt_with(event)
            self._require_progress(self.job.deadlines.stall_timeout_s)
        while not self._events.empty():
            yield self._events.get_nowait()

    def _next_event(self) -> Event | None:
        try:
            return self._events.get(timeout=0.1)
        except queue.Empty:
            return None

    def _require_progress(self, seconds: float) -> None:
        try:
            self.watchdog.require_progress(seconds, self._depths)
        except StallError as error:
            culprit = blame_of(error)
            self._supervisor.fail(culprit.worker if culprit else "a worker", error)

    def _depths(self) -> str:
        """What lies in the queues."""
        channels = [
            f"drafter-{index}: {channel.fill:.0%} of its slots filled"
            for index, channel in self._channels.items()
        ]
        return "; ".join([*channels, f"rows asked of the loader and not built: {self._loader.num_wanted}"])

    def _dealt_with(self, event: Event | None) -> None:
        with self._boundary:
            if isinstance(event, ShardState):
                self._on_the_way -= Counter({event.steps_done: 1})  # drops what has come to zero
            self._boundary.notify_all()  # also without a state: `is_safe` may have changed

    def _hand_over(self, state: Callable[[], ShardState], steps_done: int) -> None:
        """Give the reader a drafter's state once the one before is safe: a kill then costs two boundaries at most,
        and no more than two states lie in memory."""
        seconds = self.job.deadlines.write_timeout_s
        with self._boundary:
            self.abort.wait(
                self._boundary,
                lambda: self._is_safe() and all(other >= steps_done for other in self._on_the_way),
                2 * seconds,  # the writer has this deadline too, and names the disk
                f"the checkpoint before step {steps_done} to be written",
                patience_s=2 * seconds,
            )
            self._on_the_way[steps_done] += 1
        self._events.put(state())

    def _release(self) -> None:
        with self._go:
            self._released = True
            self._go.notify_all()

    def _line_up(self, name: str, notes: tuple[str, ...]) -> None:
        """Report readiness and wait until every worker is built and the run is sealed."""
        self._events.put(Ready(name, notes))
        with self._go:
            seconds = self.job.deadlines.startup_timeout_s
            self.abort.wait(
                self._go, lambda: self._released, 2 * seconds, "the other workers to start", 2 * seconds
            )

    def _run_target(self, index: int, place: Place) -> None:
        name, job = threading.current_thread().name, self.job
        with place.entered():
            with self._building(name):
                built = build_target(job, self._replicas, place, name)
            self._line_up(name, built.notes)
            channels = [self._channels[m] for m in range(len(job.plan.drafters))]
            worker = TargetWorker(built.forward, built.step, channels, job.schedule, self.abort)
            worker.run(self._feed(job.schedule.rows_of_target(index)))
            place.settle()
        self._events.put(TargetFinished(index, worker.wait_s, worker.rows_done))

    def _run_drafter(self, index: int, place: Place) -> None:
        name, job = threading.current_thread().name, self.job
        with place.entered():
            with self._building(name):
                target = (
                    build_target(job, self._replicas, place, name) if job.plan.mode == "colocated" else None
                )
                shared = target.forward.states if target else None
                built = build_drafter(job, self._replicas, place, name, index, shared)
                self._reducer.join(index, built.member)
                supply = self._supply(index, built, target)
            self._line_up(name, built.notes + (target.notes if target else ()))
            worker = DrafterWorker(
                index,
                supply,
                built.step,
                self._reducer,
                built.member,
                job.schedule,
                job.optim,
                self.stop_line,
                self.watchdog,
                self._events.put,
                job.is_boundary,
                lambda step: self._hand_over(lambda: built.shard_state(step + 1, index), step + 1),
                lambda step: self._events.put(BadStep(step, built.weights())),
            )
            worker.run()
            place.settle()
            built.member.update_place.settle()
        self._events.put(Finished(index, supply.wait_s))

    def _supply(self, index: int, built: BuiltDrafter, target: BuiltTarget | None) -> Supply:
        job = self.job
        if target is not None:
            feed = self._feed(job.schedule.rows_of_target(index))
            return LocalSupply(feed, target.forward, target.step, built.row)
        slots = [Slot(torch.zeros_like(built.states.buffer)) for _ in range(job.plan.channel_slots)]
        first = job.schedule.first_row_of_drafter(index)
        stride = len(job.plan.drafters)
        self._channels[index] = Channel(slots, first, stride, self.abort, self._wait_s)
        return ChannelSupply(self._channels[index], built.row, built.states)

    def _feed(self, indices: Iterator[int]) -> RowFeed:
        return RowFeed(self._loader, indices, self._wait_s)

    @contextmanager
    def _building(self, name: str) -> Iterator[None]:
        row, seconds = self.job.schedule.first_row, self.job.deadlines.startup_timeout_s
        self.watchdog.beat(name, "waiting for its turn to start", row, waiting=True)
        # the gate, too, gives up later than the watchdog, which knows who is inside
        with gate.compiling(name, deadline_s=2 * seconds, check=self.abort.check):
            self.watchdog.beat(name, "starting", row)
            faults.point(name, "start", 0)
            yield
