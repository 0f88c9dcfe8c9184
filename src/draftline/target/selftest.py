"""At start every target is tested on itself: a document alone equals the same document in a row, on every tap.

Two checks decide. *Isolation*: other text in the first document of a packed row must not move one bit of the
second document's taps (same shapes, same kernels, so any difference is a leak). *Equality*: each document's
taps in the row equal a plain forward of that document alone, within the rounding of the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline.data.document import Document
from draftline.data.rows import Row, RowShape, row_from_documents
from draftline.errors import ConfigError
from draftline.target.attention import UnsupportedPackingError
from draftline.target.forward import Form, TappedForward, decoder_layers, share_weights
from draftline.target.load import text_config

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative L2 distance between a document's taps in a row and alone: rounding, not leaks."""
TEST_LENGTHS = (37, 61, 45)
TEST_BUDGET = 256


@dataclass(frozen=True)
class FormChoice:
    """Which form of the target's forward runs, and the figures that decided it."""

    form: Form
    reason: str


@dataclass(frozen=True)
class _Figures:
    leak: float
    """Largest change of the second document's taps when the first one's text changes."""
    distance: float
    """Largest relative L2 distance between a document's taps in the row and alone, over taps."""


def choose_form(model: PreTrainedModel, target_layer_ids: tuple[int, ...]) -> FormChoice:
    """Packed if the target passes the self-test that way, else batched.

    Raises:
        ConfigError: neither form reproduces a document run alone; the figures are named.
    """
    dtype = model.get_input_embeddings().weight.dtype
    assert isinstance(dtype, torch.dtype)
    try:
        packed = _measure(model, target_layer_ids, "packed")
    except UnsupportedPackingError as error:
        packed, refused = None, str(error)
    else:
        refused = f"packed, a document moves by {packed.leak:.2g} with its neighbour and is off {packed.distance:.2g}"
    if packed is not None and packed.leak == 0 and packed.distance <= TOLERANCE[dtype]:
        return FormChoice("packed", f"isolated to the bit; distance to documents alone {packed.distance:.1e}")
    batched = _measure(model, target_layer_ids, "batched")
    if batched.leak == 0 and batched.distance <= TOLERANCE[dtype]:
        return FormChoice(
            "batched", f"{refused}; batched, the distance to documents alone is {batched.distance:.1e}"
        )
    raise ConfigError(
        f"{type(model).__name__} does not give a document the same taps alone and among others: {refused}; batched, "
        f"it moves by {batched.leak:.2g} and differs by {batched.distance:.2g} (allowed {TOLERANCE[dtype]:.0e})"
    )


def _measure(model: PreTrainedModel, taps: tuple[int, ...], form: Form) -> _Figures:
    vocab = int(text_config(model.config).vocab_size)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, vocab, (n,), generator=generator) for n in TEST_LENGTHS]
    other = torch.randint(0, vocab, (TEST_LENGTHS[0],), generator=generator)
    forward = TappedForward(model, taps, TEST_BUDGET, len(documents), form)
    row, changed = _row(documents), _row([other, *documents[1:]])
    there = _run(forward, row)
    moved = _run(forward, changed)
    second = slice(row.starts[1], row.starts[-1])
    alone = _alone(model, taps, documents)
    distance = max(
        _distance(there[start:stop], states)
        for start, stop, states in zip(row.starts, row.starts[1:], alone, strict=False)
    )
    return _Figures(leak=float((there[second] - moved[second]).abs().max()), distance=distance)


def _run(forward: TappedForward, row: Row) -> Tensor:
    forward.load(row)
    return forward.run().clone()


def _row(documents: list[Tensor]) -> Row:
    shape = RowShape(TEST_BUDGET, 8, 16, 8, 1.0, ())
    laid = [
        Document(ids.numpy().astype("int32"), torch.ones(len(ids), dtype=torch.bool).numpy())
        for ids in documents
    ]
    return row_from_documents(0, laid, shape, seed=0)


@torch.inference_mode()
def _alone(model: PreTrainedModel, taps: tuple[int, ...], documents: list[Tensor]) -> list[Tensor]:
    """Taps of each document in a plain forward of its own, [tokens, K * D]."""
    copy = share_weights(model)
    _, _, layers = decoder_layers(copy)
    seen: dict[int, Tensor] = {}
    for tap in taps:
        layers[tap].register_forward_hook(lambda _m, _i, out, tap=tap: _keep(seen, tap, out))
    device = model.get_input_embeddings().weight.device
    assert isinstance(device, torch.device)
    states = []
    for ids in documents:
        copy.get_decoder()(input_ids=ids[None].to(device), use_cache=False)
        states.append(torch.cat([seen[tap][0] for tap in taps], dim=-1))
    return states


def _keep(seen: dict[int, Tensor], tap: int, output: Any) -> None:
    seen[tap] = output[0] if isinstance(output, tuple) else output


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))
