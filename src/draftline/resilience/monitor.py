"""A parent process that outlives the trainer: it ends a trainer that can no longer speak for itself.

The watchdog (watchdog.py) runs in the trainer and needs its interpreter lock. A call that holds that lock for
ever stops the watchdog too, so the trainer sends a byte now and then through a pipe, and the parent kills it
after twice the stall timeout without one. The parent imports no torch.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from draftline.console import tell
from draftline.errors import INTERRUPTED, INTERRUPTED_CAUSE, ConfigError, Interrupted, StallError
from draftline.resilience.folder import newest_checkpoint
from draftline.resilience.result import RunResult, write_result

VARIABLE = "DRAFTLINE_HEARTBEAT"
"""Environment of the trainer: `<descriptor>:<seconds between beats>`."""
_BEATS_PER_TIMEOUT = 20
_SLICE_S = 0.2
_GRACE_S = 5.0
"""Seconds for a trainer that was told twice to end."""
_STACKS_S = 1.0
"""Seconds for printing stacks."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def run_monitored(
    argv: Sequence[str],
    timeout_s: float,
    folder: Path | None = None,
    failed: Callable[[int, str, str], object] = lambda _code, _error, _cause: None,
) -> int:
    """Run a trainer as a child process and return the exit code of the run. Main thread only.

    Signals are passed on. A child without a heartbeat for `2 * timeout_s` prints its stacks and is killed,
    and so is one that never called `start_heartbeat`.

    Args:
        argv: The trainer's command line.
        timeout_s: The run's stall timeout in seconds.
        folder: Where `result.json` is written when the child could not do it.
        failed: Told exit code, class of error and cause when the child could not say them itself.

    Returns:
        The child's own exit code; 6 (StallError) when it was killed for its silence; 75 or 130 when a SIGTERM
        or SIGINT that was passed on killed it, 1 when another signal did.
    """
    with _Child(argv, timeout_s) as child:
        silent = not child.ends_within(2 * timeout_s)
    if silent:
        cause = (
            f"the trainer gave no sign of life for {2 * timeout_s:g} s (a call holds the interpreter lock) "
            "and was killed; its stacks are above. The last finished checkpoint counts: run the same command "
            "again"
        )
        failed(StallError.exit_code, StallError.__name__, cause)
        return _report(folder, argv, StallError.exit_code, cause)
    if -child.code in child.told:  # a trainer that has just begun has no handler yet, and nothing to save
        code = INTERRUPTED if -child.code == signal.SIGINT else Interrupted.exit_code
        cause = INTERRUPTED_CAUSE.replace("interrupted", f"interrupted by {signal.Signals(-child.code).name}")
        failed(code, Interrupted.__name__, cause)
        return _report(folder, argv, code, cause)
    if child.code < 0:
        cause = _death(signal.Signals(-child.code))
        failed(1, "Killed", cause)
        return _report(folder, argv, 1, cause)
    return child.code


def _report(folder: Path | None, argv: Sequence[str], code: int, cause: str) -> int:
    tell(f"draftline: {cause}")
    if folder is not None and folder.is_dir():
        newest = newest_checkpoint(folder)
        result = RunResult(
            exit_code=code,
            cause=cause,
            error=StallError.__name__ if code == StallError.exit_code else None,
            worker="trainer",
            checkpoint=str(newest) if newest else None,
            command=tuple(argv),
        )
        write_result(folder, result)
    return code


def _death(number: signal.Signals) -> str:
    hint = ""
    if number == signal.SIGKILL:
        hint = " (if nobody sent it, the host ran out of memory: look for 'oom-kill' in `dmesg`)"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        hint = " (a crash in native code, or a file that was cut short while it was mapped)"
    return (
        f"the trainer was killed by {number.name}{hint}. The last finished checkpoint counts: run the same "
        "command again"
    )


class _Child:
    """The trainer, its heartbeat pipe, and signals on their way to it."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self._argv = list(argv)
        self._beat_s = timeout_s / _BEATS_PER_TIMEOUT
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self.told: list[int] = []
        """Signals that were passed on."""
        self._kill_at = float("inf")
        self.code = 0
        """Exit code once the block is left, negative for a signal."""

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        self._pipe, writer = os.pipe()
        # Its own session: a Ctrl-C in the terminal would otherwise reach the child twice and end it at once.
        self._process = subprocess.Popen(  # noqa: S603 - the command line that the user gave
            self._argv,
            env=os.environ | {VARIABLE: f"{writer}:{self._beat_s}"},
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        for number in self._early:
            self._process.send_signal(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.code = self._end()
        os.close(self._pipe)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.told.append(number)
        if len(self.told) > 1:
            # A trainer whose interpreter is stuck cannot obey, and the user has asked twice.
            self._kill_at = time.monotonic() + _GRACE_S
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)

    def ends_within(self, silence_s: float) -> bool:
        """True when the child has ended, False after `silence_s` seconds without a heartbeat."""
        assert self._process is not None
        heard = time.monotonic()
        while self._process.poll() is None:
            if self._beats():
                heard = time.monotonic()
            if time.monotonic() > heard + silence_s:
                return False
            if time.monotonic() > self._kill_at:
                self._process.kill()
        return True

    def _beats(self) -> bool:
        """Whether a heartbeat came within a slice of time."""
        ready, _, _ = select.select([self._pipe], [], [], _SLICE_S)
        if ready and os.read(self._pipe, 4096):
            return True
        if ready:
            time.sleep(_SLICE_S)  # the pipe is closed, so select no longer waits
        return False

    def _end(self) -> int:
        """Leave nothing of the child running."""
        assert self._process is not None
        if self._process.poll() is None:
            # faulthandler prints the stacks without the interpreter lock.
            self._process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STACKS_S)
        with suppress(ProcessLookupError):
            # Its own children would keep memory and devices.
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def start_heartbeat(environment: MutableMapping[str, str]) -> bool:
    """Trainer's side: the first thing that a monitored process does. Nothing happens without a monitor.

    Args:
        environment: `os.environ`; the monitor's variable is taken out, since children are not monitored.

    Returns:
        Whether there is a monitor.

    Raises:
        ConfigError: the variable is not what a monitor sets.
    """
    text = environment.pop(VARIABLE, None)
    if text is None:
        return False
    descriptor, beat_s = _parse(text)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_beat, args=(descriptor, beat_s), name="heartbeat", daemon=True).start()
    return True


def _parse(text: str) -> tuple[int, float]:
    try:
        descriptor, beat_s = text.split(":")
        os.set_inheritable(int(descriptor), False)
        return int(descriptor), float(beat_s)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{VARIABLE}={text!r} was not set by a monitor ({error}); unset it") from None


def _beat(descriptor: int, beat_s: float) -> None:
    try:
        while True:
            os.write(descriptor, b".")
            time.sleep(beat_s)
    except BrokenPipeError:
        # Nobody would end this process if it hung, nor pass signals on: save and stop.
        with suppress(OSError):  # the terminal may have gone with the monitor
            tell("draftline: the monitor died; stopping as for SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)
