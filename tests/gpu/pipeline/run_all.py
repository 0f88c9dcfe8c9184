"""The threaded pipeline on real GPUs, as one script: `python tests/gpu/pipeline/run_all.py --json out.json`.

Needs one CUDA device; with two it also splits over both. Random weights, synthetic documents with a real length
mix. Each check prints PASS or FAIL with its figures; the exit code is the number of failures.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from draftline.compiling import tripwire  # noqa: E402
from draftline.compiling.graphs import LaunchedStep  # noqa: E402
from draftline.config import DeadlineConfig, DrafterSpec, LossConfig, OptimConfig  # noqa: E402
from draftline.data.document import Document  # noqa: E402
from draftline.data.rows import RowShape, RowSource  # noqa: E402
from draftline.drafter.step import distinct_windows  # noqa: E402
from draftline.drafter.worker import StepRecord  # noqa: E402
from draftline.errors import NonFiniteError  # noqa: E402
from draftline.pipeline import build, reduce  # noqa: E402
from draftline.pipeline.devices import Place  # noqa: E402
from draftline.pipeline.engine import Engine, Ready  # noqa: E402
from draftline.pipeline.job import Job, max_documents  # noqa: E402
from draftline.pipeline.plan import Plan  # noqa: E402
from draftline.pipeline.reduce import Meeting, Member  # noqa: E402
from draftline.pipeline.schedule import Schedule  # noqa: E402
from draftline.target.load import Target  # noqa: E402
from draftline.target.selftest import choose_form  # noqa: E402

VOCAB, HIDDEN, BLOCK = 4096, 512, 16
SLOW_CYCLES = 40_000_000
"""About 20 ms of an H200; a row of these jobs takes a few."""


class LengthMix:
    """Documents of 40 to 900 tokens, log-normal, in memory."""

    def __init__(self, num_documents: int = 400) -> None:
        draws = np.random.default_rng(0)
        self.lengths = np.clip(draws.lognormal(5.3, 0.7, num_documents), 40, 900).astype(np.int32)
        self._ids = draws.integers(4, VOCAB, int(self.lengths.sum())).astype(np.int32)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def document(self, index: int) -> Document:
        ids = self._ids[self._starts[index] : self._starts[index + 1]]
        return Document(ids, np.arange(len(ids)) >= len(ids) // 5)


def make_target(device: torch.device) -> Target:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(requires_grad=False)
    weight = model.get_input_embeddings().weight.detach()
    return Target("random", model, cast("Any", None), weight, 1.0, weight)


SPEC = DrafterSpec(
    hidden_size=HIDDEN,
    intermediate_size=1536,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=4096,
    block_size=BLOCK,
    mask_token_id=3,
    target_layer_ids=(1, 3, 5),
    num_target_layers=8,
    layer_types=("full_attention",) * 3,
)


def make_job(
    targets: list[str], drafters: list[str], steps: int, rows_per_step: int, spec: DrafterSpec = SPEC
) -> Job:
    store = LengthMix()
    shape = RowShape(2048, 256, BLOCK, 512, 7.0, distinct_windows(spec))
    devices = tuple(torch.device(d) for d in targets), tuple(torch.device(d) for d in drafters)
    target = make_target(devices[0][0])
    mode = "colocated" if targets == ["colocated"] else "split"
    return Job(
        spec=spec,
        plan=Plan(mode, *devices, "flex", torch.bfloat16, "drafter_dtype", 3, 4),
        schedule=Schedule(steps, rows_per_step, len(targets), len(drafters)),
        shape=shape,
        source=RowSource(store, shape, seed=0),
        target=target,
        form=choose_form(target.model, spec.target_layer_ids).form,
        max_documents=max_documents(torch.from_numpy(store.lengths), shape.token_budget),
        optim=OptimConfig(steps=steps, lr=1e-3),
        loss=LossConfig(),
        deadlines=DeadlineConfig(stall_timeout_s=60, startup_timeout_s=400),
        boundaries=frozenset(),
        seed=0,
    )


def run(job: Job, watch: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Train; losses of every step, notes of every worker, tokens/s from the fourth step on."""
    losses, notes, tokens, began = [], [], 0, 0.0
    for event in Engine(job).events():
        if isinstance(event, Ready):
            notes.extend(event.notes)
        if isinstance(event, StepRecord):
            tokens += event.num_tokens if began else 0
            if event.rows.start % len(job.plan.drafters) == 0:
                losses.append(float(event.stats[0] / event.stats[1]))
                if watch is not None:
                    watch(event.step)
                if event.step == 3:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
    seconds = time.perf_counter() - began
    return {"losses": losses, "notes": notes, "tokens_per_s": round(tokens / seconds)}


