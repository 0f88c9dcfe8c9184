"""FlashAttention 4 on a Hopper GPU, as one script: `python tests/gpu/flash/run_all.py --json out.json`.

Needs one H100 or H200 and the extra `flash`; with two GPUs the runs use both. Each check prints PASS or FAIL with its
figures; the exit code is the number of failures.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.gpu.pipeline.run_all import (  # noqa: E402
    SPEC,
    VOCAB,
    LengthMix,
    main,
    make_job,
    make_target,
    run,
)

from draftline.data.rows import RowShape, RowSource  # noqa: E402
from draftline.data.synthetic import SyntheticStore  # noqa: E402
from draftline.data.transfer import DeviceRow  # noqa: E402
from draftline.drafter.attention import Attend, sdpa_attend  # noqa: E402
from draftline.drafter.flash import context_bounds, flash_attend  # noqa: E402
from draftline.drafter.mask import block_mask_dense  # noqa: E402
from draftline.drafter.step import distinct_windows  # noqa: E402
from draftline.pipeline.job import Job  # noqa: E402
from draftline.target.forward import TappedForward  # noqa: E402
from draftline.target.selftest import choose_form  # noqa: E402

DEVICE = torch.device("cuda", 0)
TOKENS, BLOCKS, BLOCK = 2048, 256, 16
CLOSE = 5e-3
"""Relative distance of bf16 results from float32 ones."""
HEADS = ((64, 9, 3), (128, 8, 2), (128, 4, 4))
"""Head size, query heads, key/value heads."""


def gradients(attend: Attend, inputs: list[Tensor], slope: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(0, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def check_attention_equals_dense(_gpus: int) -> dict[str, Any]:
    """Output and gradients are those of dense float32 attention: windows, causal blocks, blocks that see nothing."""
    worst: dict[str, float] = {}
    few = np.full(6, 100)  # less than the row holds, and blocks without an anchor
    for lengths, window, causal, (size, heads, kv_heads) in product(
        (few, LengthMix().lengths[:64]), (None, 40, 700), (False, True), HEADS
    ):
        shape = RowShape(TOKENS, BLOCKS, BLOCK, 40 if lengths is few else 512, 7.0, ((window, causal),))
        row = DeviceRow(RowSource(SyntheticStore(lengths, VOCAB), shape, seed=0).row(0), DEVICE)
        rule = {"block_size": BLOCK, "window": window, "causal": causal}
        bounds = context_bounds(row.anchors, row.anchor_valid, row.positions, **rule)
        dense = block_mask_dense(row.anchors, row.anchor_valid, row.document_ids, row.positions, **rule)
        assert bool(row.anchor_valid.all()) == (lengths is not few)
        queries = BLOCKS * BLOCK
        sizes = ((heads, queries), (kv_heads, TOKENS + queries), (kv_heads, TOKENS + queries))
        inputs = [torch.randn(h, n, size, device=DEVICE, dtype=torch.bfloat16) for h, n in sizes]
        slope = torch.randn_like(inputs[0])
        ours = gradients(flash_attend(row.tables, [bounds]), inputs, slope)
        truth = gradients(sdpa_attend([dense]), [x.float() for x in inputs], slope.float())
        dead = ~dense.any(dim=1)
        assert not ours[0][:, dead].any(), "a query that sees nothing has an output"
        assert not ours[1][:, dead].any(), "a query that sees nothing has a gradient"
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, truth, strict=True):
            distance = float((a.float() - b).norm() / b.norm())
            assert distance < CLOSE, (name, distance, window, causal, size)
            worst[name] = max(worst.get(name, 0.0), distance)
    return worst


def flash_job(gpus: int, steps: int, **changes: Any) -> Job:
    """Two targets on the first GPU and two drafters on the last."""
    job = make_job(["cuda:0"] * 2, [f"cuda:{gpus - 1}"] * 2, steps, 4, **changes)
    return replace(job, plan=replace(job.plan, backend="flash"))


def check_trains_as_flex(gpus: int) -> dict[str, Any]:
    """Captured runs prove their kernels, and their losses are those of flex nearly; two runs agree nearly."""
    first, second = run(flash_job(gpus, 50)), run(flash_job(gpus, 50))
    flex = run(make_job(["cuda:0"] * 2, [f"cuda:{gpus - 1}"] * 2, 50, 4))["losses"]
    spread = {
        name: max(abs(a - b) / b for a, b in zip(first["losses"], other, strict=True))
        for name, other in (("from_flex", flex), ("between_two_runs", second["losses"]))
    }
    assert spread["from_flex"] < 1e-2, spread
    assert spread["between_two_runs"] < 1e-2, spread
    return {**spread, "last": first["losses"][-1], "flex": flex[-1], "notes": first["notes"]}


def check_sliding_layers(gpus: int) -> dict[str, Any]:
    """A drafter with sliding and full layers, whose sliding blocks are causal, trains as with flex."""
    types = ("sliding_attention", "sliding_attention", "full_attention")
    spec = SPEC.model_copy(update={"layer_types": types, "sliding_window": 64})
    shape = RowShape(TOKENS, BLOCKS, BLOCK, 512, 7.0, distinct_windows(spec))
    losses = []
    for backend in ("flash", "flex"):
        job = make_job(["cuda:0"] * 2, [f"cuda:{gpus - 1}"] * 2, 20, 4, spec)
        losses.append(run(replace(job, shape=shape, plan=replace(job.plan, backend=backend)))["losses"])
    spread = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    assert spread < 1e-2, spread
    return {"from_flex": spread, "last": losses[0][-1]}


def check_targets_taps(_gpus: int) -> dict[str, Any]:
    """A packed target passes its self-test, and its taps are the same bits every time."""
    target = make_target(DEVICE)
    choice = choose_form(target.model, SPEC.target_layer_ids, flash=True)
    assert choice.form == "packed", choice
    shape = RowShape(TOKENS, BLOCKS, BLOCK, 512, 7.0, ())
    row = RowSource(LengthMix(), shape, seed=0).row(0)
    forward = TappedForward(target.model, SPEC.target_layer_ids, TOKENS, 64, "packed", flash=True)
    forward.load(row)
    taps = [forward.run().clone() for _ in range(3)]
    assert torch.equal(taps[0], taps[1])
    assert torch.equal(taps[0], taps[2])
    return {"reason": choice.reason}


CHECKS = (
    check_attention_equals_dense,
    check_targets_taps,
    check_trains_as_flex,
    check_sliding_layers,
)


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
