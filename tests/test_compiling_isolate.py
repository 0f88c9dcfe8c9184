"""Workers that compile the same function share nothing."""

import shutil

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._inductor.graph import GraphLowering

from draftline.compiling import cache_entries, compile_isolated, isolated_code


def scaled(x: torch.Tensor, factor: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
    return x * factor + shift


def test_a_copy_computes_the_same_with_the_same_defaults_and_another_code_object() -> None:
    copy = isolated_code(scaled, "drafter-0")
    assert copy(torch.ones(1)).item() == scaled(torch.ones(1)).item() == 3.0
    assert copy.__code__ is not scaled.__code__
    assert copy.__name__ == "scaled_drafter_0"


def test_a_copy_of_a_closure_sees_the_same_variables() -> None:
    state = {"factor": 2}

    def times(x: int) -> int:
        return x * state["factor"]

    copy = isolated_code(times, "w")
    state["factor"] = 5
    assert copy(2) == 10


def test_a_bound_method_stays_bound_to_its_object() -> None:
    linear = torch.nn.Linear(2, 1)
    x = torch.ones(1, 2)
    assert torch.equal(isolated_code(linear.forward, "w")(x), linear(x))


def test_a_module_has_no_code_to_copy() -> None:
    with pytest.raises(TypeError, match="give a Python function or a bound method"):
        isolated_code(torch.nn.Linear(2, 1), "w")


def test_each_worker_holds_its_own_compilations() -> None:
    first = compile_isolated(scaled, "a", backend="eager")
    second = compile_isolated(scaled, "b", backend="eager")
    first(torch.ones(3))
    first(torch.ones(4))
    second(torch.ones(3))
    assert (cache_entries(first), cache_entries(second)) == (2, 1)


def test_a_graph_break_is_an_error_and_no_slower_path() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        print(x)
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(Unsupported):
        compile_isolated(breaks, "w", backend="eager")(torch.ones(2))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_chooses_kernels_without_timing_them_forward_and_backward(monkeypatch):
    lowered = []
    run = GraphLowering.run

    def noting(graph: GraphLowering, *args: object) -> object:
        lowered.append(torch._inductor.config.deterministic)
        return run(graph, *args)

    monkeypatch.setattr(GraphLowering, "run", noting)
    monkeypatch.setattr(
        torch._inductor.config, "force_disable_caches", True
    )  # or an earlier test did the work
    compiled = compile_isolated(lambda x: (x.softmax(-1) * x).sum(), "timed")
    compiled(torch.randn(4, 64, requires_grad=True)).backward()
    assert lowered == [True, True]
    assert not torch._inductor.config.deterministic
