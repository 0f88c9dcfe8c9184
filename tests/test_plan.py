"""Where a run's workers go: every `auto` is decided once, and what cannot work is refused before anything loads."""

from __future__ import annotations

import os

import pytest
import torch

from draftline.config import PlacementConfig
from draftline.errors import ConfigError
from draftline.pipeline.plan import Plan, available_devices, make_plan

CPU = torch.device("cpu")


def gpus(*indices: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", index) for index in indices)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine with so many GPUs; planning only counts them."""

    def have(num_gpus: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)

    return have


def plan(**settings: object) -> Plan:
    return make_plan(PlacementConfig.model_validate(settings))


def test_a_machine_without_gpus_trains_on_its_cpu_in_turns(machine):
    machine(0)
    made = plan()
    assert (made.mode, made.targets, made.drafters) == ("colocated", (CPU,), (CPU,))
    assert (made.backend, made.drafter_dtype) == ("sdpa", torch.float32)
    assert available_devices() == (CPU,)


def test_one_gpu_is_colocated_and_computes_in_bfloat16_with_flex(machine):
    machine(1)
    made = plan()
    assert (made.mode, made.targets, made.drafters) == ("colocated", gpus(0), gpus(0))
    assert (made.backend, made.drafter_dtype) == ("flex", torch.bfloat16)


@pytest.mark.parametrize(
    ("num_gpus", "targets", "drafters"),
    [(2, gpus(0), gpus(1)), (3, gpus(0, 1), gpus(2)), (8, gpus(0, 1, 2, 3), gpus(4, 5, 6, 7))],
)
def test_several_gpus_are_split_with_the_odd_one_for_the_target(machine, num_gpus, targets, drafters):
    machine(num_gpus)
    made = plan()
    assert (made.mode, made.targets, made.drafters) == ("split", targets, drafters)


def test_named_devices_are_taken_as_named_and_may_repeat(machine):
    machine(8)
    made = plan(targets=["cuda:0", "cuda:0", "cuda:3"], drafters=["cuda:5"])
    assert (made.mode, made.targets, made.drafters) == ("split", gpus(0, 0, 3), gpus(5))


def test_a_side_that_is_not_named_takes_what_the_other_leaves(machine):
    machine(4)
    assert plan(drafters=["cuda:0"]).targets == gpus(1, 2, 3)
    assert plan(targets=["cuda:1", "cuda:2"]).drafters == gpus(0, 3)
    assert plan(targets=["cuda:0", "cuda:1", "cuda:2", "cuda:3"]).drafters == gpus(0, 1, 2, 3)


def test_workers_may_share_one_cpu_in_a_split(machine):
    machine(0)
    made = plan(mode="split", targets=["cpu"] * 5, drafters=["cpu"] * 3)
    assert (made.targets, made.drafters) == ((CPU,) * 5, (CPU,) * 3)
    assert made.cpu_threads == max(1, (os.cpu_count() or 1) // 8)
    assert plan(mode="split").targets == (CPU,)


def test_colocated_workers_need_one_list_only(machine):
    machine(4)
    made = plan(mode="colocated", drafters=["cuda:1", "cuda:3"])
    assert made.targets == made.drafters == gpus(1, 3)
    assert plan(mode="colocated").drafters == gpus(0, 1, 2, 3)


def test_colocated_lists_that_differ_are_refused(machine):
    machine(2)
    with pytest.raises(ConfigError, match=r"placement\.targets and placement\.drafters differ; name one"):
        plan(mode="colocated", targets=["cuda:0"], drafters=["cuda:1"])


@pytest.mark.parametrize(("num_gpus", "name"), [(0, "cuda:0"), (2, "cuda:2"), (2, "cuda:7"), (0, "cuda")])
def test_more_devices_than_the_machine_has_are_refused_by_name(machine, num_gpus: int, name: str):
    machine(num_gpus)
    with pytest.raises(
        ConfigError, match=f"asks for {name}, but this machine has {num_gpus} CUDA devices; use"
    ):
        plan(mode="split", targets=["cpu" if num_gpus == 0 else "cuda:0"], drafters=[name])


@pytest.mark.parametrize("name", ["gpu0", "cuda:x", "", "tpu:0"])
def test_a_name_that_is_no_device_is_refused(machine, name: str):
    machine(2)
    with pytest.raises(ConfigError, match=r"write cpu, or cuda:0|asks for tpu"):
        plan(targets=[name], drafters=["cuda:0"])


def test_cpu_and_gpu_do_not_mix(machine):
    machine(2)
    with pytest.raises(ConfigError, match="placement mixes cpu and cuda; use devices of one kind"):
        plan(targets=["cuda:0"], drafters=["cpu"])


def test_flex_on_a_cpu_is_refused(machine):
    machine(0)
    with pytest.raises(
        ConfigError, match=r"flex cannot train on a CPU .*attention: sdpa or auto; .* plan .*--devices"
    ):
        plan(attention="flex")


def test_dense_attention_on_a_gpu_is_refused(machine):
    machine(1)
    with pytest.raises(ConfigError, match=r"sdpa is the CPU's backend: .*attention: flex or auto"):
        plan(attention="sdpa")


def test_the_compute_type_can_be_asked_for(machine):
    machine(1)
    assert plan(drafter_dtype="float32").drafter_dtype == torch.float32


def test_float8_linear_maps_are_for_gpus_and_emulated_ones_for_cpus(machine):
    machine(0)
    assert plan(drafter_linears="float8_emulated").linears == "float8_emulated"
    with pytest.raises(
        ConfigError, match=r"float8 needs a GPU: .*use float8_emulated .*or leave it out; .*--devices"
    ):
        plan(drafter_linears="float8")
    machine(1)
    assert plan(drafter_linears="float8").linears == "float8"
    with pytest.raises(ConfigError, match=r"float8_emulated is for a CPU: .*use float8, or leave it out"):
        plan(drafter_linears="float8_emulated")


def test_the_plan_says_what_linear_maps_multiply_in_unless_it_is_the_drafters_type(machine):
    machine(1)
    assert "linears     products in float8" in "\n".join(plan(drafter_linears="float8").describe())
    assert "linears" not in "\n".join(plan().describe())


def test_the_plan_says_where_and_how_in_lines(machine):
    machine(8)
    lines = "\n".join(plan(targets=["cuda:0", "cuda:0"], drafters=["cuda:1", "cuda:2"]).describe())
    assert "targets on 2 x cuda:0, drafters on cuda:1, cuda:2" in lines
    assert "flex: compiled block-sparse flex_attention" in lines
    assert "bfloat16, masters in float32" in lines