def check_five_and_three(gpus: int) -> dict[str, Any]:
    """5 target and 3 drafter threads train with 0 dense calls and 0 host synchronisations that PyTorch can see."""
    last = f"cuda:{gpus - 1}"
    job = make_job(["cuda:0"] * 5, [last] * 3, steps=40, rows_per_step=6)
    result = run(job)
    assert len(result["losses"]) == 40
    assert result["losses"][-1] < result["losses"][0]
    assert len(tripwire.dense_calls()) == 0
    return {
        "tokens_per_s": result["tokens_per_s"],
        "loss": result["losses"][-1],
        "notes": result["notes"][-3:],
    }


def check_memory_is_flat(gpus: int) -> dict[str, Any]:
    """Peak memory does not grow over 200 steps."""
    peaks: list[int] = []

    def watch(step: int) -> None:
        if step in (20, 199):
            peaks.append(max(torch.cuda.max_memory_allocated(d) for d in range(gpus)))

    run(make_job(["cuda:0"], ["cuda:0"], steps=200, rows_per_step=2), watch)
    assert peaks[0] == peaks[1], peaks
    return {"peak_mib": peaks[0] / 2**20}


def check_repeatable(gpus: int) -> dict[str, Any]:
    """Two runs give the same losses to the last bit, split or colocated."""
    last = f"cuda:{gpus - 1}"
    first = run(make_job(["cuda:0"] * 2, [last] * 2, 50, 4))["losses"]
    second = run(make_job(["cuda:0"] * 2, [last] * 2, 50, 4))["losses"]
    job = make_job(["cuda:0"] * 2, ["cuda:0"] * 2, 50, 4)
    together = run(replace(job, plan=replace(job.plan, mode="colocated")))["losses"]
    assert first == second, "two split runs differ"
    assert first == together, "colocated and split runs differ"
    return {"last": first[-1]}


