"""One gate for the process: while anything compiles, nothing else runs compiled code.

PyTorch keeps the state of a trace in process globals, so a thread that merely *calls* a compiled function
while another thread compiles gets an error, or silently runs uncompiled. A lock round each thread's first
call does not help, because the threads that are already warm must stand still too. Hence one
reader/writer gate:

    with gate.compiling("drafter-0", deadline_s=600):   # alone: build, compile, prove, capture
        ...
    with gate.running("drafter-0", deadline_s=60):      # together: call what is already compiled
        ...

It goes round a whole step, never inside one: what autograd calls back (gradient checkpointing recomputes in
autograd's own threads) runs under the gate of the thread that called backward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch._functorch import config as functorch_config

from draftline.compiling.internals import require_no_tracing
from draftline.errors import StallError

POLL_S = 0.05
"""Seconds between two looks at the caller's `check` while a thread waits."""

Mode = Literal["compiling", "running"]


@dataclass(frozen=True)
class Holder:
    """A thread inside the gate."""

    worker: str
    mode: Mode
    since: float
    """`time.monotonic()` at which it entered."""


def _go_on() -> None:
    """The default `check`: nothing ends the wait early."""


class Gate:
    """Either one thread compiles, or any number run. Threads that want to compile go first.

    The state it protects is the process's, so programs use the functions of this module, which share one
    gate; a gate of one's own is for tests.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: dict[int, Holder] = {}  # by thread identifier
        self._num_waiting_to_compile = 0

    @contextmanager
    def compiling(
        self, worker: str, *, deadline_s: float, check: Callable[[], None] = _go_on
    ) -> Iterator[None]:
        """Be the only thread inside: for building, compiling, proving and capturing.

        Backward graphs are lowered here, on the calling thread, together with their forward; PyTorch would
        otherwise lower them at the first backward, in an autograd thread that waits for locks this one holds.

        Args:
            worker: name for messages.
            deadline_s: seconds to wait for the others to leave.
            check: called about 20 times a second while waiting; raises to end the wait, as when another
                worker has failed. Whatever it raises is passed on.

        Raises:
            StallError: the deadline passed; names who is inside.
            AttentionFallbackError: tracing state of the process was set on entering or on leaving.
            RuntimeError: this thread is inside already, or inside a backward pass.
        """
        with self._inside(worker, "compiling", deadline_s, check):
            require_no_tracing(f"{worker} is about to compile")
            # In every thread: this setting is thread-local from PyTorch 2.12 on.
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                yield
            require_no_tracing(f"{worker} has compiled")

    @contextmanager
    def running(
        self, worker: str, *, deadline_s: float, check: Callable[[], None] = _go_on
    ) -> Iterator[None]:
        """Run compiled functions beside other threads that do so, while nothing compiles.

        Args and errors are those of `compiling`, less the AttentionFallbackError.
        """
        with self._inside(worker, "running", deadline_s, check):
            yield

    def require_compiling(self, what: str) -> None:
        """Raise RuntimeError unless the calling thread is inside `compiling`."""
        holder = self._holders.get(threading.get_ident())
        if holder is None or holder.mode != "compiling":
            raise RuntimeError(f"{what} needs the gate; do it inside `with gate.compiling(...)`")

    @contextmanager
    def _inside(
        self, worker: str, mode: Mode, deadline_s: float, check: Callable[[], None]
    ) -> Iterator[None]:
        me = threading.get_ident()
        self._refuse_misuse(me, worker, mode)
        with self._changed:
            self._wait_for_entry(worker, mode, deadline_s, check)
            self._holders[me] = Holder(worker, mode, time.monotonic())
        try:
            yield
        finally:
            with self._changed:
                del self._holders[me]
                self._changed.notify_all()

    def _refuse_misuse(self, me: int, worker: str, mode: Mode) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{worker} asked for gate.{mode} inside a backward pass, where it would wait for the thread "
                "that called backward; put the gate round the whole step, not into a checkpointed function"
            )
        holder = self._holders.get(me)
        if holder is not None:
            raise RuntimeError(
                f"{worker} asked for gate.{mode} in a thread that is inside gate.{holder.mode} as "
                f"{holder.worker}; enter the gate once, round the whole step"
            )

    def _wait_for_entry(self, worker: str, mode: Mode, deadline_s: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + deadline_s
        self._num_waiting_to_compile += mode == "compiling"
        try:
            while not self._is_open(mode):
                check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StallError(
                        f"{worker} waited {deadline_s:g} s for gate.{mode}; {self._occupants()}. Raise the "
                        "deadline if that much compiling is expected"
                    )
                self._changed.wait(min(left, POLL_S))
        finally:
            self._num_waiting_to_compile -= mode == "compiling"
            self._changed.notify_all()  # a waiter that gives up may have held others back

    def _is_open(self, mode: Mode) -> bool:
        if mode == "compiling":
            return not self._holders
        # Those who want to compile go first: busy runners would keep them out for ever.
        compiling = any(holder.mode == "compiling" for holder in self._holders.values())
        return not compiling and not self._num_waiting_to_compile

    def _occupants(self) -> str:
        now = time.monotonic()
        inside = [f"{h.worker} is {h.mode} for {now - h.since:.1f} s" for h in self._holders.values()]
        waiting = f"{self._num_waiting_to_compile} waiting to compile"
        return ", ".join([*inside, waiting])


_PROCESS = Gate()


def compiling(
    worker: str, *, deadline_s: float, check: Callable[[], None] = _go_on
) -> AbstractContextManager[None]:
    """`Gate.compiling` of the process's gate."""
    return _PROCESS.compiling(worker, deadline_s=deadline_s, check=check)


def running(
    worker: str, *, deadline_s: float, check: Callable[[], None] = _go_on
) -> AbstractContextManager[None]:
    """`Gate.running` of the process's gate."""
    return _PROCESS.running(worker, deadline_s=deadline_s, check=check)


def require_compiling(what: str) -> None:
    """`Gate.require_compiling` of the process's gate."""
    _PROCESS.require_compiling(what)
