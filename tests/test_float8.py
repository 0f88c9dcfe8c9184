"""The drafter's linear maps in float8: close to ordinary ones and not equal, and nothing else of a run is different.

On a CPU the rounding is emulated; what a GPU does with it is in tests/gpu/pipeline.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftline.checkpoint.layout import checkpoint_name
from draftline.config import Linears, OptimConfig
from draftline.console import Screen
from draftline.drafter.float8 import refuse_float8, set_linears
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError, NonFiniteError
from draftline.optim import FlatParameters
from draftline.pipeline.costs import DrafterCost
from draftline.pipeline.engine import Engine, Ready
from draftline.pipeline.memory import Sizes, drafter_worker
from draftline.resilience.faults import Fault, armed
from draftline.run import train
from draftline.serving.importing import load_drafter
from draftline.settings import parse_run
from tests.marks import needs_torchao
from tests.oracles.tiny import packed_row, random_drafter, row_hidden, tiny_spec
from tests.pipeline_fixtures import make_job, run_job
from tests.test_cli import SETTINGS as CLI_SETTINGS

ROOT = Path(__file__).resolve().parents[1]
EMULATED: Linears = "float8_emulated"
SETTINGS = [*(flag for flag in CLI_SETTINGS if "every" not in flag), "--checkpoint.every=2"]


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).detach().norm() / right.detach().norm())


def in_float8(drafter: Drafter) -> Drafter:
    set_linears(drafter, EMULATED)
    return drafter


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_of_a_maps_three_products_is_rounded_a_little(dtype: torch.dtype):
    drafter = random_drafter(tiny_spec(), dtype=dtype)
    weight, generator = drafter.fc.weight, torch.Generator().manual_seed(0)
    x = torch.randn(48, drafter.fc.in_features, generator=generator).to(dtype).requires_grad_()
    slope = torch.randn(48, drafter.fc.out_features, generator=generator).to(dtype)

    def products() -> list[Tensor]:
        output = drafter.fc(x)
        return [output, *torch.autograd.grad(output, [x, weight], slope)]

    exact, rounded = products(), (in_float8(drafter), products())[1]

    # 3 bits of mantissa forward, 2 in the gradient: a sixteenth and an eighth at most of each operand
    for product, plain, most in zip(rounded, exact, (0.06, 0.12, 0.12), strict=True):
        assert product.dtype == dtype
        assert 0.005 < distance(product, plain) < most


@needs_torchao
def test_the_drafters_gradients_point_where_they_did():
    drafter = random_drafter(tiny_spec(), dtype=torch.float32)
    row = packed_row(drafter.spec, (17, 9, 14), [1, 7, 16, 17, 20, 26, 33, 39], num_padding=3)
    row = replace(row, taps=row.taps.float(), block_embeds=row.block_embeds.float())

    def gradients() -> dict[str, Tensor]:
        named = dict(drafter.named_parameters())
        found = torch.autograd.grad(row_hidden(drafter, row).square().sum(), list(named.values()))
        return dict(zip(named, found, strict=True))

    exact, rounded = gradients(), (in_float8(drafter), gradients())[1]

    for name, gradient in rounded.items():
        similar = torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)
        assert 0.9 < similar < 1 - 1e-6, name


@needs_torchao
def test_parameters_stay_the_very_same_objects_and_views_of_the_flat_tensor():
    drafter = random_drafter(tiny_spec(), dtype=torch.float32)
    before = dict(drafter.named_parameters())
    count = set_linears(drafter, EMULATED)
    parameters = FlatParameters(drafter, 1, torch.float32)

    after = dict(drafter.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert count == 7 * drafter.spec.num_layers + 1
    assert type(drafter.fc) is not nn.Linear
    assert drafter.fc.weight.untyped_storage().data_ptr() == parameters.weights.untyped_storage().data_ptr()


@needs_torchao
def test_a_step_compiles_into_one_graph_without_a_break():
    drafter = in_float8(random_drafter(tiny_spec(), dtype=torch.float32))
    row = packed_row(drafter.spec, (17, 9, 14), [1, 7, 16, 17], num_padding=3)
    row = replace(row, taps=row.taps.float(), block_embeds=row.block_embeds.float())
    compiled = torch.compile(row_hidden, backend="aot_eager", fullgraph=True, dynamic=False)
    weights = list(drafter.parameters())

    launched, graph = row_hidden(drafter, row), compiled(drafter, row)

    assert torch.equal(graph, launched)
    for ours, theirs in zip(
        torch.autograd.grad(graph.sum(), weights), torch.autograd.grad(launched.sum(), weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def job_in(linears: Linears, drafters: int = 1, steps: int = 30):
    job = make_job(1, drafters, steps=steps, rows_per_step=2, optim=OptimConfig(steps=steps, lr=1e-2))
    return replace(job, plan=replace(job.plan, linears=linears))


@needs_torchao
def test_training_in_float8_learns_as_ordinary_training_does_and_not_the_same():
    ordinary, rounded = run_job(job_in("drafter_dtype")), run_job(job_in(EMULATED))
    assert rounded.losses != ordinary.losses
    assert rounded.losses[0] == pytest.approx(ordinary.losses[0], rel=0.02)
    assert rounded.losses[-1] == pytest.approx(ordinary.losses[-1], rel=0.1)
    assert run_job(job_in(EMULATED, drafters=2)).losses == pytest.approx(rounded.losses, rel=0.05)
    for name, tensor in ordinary.states[-1].tensors.items():
        found = rounded.states[-1].tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


@needs_torchao
def test_every_drafter_says_what_its_maps_multiply_in():
    notes = [
        note
        for event in Engine(job_in(EMULATED, 2, 1)).events()
        if isinstance(event, Ready)
        for note in event.notes
    ]
    for name in ("drafter-0", "drafter-1"):
        assert f"{name}: 15 linear maps multiply in float8_emulated" in notes


@needs_torchao
def test_taps_that_are_not_finite_still_end_the_run():
    with armed(Fault(worker="target-0", where="row", at=3, kind="nan")), pytest.raises(NonFiniteError):
        run_job(job_in(EMULATED))


@needs_torchao
def test_what_a_run_in_float8_saves_is_ordinary_and_another_choice_goes_on_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def run(linears: Linears, output: str) -> dict[str, Tensor]:
        flags = [
            "--optim.steps=4",
            f"--output={tmp_path / output}",
            f"--placement.drafter-linears={linears}",
        ]
        return load_file(train(parse_run([*SETTINGS, *flags]), Screen()).drafter / "model.safetensors")

    plain, saved = run("drafter_dtype", "ordinary"), run(EMULATED, "rounded")

    forms = [{name: (t.dtype, t.shape) for name, t in one.items()} for one in (plain, saved)]
    assert forms[0] == forms[1]
    assert any(not torch.equal(saved[name], tensor) for name, tensor in plain.items())
    assert type(load_drafter(tmp_path / "rounded" / "drafter")[1].fc) is nn.Linear
    assert "float8 emulated: its rounding without its speed" in " ".join(capfd.readouterr().err.split())

    shutil.rmtree(tmp_path / "rounded" / "checkpoints" / checkpoint_name(4))
    resumed = run("drafter_dtype", "rounded")

    assert "resuming after step 2" in capfd.readouterr().err
    assert any(not torch.equal(resumed[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("linears", ["float8", EMULATED])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 50}, r"layers\.0\.mlp\.gate_proj maps 32 to 50"),
        ({"num_kv_heads": 1, "head_dim": 8}, r"layers\.0\.self_attn\.k_proj maps 32 to 8"),
        ({"hidden_size": 40}, r"fc maps 80 to 40"),
    ],
)
def test_sizes_that_a_gpu_cannot_multiply_are_refused_by_name(linears: Linears, change: dict, words: str):
    with pytest.raises(ConfigError, match=f"{words}; change .*or leave placement.drafter_linears out"):
        refuse_float8(linears, tiny_spec(**change), ())
    refuse_float8("drafter_dtype", tiny_spec(**change), ())


def test_a_gpu_without_float8_products_is_refused_by_its_capability(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=None))
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"cuda:1 has compute capability 8\.0, .* need 8\.9; use such"):
        refuse_float8("float8", tiny_spec(), [device])
    for enough in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=enough: found)
        refuse_float8("float8", tiny_spec(), [device])


def test_without_torchao_a_run_is_refused_before_the_targets_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("draftline.setup.load_target", lambda *_: pytest.fail("weights were read"))
    flags = ["--optim.steps=1", f"--output={tmp_path}/run", f"--placement.drafter-linears={EMULATED}"]
    with pytest.raises(ConfigError, match=r"needs torchao, .*pip install torchao, or leave"):
        train(parse_run([*SETTINGS, *flags]), Screen(quiet=True))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["exit_code"] == 2


def test_the_copies_that_float8_products_read_are_counted():
    cost = DrafterCost(tiny_spec(hidden_size=64, intermediate_size=512), tokens=256, blocks=32)
    plain, rounded = (
        drafter_worker(cost, Sizes(2, 2, True, float8, False, 3, 1024, 1), 1, split=False)
        for float8 in (False, True)
    )
    assert rounded.total - plain.total == 128 * (64 + 512) + 64 * 512


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_torchao
def test_the_command_imports_torchao_without_a_word():
    run = python("-m", "draftline", "evaluate", "nowhere", "builtin:demo", "--target=builtin:tiny")
    assert run.stdout == ""
    assert run.stderr.startswith("draftline: nowhere is neither a drafter")
    assert run.stderr.count("\n") == 1


def test_a_program_that_imports_draftline_keeps_its_log():
    code = (
        "import logging, draftline.cli; from draftline.quiet import hold_back; "
        "log = lambda: logging.getLogger('torchao').error('Failed to load'); "
        "log(); hold_back(); hold_back(); log(); print(len(logging.getLogger('torchao').filters))"
    )
    run = python("-c", code)
    assert (run.stdout, run.stderr) == ("1\n", "Failed to load\n")
