"""The speed benchmarks run: on a CPU and a tiny shape here, so that they also run where it matters."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from draftline.config import TILE
from tests.marks import needs_torchao

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {
    "step": {"step_ms", "share_of_peak", "counted_gib", "recompiles"},
    "target": {"forward_ms", "share_of_peak", "recompiles"},
    "pipeline": {"tokens_per_s", "share_of_bound", "dense_calls", "recompiles"},
}
SMALL = {
    "step": ["--tokens", "256", "--blocks", "32", "--repeats", "2"],
    "target": ["--tokens", "256", "--repeats", "2"],
    "pipeline": ["--tokens", "256", "--blocks", "32", "--steps", "6"],
}


def printed(code: str) -> str:
    """What a line of Python prints where it can import the benchmarks."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=120,
        capture_output=True,
        cwd=ROOT / "benchmarks",
        text=True,
    ).stdout


@pytest.mark.parametrize("name", FIGURES)
def test_a_benchmark_measures_a_tiny_shape_on_the_cpu_and_says_how_it_was_run(name: str, tmp_path: Path):
    out = tmp_path / "out.json"
    script = ROOT / "benchmarks" / f"{name}.py"
    arguments = ["--shapes", "tiny", "--device", "cpu", "--json", str(out), *SMALL[name]]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=240, capture_output=True)
    written = json.loads(out.read_text())
    assert {"date", "hardware", "torch", "commit", "command"} <= written.keys()
    assert f"{os.cpu_count()} {platform.machine()} cores, load average " in written["hardware"]
    for row in written["results"]:
        assert FIGURES[name] <= row.keys()
        assert row["recompiles"] == 0
        assert all(value >= 0 for value in row.values() if isinstance(value, float))


def test_kernels_of_a_gpu_are_summed_up_into_parts():
    kernels = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": 29.8,
        "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT": 0.2,
        "triton_tem_fused_flex_attention_backward_select_backward_transpose_view_5": 21.9,
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object": 1.1,
        "triton_tem_fused__to_copy_cat_flex_attention_transpose_unsqueeze_view_12": 5.3,
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>": 0.7,
        "triton_poi_fused__to_copy_add_copy_copy__div_gt_mul_rsub_scalar_tensor_sqrt_sub_unbind_where_0": 6.5,
        "triton_red_fused__to_copy_add_arange_argmax_prepare_softmax_online_sub_unsqueeze_0": 4.0,
        "Memcpy DtoD (Device -> Device)": 1.3,
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_silu_t_32": 0.8,
        "triton_red_fused_flex_attention_backward_select_backward_transpose_view_4": 0.4,
    }
    parts = json.loads(
        printed(f"import json; from parts import by_part; print(json.dumps(by_part({kernels})))")
    )
    assert {part: round(time, 1) for part, time in parts.items()} == {
        "matrix products": 30.0,
        "attention, backward": 23.0,
        "AdamW, norm": 6.5,
        "attention, forward": 6.0,
        "cross-entropy beside its products": 4.0,
        "copies": 1.3,
        "float8 copies, scales and what is fused with them": 0.8,
        "norms, rotary, SwiGLU, embedding": 0.4,
    }


@pytest.mark.parametrize("name", FIGURES)
def test_attention_that_a_device_does_not_have_is_refused_and_not_replaced(name: str):
    script = ROOT / "benchmarks" / f"{name}.py"
    arguments = ["--shapes", "tiny", "--device", "cpu", "--attention", "flash", *SMALL[name]]
    run = subprocess.run(
        [sys.executable, script, *arguments], check=False, timeout=240, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "placement.attention=flash needs GPUs" in run.stderr


@needs_torchao
def test_a_step_is_measured_with_float8_linear_maps(tmp_path: Path):
    out, script = tmp_path / "out.json", ROOT / "benchmarks" / "step.py"
    arguments = ["--shapes", "tiny", "--device", "cpu", "--linears", "float8_emulated", *SMALL["step"]]
    subprocess.run(
        [sys.executable, script, *arguments, "--json", out], check=True, timeout=240, capture_output=True
    )
    written = json.loads(out.read_text())
    assert written["torchao"] == version("torchao")
    (row,) = written["results"]
    assert row["linears"] == "float8_emulated"
    assert row["step_ms"] > 0


@needs_torchao
def test_the_effect_of_float8_on_the_loss_is_measured_from_one_seed(tmp_path: Path):
    out, script = tmp_path / "out.json", ROOT / "benchmarks" / "float8_loss.py"
    arguments = ["--steps", "2", "--seeds", "5", "--json", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, script, *arguments], check=True, timeout=240, capture_output=True, env=environment
    )
    ordinary, rounded = json.loads(out.read_text())["results"]
    assert [row["linears"] for row in (ordinary, rounded)] == ["drafter_dtype", "float8_emulated"]
    assert rounded["loss"] != ordinary["loss"]
    assert rounded["loss"] == pytest.approx(ordinary["loss"], rel=0.02)


def test_products_are_timed_on_a_cpu_too(tmp_path: Path):
    out = tmp_path / "out.json"
    script = ROOT / "benchmarks" / "products.py"
    arguments = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--tokens",
        "128",
        "--queries",
        "128",
        "--repeats",
        "1",
    ]
    subprocess.run(
        [sys.executable, script, *arguments, "--json", out], check=True, timeout=240, capture_output=True
    )
    results = json.loads(out.read_text())["results"]
    assert len({row["product"] for row in results}) == len(results) > 20
    assert all(row["ms"] > 0 for row in results[1:])


