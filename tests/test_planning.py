"""`draftline plan` and `placement: auto`: configurations in, a placement with figures and reasons out."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftline.cli import app
from draftline.drafter.model import Drafter
from draftline.embedded import embedded_path
from draftline.errors import ConfigError
from draftline.optim import FlatParameters, ShardedAdamW
from draftline.options import PlanOptions
from draftline.paths import builtin_conversations
from draftline.pipeline import planning
from draftline.pipeline.calibrate import random_target
from draftline.pipeline.memory import device_memory
from draftline.pipeline.placement import GIB
from draftline.pipeline.plan import make_plan
from draftline.pipeline.planning import (
    Hardware,
    propose,
    refuse_what_cannot_fit,
    resolve_placement,
    run_costs,
)
from draftline.plan_command import plan_run
from draftline.settings import parse_plan
from draftline.setup import check_target
from draftline.target.forward import decoder_layers
from draftline.target.load import Target, sketch_target

SMALL = ["--rows.token-budget", "256", "--rows.block-budget", "32", "--drafter.num-layers", "2"]
SMALL += ["--drafter.num-taps", "3"]


def given(*flags: str):
    config = parse_plan("builtin:tiny", [*SMALL, *flags])
    return config, check_target(config), sketch_target(config.target)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """A machine with so many GPUs of so much memory; planning only counts them."""

    def have(count: int, memory_bytes: int) -> None:
        properties = SimpleNamespace(total_memory=memory_bytes)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return have


def plan_json(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict:
    app(["plan", "builtin:tiny", *SMALL, *tokens, "--json"], result_action="return_value")
    return json.loads(capsys.readouterr().out)


def test_a_plan_without_a_gpu_ranks_placements_but_claims_no_speed(capsys):
    made = plan_json(capsys, "--devices", "4")
    assert made["source"] == "counted"
    assert made["options"][0]["placement"] == made["chosen"] == "colocated on 4"
    assert all(option["tokens_per_s"] is None for option in made["options"])
    assert made["options"][0]["relative"] == 1.0


def test_gpus_that_are_only_described_are_counted_with_the_types_that_gpus_compute_in():
    config, _, _ = given()
    described = [PlanOptions(devices=2), PlanOptions(memory_gib=139), PlanOptions(tflops=500)]
    for options in described:
        sizes = plan_run(config, options).costs.sizes
        assert (sizes.target_bytes, sizes.drafter_bytes) == (2, 2), options


def test_a_plan_counts_the_type_and_the_slots_that_the_run_asks_for():
    flags = ("--placement.drafter-dtype", "float32", "--placement.channel-slots", "7")
    config, spec, target = given(*flags)
    for kind in ("cpu", "cuda"):
        sizes = propose(config, spec, target, Hardware(2, GIB, kind), timed=False).costs.sizes
        assert (sizes.drafter_bytes, sizes.channel_slots) == (4, 7), kind


def test_a_plan_names_the_placement_of_the_run_in_lines(capsys):
    app(
        ["plan", "builtin:tiny", *SMALL, "--placement.mode=split", "--placement.targets=[cpu, cpu]"],
        result_action="return_value",
    )
    shown = capsys.readouterr().out
    assert "keeps:\n  placement.mode: split\n  placement.targets: cpu, cpu\n" in shown


def test_a_plan_names_the_placement_of_the_run_in_json(capsys):
    made = plan_json(capsys, "--devices", "2", "--placement.attention", "flash", "--drafter.head-dim", "64")
    assert made["asked"] == {"placement.attention": "flash"}
    assert plan_json(capsys, "--devices", "2")["asked"] == {}


def test_a_rate_turns_counts_into_tokens_a_second(capsys):
    one, two = (plan_json(capsys, "--tflops", rate)["options"][0]["tokens_per_s"] for rate in ("1", "2"))
    assert two == pytest.approx(2 * one)


def test_little_memory_forces_a_split(capsys):
    whole = plan_json(capsys, "--devices", "2")["options"]
    both = next(o for o in whole if o["placement"].startswith("colocated"))["target_device_gib"]
    apart = next(o for o in whole if o["placement"] == "split 1 + 1")
    limit = (both + max(apart["target_device_gib"], apart["drafter_device_gib"])) / 2 / 0.93
    made = plan_json(capsys, "--devices", "2", "--memory-gib", str(limit))
    assert made["chosen"] == "split 1 + 1"
    assert "Not usable: colocated on 2 needs" in made["why"]


def test_a_prepared_store_gives_hours(capsys, tmp_path):
    source = builtin_conversations("builtin:demo")
    app(
        ["prepare", source, str(tmp_path / "store"), "--target", "builtin:tiny"],
        result_action="return_value",
    )
    capsys.readouterr()
    arguments = ("--data.path", str(tmp_path / "store"), "--tflops", "1")
    once, twice = (
        plan_json(capsys, *arguments, "--optim.epochs", epochs)["options"][0]["hours"]
        for epochs in ("1", "2")
    )
    assert twice == pytest.approx(2 * once, rel=0.02)


def test_timing_runs_the_real_workers_of_both_sides():
    config, spec, target = given()
    timed = propose(config, spec, target, Hardware(2, GIB, "cpu"), timed=True)
    assert timed.source == "timed"
    assert timed.calibration is not None
    assert timed.times.target_s == timed.calibration.target_s > 0
    assert timed.times.drafter_s > timed.calibration.drafter_s > 0
    assert timed.tokens_per_s(timed.chosen) == pytest.approx(timed.chosen.rows_per_s * timed.tokens_per_row)


def test_sides_that_do_not_fit_together_are_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    config, spec, target = given()
    made: list[Target] = []

    def random_and_kept(*arguments: Any) -> Target:
        made.append(random_target(*arguments))
        return made[-1]

    monkeypatch.setattr(planning, "random_target", random_and_kept)
    monkeypatch.setattr(planning, "_way_to_time", lambda *_: ("apart", None))
    timed = propose(config, spec, target, Hardware(2, GIB, "cpu"), timed=True)
    assert timed.calibration is not None
    assert timed.times.target_s > 0
    assert timed.times.drafter_s > 0
    layers = decoder_layers(made[0].model)[2]
    assert not any(weight.untyped_storage().nbytes() for layer in layers for weight in layer.parameters())


def test_what_a_device_here_cannot_hold_is_not_timed_and_the_plan_says_so(gpus):
    config, spec, target = given()
    costs = run_costs(config, spec, target, make_plan(config.placement))
    both, one = costs.bytes_of("colocated", 1, 1)[0], max(costs.bytes_of("split", 1, 1))
    cuda = torch.device("cuda", 0)
    found = []
    for room in (both, one, one - 2**20):
        gpus(1, int(room / 0.93) + 1)
        found.append(planning._way_to_time(costs, cuda))
    assert [way for way, _ in found] == ["together", "apart", None]
    assert "Nothing was timed: the target needs" in found[2][1]
    assert planning._way_to_time(costs, torch.device("cpu")) == ("together", None)


def test_auto_among_several_gpus_is_decided_by_operations_and_memory(gpus):
    config, spec, target = given()
    gpus(2, GIB)
    placed = resolve_placement(config, spec, target)
    assert (placed.mode, placed.drafters) == ("colocated", ("cuda:0", "cuda:1"))
    plan = make_plan(placed)
    both = run_costs(config, spec, target, plan).bytes_of("colocated", 2, 2)[0]
    gpus(2, int(both * 0.96 / 0.93))
    placed = resolve_placement(config, spec, target)
    assert (placed.mode, placed.targets, placed.drafters) == ("split", ("cuda:0",), ("cuda:1",))


@pytest.mark.parametrize(
    "flags",
    [("--placement.mode", "split"), ("--placement.drafters", "cuda:1"), ("--placement.targets", "cuda:0")],
)
def test_a_placement_that_names_anything_is_left_as_it_is(gpus, flags):
    config, spec, target = given(*flags)
    gpus(4, GIB)
    assert resolve_placement(config, spec, target) == config.placement


def test_what_cannot_fit_is_refused_with_its_largest_parts(gpus):
    config, spec, target = given()
    gpus(1, 2**20)
    with pytest.raises(ConfigError, match=r"cuda:0 has 0\.000977 GiB.*needs .* GiB there \(.*Lower"):
        refuse_what_cannot_fit(config, spec, target, make_plan(config.placement))
    gpus(1, 100 * GIB)
    refuse_what_cannot_fit(config, spec, target, make_plan(config.placement))


def test_workers_of_one_device_share_what_is_only_read():
    config, spec, target = given()
    costs = run_costs(config, spec, target, make_plan(config.placement))

    def used(targets: list[str], drafters: list[str]):
        return device_memory(targets, drafters, costs.target, costs.drafter, costs.sizes, split=True)

    one, two = used(["a"], ["b"]), used(["a", "a"], ["b", "b"])
    assert one["a"].parts["target weights"] == two["a"].parts["target weights"]
    assert one["b"].parts["target's head"] == two["b"].parts["target's head"]
    assert 2 * one["a"].parts["target states"] == two["a"].parts["target states"]
    assert one["b"].parts["masters and moments"] == two["b"].parts["masters and moments"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_drafters", [1, 2])
def test_weights_masters_and_moments_are_counted_as_they_are_allocated(dtype: str, num_drafters: int):
    config, spec, target = given("--placement.drafter-dtype", dtype)
    costs = run_costs(config, spec, target, make_plan(config.placement))
    counted = device_memory(["a"], ["b"] * num_drafters, costs.target, costs.drafter, costs.sizes, split=True)
    parameters = FlatParameters(Drafter(spec), num_drafters, getattr(torch, dtype))
    optimizer = ShardedAdamW(parameters, 0, num_drafters, config.optim)
    own = [parameters.weights, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.rest]
    allocated = num_drafters * sum(tensor.nbytes for tensor in own if tensor is not None)
    parts = counted["b"].parts
    assert parts["drafter weights"] + parts["masters and moments"] == pytest.approx(allocated, rel=1e-3)


def test_a_head_in_another_type_than_the_targets_is_counted():
    kinds = (("float32", "float32", 0), ("bfloat16", "float32", 1), ("bfloat16", "float16", 1))
    for dtype, target_dtype, copies in kinds:
        config, spec, target = given("--placement.drafter-dtype", dtype, "--target.dtype", target_dtype)
        costs = run_costs(config, spec, target, make_plan(config.placement))
        used = device_memory(["a"], ["b"], costs.target, costs.drafter, costs.sizes, split=True)
        assert (
            used["b"].parts["head in the drafter's type"]
            == copies * target.head.numel() * costs.sizes.drafter_bytes
        )


def test_a_run_file_is_planned_as_it_would_be_trained(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "target: {path: builtin:tiny}\ndata: {path: store}\noutput: out\noptim: {steps: 7}\n",
        encoding="utf-8",
    )
    assert parse_plan(str(path), ["--seed", "3"]).optim.steps == 7
    assert parse_plan("builtin:tiny", ["--optim.steps=9"]).optim.steps == 9


def test_planning_reads_no_weights(monkeypatch, capsys):
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("a weight was read"))
    assert planning.hardware_here().kind in ("cpu", "cuda")
    plan_json(capsys)


def test_a_target_with_code_of_its_own_is_planned_once_it_may_run(tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(embedded_path("tiny"), folder)
    (folder / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
        "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    described = json.loads((folder / "config.json").read_text())
    described |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(described))
    allowed = ["--target.trust-remote-code", "--target.revision", "0" * 40]
    config = parse_plan(str(folder), [*SMALL, *allowed])
    planned = propose(
        config, check_target(config), sketch_target(config.target), Hardware(2, GIB, "cpu"), timed=True
    )
    builtin, spec, target = given()
    expected = propose(builtin, spec, target, Hardware(2, GIB, "cpu"), timed=False)
    assert planned.costs == expected.costs
    with pytest.raises(ConfigError, match="trust_remote_code"):
        check_target(parse_plan(str(folder), SMALL))
