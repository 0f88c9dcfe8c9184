"""The gate: one thread compiles or many run, every wait ends, and leftovers of a trace are noticed."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch.fx import _symbolic_trace as symbolic_trace
from torch.utils.checkpoint import checkpoint

from draftline.compiling import compilations, compile_isolated, gate
from draftline.compiling.gate import Gate
from draftline.errors import AttentionFallbackError, StallError
from draftline.pipeline.supervise import Abort, AbortedError

SOON = 10.0
"""Seconds in which a thread that is not stuck gets anything done on a busy machine."""


def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight).square().mean()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Visit:
    """A thread that stays inside a gate until told to leave."""

    def __init__(self, threads: ThreadPoolExecutor, enter: Callable[[], object]) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.done: Future[None] = threads.submit(self._stay, enter)

    def _stay(self, enter: Callable[[], object]) -> None:
        with enter():  # type: ignore[attr-defined]
            self.inside.set()
            assert self.leave.wait(SOON)

    def end(self) -> None:
        self.leave.set()
        self.done.result(SOON)


def test_while_one_thread_compiles_no_other_runs_or_compiles(threads: ThreadPoolExecutor) -> None:
    own = Gate()
    first = Visit(threads, lambda: own.compiling("a", deadline_s=SOON))
    assert first.inside.wait(SOON)
    runner = Visit(threads, lambda: own.running("b", deadline_s=SOON))
    second = Visit(threads, lambda: own.compiling("c", deadline_s=SOON))
    assert not runner.inside.wait(0.2)
    assert not second.inside.is_set()
    first.end()
    second.inside.wait(SOON)
    second.end()
    runner.inside.wait(SOON)
    runner.end()


def test_threads_that_run_do_so_together(threads: ThreadPoolExecutor) -> None:
    own = Gate()
    visits = [Visit(threads, lambda: own.running("r", deadline_s=SOON)) for _ in range(3)]
    assert all(visit.inside.wait(SOON) for visit in visits)
    for visit in visits:
        visit.end()


def test_a_thread_that_wants_to_compile_goes_before_those_that_want_to_run(
    threads: ThreadPoolExecutor,
) -> None:
    own = Gate()
    running = Visit(threads, lambda: own.running("a", deadline_s=SOON))
    assert running.inside.wait(SOON)
    compiling = Visit(threads, lambda: own.compiling("b", deadline_s=SOON))
    _until(lambda: own._num_waiting_to_compile == 1)
    late = Visit(threads, lambda: own.running("c", deadline_s=SOON))
    assert not late.inside.wait(0.2)
    running.end()
    assert compiling.inside.wait(SOON)
    assert not late.inside.is_set()
    compiling.end()
    assert late.inside.wait(SOON)
    late.end()


def test_a_wait_past_its_deadline_names_who_is_inside(threads: ThreadPoolExecutor) -> None:
    own = Gate()
    holder = Visit(threads, lambda: own.compiling("drafter-0", deadline_s=SOON))
    assert holder.inside.wait(SOON)
    with (
        pytest.raises(
            StallError, match=r"drafter-1 waited 0.1 s for gate.running; drafter-0 is compiling for"
        ),
        own.running("drafter-1", deadline_s=0.1),
    ):
        pass
    holder.end()


def test_a_thread_that_gives_up_compiling_no_longer_holds_back_the_others(
    threads: ThreadPoolExecutor,
) -> None:
    own = Gate()
    running = Visit(threads, lambda: own.running("a", deadline_s=SOON))
    assert running.inside.wait(SOON)
    with pytest.raises(StallError), own.compiling("b", deadline_s=0.05):
        pass
    with own.running("c", deadline_s=0.05):
        pass
    running.end()


def test_an_abort_ends_the_wait_at_once_with_the_callers_own_error(threads: ThreadPoolExecutor) -> None:
    own, abort = Gate(), Abort()
    holder = Visit(threads, lambda: own.compiling("a", deadline_s=SOON))
    assert holder.inside.wait(SOON)
    waiter = Visit(threads, lambda: own.running("b", deadline_s=600, check=abort.check))
    assert not waiter.inside.wait(0.1)
    abort.raise_now()
    with pytest.raises(AbortedError):
        waiter.done.result(SOON)
    holder.end()


def test_a_failure_inside_lets_the_next_thread_in() -> None:
    own = Gate()
    with pytest.raises(KeyError), own.compiling("a", deadline_s=1):
        raise KeyError("failed to build")
    with own.compiling("b", deadline_s=1):
        pass


@pytest.mark.parametrize("inner", ["compiling", "running"])
@pytest.mark.parametrize("outer", ["compiling", "running"])
def test_entering_twice_in_one_thread_is_an_error_and_no_deadlock(outer: str, inner: str) -> None:
    own = Gate()
    enter = {"compiling": own.compiling, "running": own.running}
    with (
        enter[outer]("a", deadline_s=600),
        pytest.raises(RuntimeError, match=f"gate.{inner} in a thread that is inside gate.{outer} as a"),
        enter[inner]("a-again", deadline_s=600),
    ):
        pass


def test_the_gate_inside_a_checkpointed_function_is_an_error_and_no_deadlock() -> None:
    own = Gate()

    def layer(x: torch.Tensor) -> torch.Tensor:
        with own.running("layer", deadline_s=600):
            return x.sin()

    x = torch.ones(4, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        y.sum().backward()


def test_a_step_with_checkpointing_compiles_inside_the_gate_and_recomputes_without_it() -> None:
    compiled = compile_isolated(loss, "checkpointed", backend="aot_eager")
    x, weight = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    with gate.compiling("a", deadline_s=1), compilations() as seen:
        for _ in range(2):
            y = checkpoint(compiled, x, weight, use_reentrant=False)
            assert isinstance(y, torch.Tensor)
            y.backward()
    assert len(seen) == 1


def test_inside_the_gate_the_backward_is_lowered_with_its_forward() -> None:
    lazy = torch.compile(loss, backend="aot_eager", fullgraph=True)
    gated = compile_isolated(loss, "gated", backend="aot_eager")
    x, weight = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    with compilations() as seen:
        lazy(x, weight).backward()
    assert [c.trigger for c in seen] == ["dynamo", "lazy_backward"]
    with gate.compiling("a", deadline_s=1), compilations() as seen:
        gated(x, weight).backward()
    assert [c.trigger for c in seen] == ["dynamo"]


class Hold(torch.nn.Module):
    """A module whose trace by FX takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.traced, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.traced.set()
        assert self.go_on.wait(SOON)
        return x + 1


