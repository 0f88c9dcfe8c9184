"""`draftline replay`: compute a step that was not finite again, and show what is not finite, and where.

That tells a fault that lies in the data or the weights (it comes back) from one of the hardware or the transport
(it does not).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.config import DrafterSpec
from draftline.data.rows import Row
from draftline.data.transfer import DeviceRow
from draftline.drafter.model import drafter_of
from draftline.drafter.step import DrafterStep
from draftline.optim import FlatParameters
from draftline.pipeline.plan import available_devices
from draftline.resilience.badstep import SavedStep, read_bad_step
from draftline.target.forward import TappedForward
from draftline.target.load import Target, load_target
from draftline.target.states import BlockTokens, TargetStates


@dataclass(frozen=True)
class TapFinding:
    """A target layer whose output is not finite somewhere in a row."""

    layer: int
    num_tokens: int
    """Tokens with a value that is not finite, padding excluded."""
    first_token: int
    """The first of them: place in the row."""
    first_token_id: int


@dataclass(frozen=True)
class RowFinding:
    """What is not finite in one row; all empty when everything is."""

    row: int
    documents: tuple[int, ...]
    """Numbers in the token store, for `draftline inspect`."""
    taps: tuple[TapFinding, ...]
    bad_blocks: tuple[int, ...]
    """Blocks whose final hidden states are not finite."""
    loss: float
    gradients: tuple[str, ...]
    """Parameters whose gradient is not finite."""

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found."""
        return not (self.taps or self.bad_blocks or self.gradients) and math.isfinite(self.loss)


@dataclass(frozen=True)
class Replay:
    """A saved step, computed again."""

    step: int
    weights: tuple[str, ...]
    """Drafter parameters that are not finite themselves."""
    rows: tuple[RowFinding, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the step is finite this time."""
        return not self.weights and all(row.is_finite for row in self.rows)


def replay(folder: Path) -> Replay:
    """Compute a saved step again, row by row, on the first device, with the reference attention.

    Raises:
        CheckpointError: the folder is missing or damaged.
        ConfigError: its target is not there any more.
    """
    saved = read_bad_step(folder)
    target = load_target(saved.config.target, available_devices()[0])
    forward = TappedForward(
        target.model,
        saved.spec.target_layer_ids,
        saved.config.rows.token_budget,
        max(len(row.documents) for row in saved.rows),
        saved.form,
        blocks=BlockTokens(len(saved.rows[0].anchors), saved.spec.mask_token_id),
    )
    step = _step(saved, target, forward.states)
    return Replay(
        step=saved.step,
        weights=tuple(name for name, tensor in saved.weights.items() if not tensor.isfinite().all()),
        rows=tuple(_look(row, forward, step) for row in saved.rows),
    )


def _step(saved: SavedStep, target: Target, states: TargetStates) -> DrafterStep:
    drafter = drafter_of(saved.spec, saved.weights)
    dtype = next(iter(saved.weights.values())).dtype
    return DrafterStep(
        drafter,
        FlatParameters(drafter, 1, dtype, device=target.device),
        target.head.to(dtype),
        DeviceRow(saved.rows[0], target.device),
        states,
        "sdpa",
        saved.config.loss.chunk_rows,
    )


def _look(row: Row, forward: TappedForward, step: DrafterStep) -> RowFinding:
    forward.load(row)
    taps = forward.run()
    step.row.load(row)
    step.stats.zero_()
    gradients = dict(zip(step.parameters.layout.names, step.run(), strict=True))
    return RowFinding(
        row=row.index,
        documents=row.documents,
        taps=tuple(_look_at_taps(row, taps, step.spec)),
        bad_blocks=_bad_blocks(row, step),
        loss=float(step.stats[0] / step.stats[1]) if step.stats[1] else 0.0,
        gradients=tuple(name for name, gradient in gradients.items() if not gradient.isfinite().all()),
    )


def _look_at_taps(row: Row, taps: Tensor, spec: DrafterSpec) -> Iterator[TapFinding]:
    real = row.document_ids >= 0
    for order, layer in enumerate(spec.target_layer_ids):
        states = taps[:, order * spec.hidden_size : (order + 1) * spec.hidden_size]  # [T, D]
        bad = (~states.isfinite().all(dim=1).cpu() & real).nonzero().flatten().tolist()
        if bad:
            yield TapFinding(layer, len(bad), bad[0], int(row.input_ids[bad[0]]))


@torch.no_grad()
def _bad_blocks(row: Row, step: DrafterStep) -> tuple[int, ...]:
    hidden = step.hidden(*step.rotaries()).unflatten(0, (len(row.anchors), -1))  # [A, B, D]
    bad = ~hidden.isfinite().all(dim=2).all(dim=1).cpu() & row.anchor_valid
    return tuple(bad.nonzero().flatten().tolist())


def describe(outcome: Replay) -> list[str]:
    """The outcome as lines for a person."""
    if outcome.is_finite:
        return [
            f"step {outcome.step}: everything is finite in all {len(outcome.rows)} rows this time. The fault lies "
            "neither in the rows nor in the weights: suspect the device, or a kernel that only the run uses"
        ]
    lines = [f"step {outcome.step}"]
    if outcome.weights:
        lines.append(f"drafter weights not finite: {_few(outcome.weights)}")
    for row in outcome.rows:
        lines.append(f"row {row.row}: " + ("finite" if row.is_finite else "; ".join(_describe_row(row))))
    return lines


def _describe_row(row: RowFinding) -> Iterator[str]:
    for tap in row.taps:
        yield (
            f"target layer {tap.layer} is not finite at {tap.num_tokens} tokens, first at {tap.first_token} "
            f"(id {tap.first_token_id})"
        )
    if row.bad_blocks:
        yield f"{len(row.bad_blocks)} blocks have hidden states that are not finite"
    yield f"loss {row.loss:.4g}"
    if row.gradients:
        yield f"gradient not finite in {_few(row.gradients)}"
    yield f"documents {', '.join(map(str, row.documents))}"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def to_json(outcome: Replay) -> dict[str, Any]:
    """The outcome as plain values."""
    rows = [asdict(row) for row in outcome.rows]
    return {"step": outcome.step, "finite": outcome.is_finite, "weights": outcome.weights, "rows": rows}
