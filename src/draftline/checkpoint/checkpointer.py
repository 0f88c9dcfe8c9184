"""Checkpoints in the background: training goes on while one snapshot is written.

One write is in flight. The next call waits for it, with a deadline, and raises what it failed with: a run
never goes on believing in a checkpoint that does not exist.
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from draftline.checkpoint.best import Best, write_best
from draftline.checkpoint.files import CheckpointFileSystem
from draftline.checkpoint.layout import checkpoint_name, steps_in
from draftline.checkpoint.manifest import Identity
from draftline.checkpoint.restore import Loaded, load_latest
from draftline.checkpoint.write import Snapshot, retire, write_checkpoint
from draftline.errors import CheckpointError, DiskFullError, StallError, blame
from draftline.resilience import faults
from draftline.resilience.fsio import disk_failures_explained, make_folders, mib, require_space
from draftline.resilience.watchdog import thread_stacks


class Checkpointer:
    """Saves and restores one run's state in the folder `root`. All calls come from one thread.

    The caller owns the run's folder (folder.py). Use it as a context manager, and call `load_latest` first.
    """

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        keep: int,
        write_timeout_s: float,
        fs: CheckpointFileSystem | None = None,
    ) -> None:
        """Name the folder; nothing is touched yet.

        Args:
            root: Folder of the checkpoints; created when missing.
            identity: What a checkpoint must share with this run to be resumed.
            keep: Newest checkpoints that stay, at least 2.
            write_timeout_s: Seconds that one write may take before the run ends.
            fs: Replaced by tests only.
        """
        assert keep >= 2, "with one checkpoint, a damaged one leaves nothing"
        self._root, self._identity, self._keep = root, identity, keep
        self._write_timeout_s = write_timeout_s
        self._fs = fs or CheckpointFileSystem()
        self._best: Best | None = None
        self._failure: BaseException | None = None
        self._stall: StallError | None = None
        self._thread: threading.Thread | None = None
        self._in_flight, self._deadline = 0, 0.0
        self._ready = False

    def load_latest(self) -> Loaded | None:
        """Clear what a kill left behind and read the newest intact checkpoint, or None for a new run.

        Raises:
            CheckpointError: checkpoints exist but none is intact, or one cannot be read.
            OccupiedError: it belongs to a run with other settings or data (all differing keys are listed).
        """
        with disk_failures_explained(self._root.parent, "creating the folder of checkpoints"):
            make_folders(self._fs, self._root)
        restored = load_latest(self._fs, self._root, self._identity)
        self._best = restored.best
        self._ready = True
        return restored.loaded

    @property
    def best(self) -> Best | None:
        """The checkpoint that `mark_best` chose."""
        return self._best

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, whose bytes were checked at the start or written since; None without one."""
        steps = steps_in(self._root) if self._ready else []
        return self._root / checkpoint_name(steps[-1]) if steps else None

    def require_room(self, size: int) -> None:
        """Refuse a run whose checkpoints of `size` bytes do not fit: those that stay, and the one being written.

        Raises:
            DiskFullError: too little is free.
        """
        missing = max(2, self._keep + 1 - len(steps_in(self._root))) * size
        free = self._fs.free_bytes(self._root)
        if free < missing:
            raise DiskFullError(
                f"{self._root} has {mib(free)} free and this run's checkpoints need {mib(missing)} ({mib(size)} each); "
                "free some space, or choose another output folder"
            )

    def forgive(self) -> None:
        """Go on although the last write found the disk full; its checkpoint does not exist."""
        if isinstance(self._failure, DiskFullError):
            self._failure = None

    def mark_best(self, step: int, figure: float) -> bool:
        """Keep the checkpoint of `step` beyond retention if its evaluation figure is the highest so far.

        Waits for the write in flight, which may be that checkpoint.

        Args:
            step: Optimizer steps of a saved checkpoint.
            figure: Evaluation figure of that state, higher is better (mean acceptance length).

        Returns:
            Whether it is now the best one; False also when it has been retired meanwhile.

        Raises:
            ValueError: the figure is not finite.
            StallError, DiskFullError, CheckpointError: as `wait`, or the disk refused.
        """
        if not math.isfinite(figure):
            raise ValueError(f"evaluation figure {figure} of step {step} is not finite")
        self.wait()
        beaten = self._best is not None and figure <= self._best.figure
        if beaten or step not in steps_in(self._root):
            return False
        best = Best(step=step, figure=figure)
        with disk_failures_explained(self._root, f"marking step {step} as the best"):
            write_best(self._fs, self._root, best)
        self._best = best
        return True

    def save(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot; returns when the previous write is done.

        Args:
            snapshot: State on the host; it must not change before `wait` or the next `save` returns.

        Raises:
            DiskFullError: less than twice the snapshot's size is free, or the previous write filled the disk.
            StallError: the previous write passed its deadline.
            CheckpointError: the previous write failed, the folder is gone, or this step exists already.
            ValueError, TypeError: the snapshot cannot be written (`Snapshot.require_writable`).
        """
        assert self._ready, "load_latest() comes first: it clears what a kill left behind"
        self.wait()
        snapshot.require_writable()
        if not self._root.is_dir():
            raise CheckpointError(
                f"{self._root} is gone: it was removed while the run wrote to it. Put it back if you can, and run "
                "the same command again"
            )
        if any(step >= snapshot.step for step in steps_in(self._root)):
            raise CheckpointError(f"{self._root} already holds step {snapshot.step} or a later one")
        require_space(self._fs, self._root, snapshot.size)
        self._start(snapshot)

    def _start(self, snapshot: Snapshot) -> None:
        self._in_flight = snapshot.step
        self._deadline = time.monotonic() + self._write_timeout_s
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            with disk_failures_explained(self._root, f"writing the checkpoint of step {snapshot.step}"):
                write_checkpoint(self._fs, self._root, snapshot, self._identity)
                faults.point("checkpoint", "retire", snapshot.step)
                retire(self._fs, self._root, self._keep, self._best.step if self._best else None)
        except BaseException as error:  # noqa: BLE001 - raised again by every later call
            blame(error, "checkpoint", snapshot.row)
            self._failure = error

    @property
    def writing(self) -> bool:
        """Whether a snapshot is on its way to the disk. May be asked from any thread."""
        return self._thread is not None and self._thread.is_alive()

    def in_flight(self) -> tuple[int, float] | None:
        """Step that is being written, and seconds until its deadline; None when nothing is."""
        return (self._in_flight, max(0.0, self._deadline - time.monotonic())) if self.writing else None

    def check(self) -> None:
        """Raise what a write has failed with, or that it is past its deadline. Cheap: call it every step.

        Raises:
            StallError, DiskFullError, CheckpointError: as `wait`.
        """
        if self._failure is not None:
            raise self._failure
        if self.writing and time.monotonic() > self._deadline:
            raise self._too_slow()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            StallError: the write passed its deadline.
            DiskFullError, CheckpointError: it failed.
        """
        stall = self._stalled()
        if stall is not None:
            raise stall
        self.check()

    def _stalled(self) -> StallError | None:
        if self._thread is None:
            return None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        return self._too_slow() if self._thread.is_alive() else None

    def _too_slow(self) -> StallError:
        if self._stall is not None:
            return self._stall
        self._stall = StallError(
            f"the checkpoint of step {self._in_flight} was not written within {self._write_timeout_s:g} s; "
            f"is the disk of {self._root} slow or hanging? The previous checkpoint is intact. If the disk is only "
            "slow, raise deadlines.write_timeout_s",
            thread_stacks(),
        )
        blame(self._stall, "checkpoint")
        return self._stall

    def close(self) -> None:
        """Finish the write in flight. Raises as `wait`."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the write in flight; its failure is raised, or noted on the error that ends the run."""
        late = self._stalled() or self._failure
        if late is None or late is error:
            return
        if error is None:
            raise late
        error.add_note(f"and the last checkpoint failed: {late}")