def test_without_the_gate_a_trace_in_one_thread_breaks_a_warm_function_in_another(
    threads: ThreadPoolExecutor,
) -> None:
    warm, x, weight = _warm("broken")
    hold = Hold()
    trace = threads.submit(torch.fx.symbolic_trace, hold)
    assert hold.traced.wait(SOON)
    try:
        with pytest.raises(RuntimeError, match="FX to symbolically trace a dynamo-optimized function"):
            warm(x, weight)
    finally:
        hold.go_on.set()
        trace.result(SOON)
    warm(x, weight)


def test_with_the_gate_the_warm_function_waits_for_the_trace_and_works(threads: ThreadPoolExecutor) -> None:
    warm, x, weight = _warm("safe")
    hold = Hold()

    def trace() -> None:
        with gate.compiling("tracer", deadline_s=SOON):
            torch.fx.symbolic_trace(hold)

    def run() -> float:
        with gate.running("runner", deadline_s=SOON):
            return warm(x, weight).item()

    tracing = threads.submit(trace)
    assert hold.traced.wait(SOON)
    running = threads.submit(run)
    time.sleep(0.2)
    assert not running.done()
    hold.go_on.set()
    tracing.result(SOON)
    assert running.result(SOON) == pytest.approx(loss(x, weight).item())


def test_a_trace_outside_the_gate_is_noticed_on_entering(threads: ThreadPoolExecutor) -> None:
    hold = Hold()
    trace = threads.submit(torch.fx.symbolic_trace, hold)
    assert hold.traced.wait(SOON)
    try:
        with (
            pytest.raises(AttentionFallbackError, match="a is about to compile: the FX tracing flag is set"),
            gate.compiling("a", deadline_s=1),
        ):
            pass
    finally:
        hold.go_on.set()
        trace.result(SOON)


def test_tracing_state_left_behind_is_noticed_on_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    with (  # noqa: PT012 - what is inside is the leftover itself
        pytest.raises(AttentionFallbackError, match=r"a has compiled: .*__call__ is replaced by a tracer"),
        gate.compiling("a", deadline_s=1),
    ):
        monkeypatch.setattr(symbolic_trace, "_is_fx_tracing_flag", True)
        monkeypatch.setattr(torch.nn.Module, "__call__", lambda module, *args: module.forward(*args))


def test_the_first_failure_is_not_hidden_by_the_state_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), gate.compiling("a", deadline_s=1):  # noqa: PT012
        monkeypatch.setattr(symbolic_trace, "_is_fx_tracing_flag", True)
        raise KeyError("the cause")


def _warm(label: str) -> tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]:
    compiled = compile_isolated(loss, label, backend="aot_eager")
    x, weight = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    with gate.compiling(label, deadline_s=1):
        compiled(x, weight)
    return compiled, x, weight


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)