def check_no_host_synchronisation(gpus: int) -> dict[str, Any]:
    """Steps 10 to 50 of 5 + 3 threads wait for nothing that PyTorch can see: its debug mode would raise."""
    job = make_job(["cuda:0"] * 5, [f"cuda:{gpus - 1}"] * 3, steps=80, rows_per_step=6)
    modes = {10: "error", 50: "default"}
    watched = []

    def watch(step: int) -> None:
        if step in modes:
            torch.cuda.set_sync_debug_mode(modes[step])
            watched.append(step)

    try:
        losses = run(job, watch)["losses"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched == [10, 50]
    return {"steps": watched[1] - watched[0], "loss": losses[-1]}


class LateMeeting(Meeting):
    """One drafter's stream comes late to every meeting; the others wait for it there and nowhere else."""

    def meet(self, device: torch.device, what: str) -> None:
        if threading.current_thread().name == "drafter-0":
            torch.cuda._sleep(SLOW_CYCLES)
        super().meet(device, what)


@contextmanager
def updating_before_the_rows_end(member: Member) -> Iterator[None]:
    """`Member.updating` without its wait for what the thread's stream was given before."""
    stream = member.update_place.stream
    assert stream is not None
    with member.update_place.entered():
        yield
        member._updated = stream.record_event()


def differs(job: Job, losses: list[float]) -> bool:
    """Whether a run gives other losses than these, or none."""
    try:
        return run(job)["losses"] != losses
    except NonFiniteError:
        return True


def check_updates_beside_rows(gpus: int) -> dict[str, Any]:
    """What is reduced and updated beside the next row gives the losses of updates in line, to the last bit, also when
    one drafter is late and the update takes longer than that row's target forward; split and colocated, and for a
    drafter alone. Without either of the two waits that order it, the losses are others."""
    last = f"cuda:{gpus - 1}"
    split = make_job(["cuda:0"] * 2, [last] * 2, 30, 4)
    both = make_job(["cuda:0", last], ["cuda:0", last], 30, 4)
    jobs = {
        "split": split,
        "colocated": replace(both, plan=replace(both.plan, mode="colocated")),
        "alone": make_job(["cuda:0"], [last], 30, 2),
    }
    in_line = SimpleNamespace(on=lambda device: Place(device, torch.cuda.current_stream(device)))
    outcome: dict[str, Any] = {}
    for name, job in jobs.items():
        with mock.patch.object(build, "Place", in_line):
            plain = run(job)["losses"]
        assert run(job)["losses"] == plain, f"{name}: updates beside rows differ from updates in line"
        with mock.patch.object(reduce, "Meeting", LateMeeting):
            assert run(job)["losses"] == plain, (
                f"{name}: late updates beside rows differ from updates in line"
            )
            with mock.patch.object(Member, "await_update"):
                assert differs(job, plain), f"{name}: rows that wait for no update go unnoticed"
        with mock.patch.object(Member, "updating", updating_before_the_rows_end):
            assert differs(job, plain), f"{name}: updates that wait for no row go unnoticed"
        outcome[name] = plain[-1]
    return outcome


class Launched(LaunchedStep[Any]):
    """What a captured step does, by launching its kernels at every replay."""

    def __init__(self, step: Callable[[], Any], **_: Any) -> None:
        super().__init__(step)
        self.output = step()

    def replay(self) -> Any:
        self.output = super().replay()
        return self.output


def check_captured_equals_launched(gpus: int) -> dict[str, Any]:
    """50 steps replayed from graphs give the launched steps' losses to the last bit."""
    job = make_job(["cuda:0"], [f"cuda:{gpus - 1}"], 50, 2)
    captured = run(job)["losses"]
    with mock.patch.object(build, "CapturedStep", Launched):
        launched = run(make_job(["cuda:0"], [f"cuda:{gpus - 1}"], 50, 2))["losses"]
    differing = [step for step, pair in enumerate(zip(captured, launched, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"losses differ from step {differing[0]} on, in {len(differing)} of 50"
    return {"last": captured[-1]}


def check_float8_captured_equals_launched(gpus: int) -> dict[str, Any]:
    """20 steps with float8 linear maps replayed from graphs give the launched steps' losses to the last bit, and those
    of bfloat16 nearly."""

    def in_float8() -> Job:
        job = make_job(["cuda:0"], [f"cuda:{gpus - 1}"], 20, 2)
        return replace(job, plan=replace(job.plan, linears="float8"))

    captured = run(in_float8())
    with mock.patch.object(build, "CapturedStep", Launched):
        launched = run(in_float8())["losses"]
    ordinary = run(make_job(["cuda:0"], [f"cuda:{gpus - 1}"], 20, 2))["losses"]
    assert captured["losses"] == launched
    assert captured["losses"] != ordinary
    spread = max(abs(a - b) / b for a, b in zip(captured["losses"], ordinary, strict=True))
    assert spread < 0.05, spread
    return {"last": launched[-1], "from_bfloat16": spread, "notes": captured["notes"][-3:]}


def check_drafter_counts(_gpus: int) -> dict[str, Any]:
    """Losses for 1, 2 and 3 drafters at the same global batch agree (bf16, so not to the bit)."""
    runs = {m: run(make_job(["cuda:0"], ["cuda:0"] * m, 20, 6))["losses"] for m in (1, 2, 3)}
    spread = max(abs(runs[m][-1] - runs[1][-1]) / runs[1][-1] for m in runs)
    assert spread < 1e-2, spread
    return {"relative_spread": spread}


def check_sliding_layers(_gpus: int) -> dict[str, Any]:
    """A drafter with sliding and full layers proves its kernels and trains."""
    types = ("sliding_attention", "sliding_attention", "full_attention")
    spec = SPEC.model_copy(update={"layer_types": types, "sliding_window": 64})
    losses = run(make_job(["cuda:0"], ["cuda:0"], 20, 2, spec))["losses"]
    assert losses[-1] < losses[0]
    return {"loss": losses[-1]}


CHECKS = (
    check_five_and_three,
    check_drafter_counts,
    check_repeatable,
    check_updates_beside_rows,
    check_no_host_synchronisation,
    check_captured_equals_launched,
    check_float8_captured_equals_launched,
    check_sliding_layers,
    check_memory_is_flat,
)


def main(checks: Sequence[Callable[[int], dict[str, Any]]], description: str | None) -> int:
    """Run `checks`, each given the number of GPUs; returns how many failed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "gpus": gpus,
        "torch": torch.__version__,
    }
    failures = 0
    for check in checks:
        if arguments.only and check.__name__ not in arguments.only:
            continue
        began = time.monotonic()
        try:
            outcome: Any = check(gpus)
            word = "PASS"
        except Exception:  # noqa: BLE001 - every check is reported
            outcome, word = traceback.format_exc()[-3000:], "FAIL"
            failures += 1
        results[check.__name__] = {"result": word, "outcome": outcome}
        print(word, check.__name__, f"{time.monotonic() - began:.0f} s", outcome, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    return failures


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
