"""A whole step as one CUDA graph, or launched; one interface, chosen by the caller.

A replayed graph calls no Python, no Dynamo and no guard, so workers that replay cannot disturb each other's
compilation and need no gate. A graph reads and writes by address: every tensor it touched, inputs, weights,
tables and scalars, has to live and stay in place as long as the graph does. A dropped one is not an error;
the step then computes with whatever took its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from draftline.compiling import gate

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Step(Protocol[T_co]):
    """Something to be done many times, with its inputs and outputs in fixed tensors."""

    @property
    def num_replays(self) -> int:
        """How often `replay` was called."""
        ...

    def replay(self) -> T_co:
        """Do the step once and return its output."""
        ...


class LaunchedStep(Generic[T]):
    """Calls the function each time: on a CPU, or where a step cannot be captured."""

    def __init__(self, step: Callable[[], T]) -> None:
        self._step = step
        self.num_replays = 0

    def replay(self) -> T:
        """Call the function and return what it returned."""
        output = self._step()
        self.num_replays += 1
        return output


class CapturedStep(Generic[T]):
    """One call of a function, recorded as a CUDA graph on the caller's stream, in its own memory pool."""

    def __init__(self, step: Callable[[], T], *, owners: Sequence[object], stream: torch.cuda.Stream) -> None:
        """Record `step` without running it: its tensors change with the first `replay` only.

        Call it inside `gate.compiling` (one capture at a time in a process) and on the thread that replays,
        after the step has run a few times on `stream`, so that nothing compiles, allocates optimizer state
        or starts a library during the capture. The step may not synchronise, read a tensor on the host or
        replace a tensor that the next replay needs (zero gradients in place).

        Args:
            step: the function; what it returns, such as a loss tensor, is what `replay` returns.
            owners: the objects that hold the tensors the step touches; kept alive as long as the graph.
            stream: the worker's stream. The default stream cannot be captured.

        Raises:
            ValueError: no owner is named, or the stream is the default one.
            RuntimeError: the gate is not held, or PyTorch's own error for what cannot be captured.
        """
        gate.require_compiling("capturing a CUDA graph")
        if not owners:
            raise ValueError(
                "a graph reads its tensors by address; name the objects that own them in owners="
            )
        if stream == torch.cuda.default_stream(stream.device):
            raise ValueError(
                f"the default stream of {stream.device} cannot be captured; make a torch.cuda.Stream"
            )
        self.stream = stream
        self.num_replays = 0
        self._owners = (step, *owners)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(stream.device):
            stream.synchronize()
            with torch.cuda.graph(
                self._graph,
                pool=torch.cuda.graph_pool_handle(),
                # Always explicit: the default capture stream is one object for all threads and devices.
                stream=stream,
                # "global" would forbid the other threads to allocate meanwhile.
                capture_error_mode="thread_local",
            ):
                self.output = step()
                """What `replay` returns: the tensors that hold the step's values after each replay."""

    def replay(self) -> T:
        """Enqueue the recorded step on its stream and return its output: always the same tensors, which hold
        this step's values once the stream gets there and until the next replay.
        """
        with torch.cuda.stream(self.stream):
            self._graph.replay()
        self.num_replays += 1
        return self.output
