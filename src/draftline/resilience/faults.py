"""Faults on demand: named points in the code that do nothing unless a test armed them.

    with armed(Fault(worker="drafter-1", where="step", at=10, kind="raise")) as plan:
        run(...)
    assert plan.fired

A process under test is armed by `DRAFTLINE_FAULTS='[{"worker": ..., "where": ..., "at": ..., "kind": ...}]'`,
which the command line reads with `arm_from_environment`. (The form of torchft's EventInjector.)
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from draftline.config import Frozen
from draftline.errors import ConfigError

VARIABLE = "DRAFTLINE_FAULTS"


class InjectedFaultError(Exception):
    """What a fault of kind `raise` raises: an error that no code expects."""


class Fault(Frozen):
    """One fault; it fires once, when its point is passed."""

    worker: str
    """Worker that fails, such as `drafter-1`, `target-0` or `checkpoint`."""
    where: str
    """Name of the point inside that worker, such as `step`."""
    at: int = Field(ge=0)
    """Step or row at which it fires."""
    kind: Literal["raise", "nan", "sleep", "spin", "poison", "hang", "oom", "kill", "terminate", "enospc"]
    """raise: an unexpected error; nan: fills the tensor given to the point; sleep: waits; spin: keeps the tensor's
    device busy; poison: fails an assertion on the tensor's device, after which CUDA refuses everything; hang:
    waits in C for ever and holds the interpreter lock; oom: device out of memory; kill: SIGKILL to this process;
    terminate: SIGTERM to it; enospc: a full disk."""
    seconds: int = Field(default=3600, ge=1)
    """Seconds of `sleep` and `spin`; a sleep ends with its plan, so that it cannot wake inside another one."""


class FaultPlan:
    """Armed faults, each of which fires once."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._lock = threading.Lock()
        self._waiting = list(faults)
        self.fired: list[Fault] = []
        """Faults that have happened, in order."""
        self.over = threading.Event()
        """Set when the plan is disarmed."""

    def take(self, worker: str, where: str, at: int) -> Fault | None:
        """The fault that is due at this point, now counted as fired."""
        with self._lock:
            for fault in self._waiting:
                if (fault.worker, fault.where, fault.at) == (worker, where, at):
                    self._waiting.remove(fault)
                    self.fired.append(fault)
                    return fault
        return None


_plan: FaultPlan | None = None


def point(worker: str, where: str, at: int, tensor: Tensor | None = None) -> None:
    """Pass a named point: nothing happens unless a fault is armed for it.

    Args:
        worker: Name of the worker that runs.
        where: Name of the point.
        at: Step or row.
        tensor: Filled with NaN in place by a `nan` fault.
    """
    plan = _plan
    if plan is None:
        return
    fault = plan.take(worker, where, at)
    if fault is not None:
        _happen(fault, plan.over, tensor)


def _happen(fault: Fault, over: threading.Event, tensor: Tensor | None) -> None:
    name = f"injected at {fault.worker}.{fault.where}({fault.at})"
    match fault.kind:
        case "raise":
            raise InjectedFaultError(name)
        case "nan":
            assert tensor is not None, f"{name}: this point has no tensor to fill"
            tensor.fill_(float("nan"))
        case "sleep":
            over.wait(fault.seconds)
        case "spin":
            assert tensor is not None, f"{name}: this point has no tensor on a device"
            _spin(tensor, fault.seconds)
        case "poison":
            assert tensor is not None, f"{name}: this point has no tensor on a device"
            torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
                torch.zeros((), device=tensor.device), name
            )
        case "hang":
            _hold_the_interpreter_lock()
        case "oom":
            raise torch.OutOfMemoryError(name)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def _spin(tensor: Tensor, seconds: int) -> None:
    if not tensor.is_cuda:
        time.sleep(seconds)
        return
    for _ in range(seconds):
        torch.cuda._sleep(2_000_000_000)  # clock cycles, about a second


def _hold_the_interpreter_lock() -> None:
    """Lock a mutex twice. Unlike a sleep, that is not cut short by a signal; PyDLL keeps the lock."""
    mutex = ctypes.create_string_buffer(128)  # zeros are an unlocked pthread_mutex_t
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@contextmanager
def armed(*faults: Fault) -> Iterator[FaultPlan]:
    """Arm faults in this process for the duration of the block."""
    global _plan  # noqa: PLW0603 - one process, one plan: the points must cost one comparison
    before, _plan = _plan, FaultPlan(faults)
    plan = _plan
    try:
        yield plan
    finally:
        _plan = before
        plan.over.set()


def arm_from_environment(environment: Mapping[str, str]) -> FaultPlan | None:
    """Arm the faults of `DRAFTLINE_FAULTS` for the life of the process.

    Raises:
        ConfigError: the variable is not a JSON list of faults.
    """
    global _plan  # noqa: PLW0603 - see `armed`
    text = environment.get(VARIABLE)
    if text is None:
        return None
    _plan = FaultPlan(parse_faults(text))
    return _plan


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read a JSON list of faults strictly.

    Raises:
        ConfigError: not JSON, not a list, an unknown key or kind.
    """
    try:
        return TypeAdapter(tuple[Fault, ...]).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{VARIABLE}: {where}: {first['msg']}; it is a JSON list of faults") from None