def test_every_form_of_the_tiles_benchmark_divides_a_tile_of_the_tables():
    code = "import json, tiles; print(json.dumps(tiles.forms()))"
    forms = json.loads(printed(code))
    assert len(forms) == 7
    sizes = [size for options in forms.values() for name, size in options.items() if "BLOCK" in name]
    assert sizes
    assert all(TILE % size == 0 for size in sizes)


def test_what_lives_at_the_peak_of_memory_is_listed_by_size_and_by_the_line_that_made_it():
    def entry(action: str, addr: int, mib: int, line: int = 0) -> dict[str, object]:
        files = ("torch/nn/functional.py", "src/draftline/drafter/loss.py")
        frames = [{"filename": name, "line": line, "name": "chunk"} for name in files]
        return {"action": action, "addr": addr, "size": mib * 2**20, "frames": frames}

    trace = [
        entry("alloc", 1, 10, 7),
        entry("alloc", 2, 5, 8),
        entry("free_requested", 2, 5),
        entry("free_completed", 2, 5),
        entry("alloc", 2, 10, 7),  # 20 MiB, in a place that was used before
        entry("free_requested", 9, 90),  # made before the watching began
        entry("free_requested", 1, 10),
        entry("alloc", 3, 2, 9),
    ]
    assert printed(f"import live; print(live.table({trace}), end='')").splitlines()[1:] == [
        "   2 x      10.0 MiB  loss.py:7:chunk"
    ]
    grown = [*trace, entry("alloc", 4, 30, 11)]
    lines = printed(f"import live; print(live.table({grown}), end='')").splitlines()
    assert lines[0].startswith("    0.041 GiB at the peak; python")
    assert [line.split()[2] for line in lines[1:]] == ["30.0", "10.0", "2.0"]


def other_trainers(folder: Path) -> dict[str, str]:
    """An environment whose speculators breaks when it builds its model, and whose SpecForge cannot be imported."""
    for package in ("speculators", "speculators/models", "speculators/train"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "speculators/models/dflash.py").write_text(
        "class DFlashDraftModel: ...\n"
        "class DFlashSpeculatorConfig:\n"
        "    def __init__(self, **given): raise RuntimeError('out of order')\n"
    )
    (folder / "speculators/train/optimizers.py").write_text("def build_optimizers(): ...\n")
    (folder / "specforge.py").write_text("raise ImportError('kept out of this test')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def beside_peers(folder: Path, *more: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    script, out = ROOT / "benchmarks" / "peers.py", folder / "out.json"
    arguments = ["--shapes", "tiny", "--device", "cpu", "--json", str(out), *SMALL["step"], *more]
    run = subprocess.run(
        [sys.executable, script, *arguments],
        check=False,
        timeout=240,
        capture_output=True,
        text=True,
        env=other_trainers(folder),
    )
    return run, out


def test_peers_that_are_not_installed_or_break_are_lines_that_say_why_and_errors_where_they_are_required(
    tmp_path: Path,
):
    run, out = beside_peers(tmp_path, "--require", "speculators")
    own, broken, absent = json.loads(out.read_text())["results"]
    assert own["peer"] == "draftline"
    assert own["share_of_peak"] > 0
    assert broken["notes"] == "failed: RuntimeError: out of order"
    assert absent["notes"] == "not installed: kept out of this test"
    assert [broken["step_ms"], absent["step_ms"]] == [None, None]
    assert "not installed: kept out of this test" in run.stdout
    assert "Traceback" in run.stderr
    assert "--require speculators: failed: RuntimeError: out of order" in run.stderr  # and not the other's
    assert run.returncode == 1


def test_a_required_peer_that_is_not_installed_is_an_error_before_anything_is_measured(tmp_path: Path):
    run, out = beside_peers(tmp_path, "--require", "specforge")
    assert run.returncode == 1
    assert "--require specforge: not installed: kept out of this test" in run.stderr
    assert not out.exists()


def test_a_peer_that_hangs_is_a_line_that_says_so_and_stderr_shows_where_it_was(tmp_path: Path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import argparse, json, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "import peers\n"
        "def hang(*given): time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    peers.measure_peer = hang\n"
        "    options = argparse.Namespace(deadline=1.0)\n"
        "    print(json.dumps(peers.measure_peer_alone('speculators', 'tiny', options)))\n"
        "    peers.alone_or_exit('draftline tiny', hang, seconds=1.0)\n",
        encoding="utf-8",
    )
    run = subprocess.run([sys.executable, script], check=False, timeout=200, capture_output=True, text=True)
    line = json.loads(run.stdout)
    assert line["step_ms"] is None
    assert line["notes"] == "failed: its process ended without figures, or was ended after 1 s"
    assert "Timeout" in run.stderr
    assert "in hang" in run.stderr
    assert run.returncode == 1
    assert "draftline tiny: its process ended without figures, or was ended after 1 s" in run.stderr


def test_a_peer_without_figures_that_nobody_required_is_no_error():
    code = "import peers; peers.refuse([], {'speculators': 'failed: out of order'}); print('went on')"
    assert printed(code) == "went on\n"
