"""At start every target is tested on itself: a document alone equals the same document in a row, on every tap.

Two checks decide. *Isolation*: other text in the documents around it must not move one bit of a document's taps
(same shapes, same kernels, so any difference is a leak). Targets with experts are the exception: an expert's
matrix product has as many rows as tokens chose it, and another shape may round otherwise. *Equality*: each
document's taps in the row equal a plain forward of that document alone, within the rounding of the compute type.
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
"""Distance between a document's taps in a row and alone that is rounding, not a leak; see `distance`."""
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
    """Largest change of a document's taps when its neighbours' text changes."""
    drift: float
    """The same change as a distance."""
    distance: float
    """Largest distance between a document's taps in the row and alone."""

    def isolated(self, model: PreTrainedModel, tolerance: float) -> bool:
        """Whether the neighbours' text does not matter."""
        return self.leak == 0 or (_has_experts(model) and self.drift <= tolerance)

    def passes(self, model: PreTrainedModel, tolerance: float) -> bool:
        """Whether rows computed this way can be trained on."""
        return self.isolated(model, tolerance) and self.distance <= tolerance


def choose_form(
    model: PreTrainedModel, target_layer_ids: tuple[int, ...], *, flash: bool = False
) -> FormChoice:
    """Packed if the target passes the self-test that way, else batched; `flash` as of `TappedForward`.

    Raises:
        ConfigError: neither form reproduces a document run alone, the figures are named; or the hidden states are
            not finite.
    """
    dtype = model.get_input_embeddings().weight.dtype
    assert isinstance(dtype, torch.dtype)
    try:
        packed = _measure(model, target_layer_ids, "packed", flash=flash)
    except UnsupportedPackingError as error:
        packed, refused = None, str(error)
    else:
        refused = f"packed, a document moves by {packed.leak:.2g} with its neighbour and is off {packed.distance:.2g}"
    if packed is not None and packed.passes(model, TOLERANCE[dtype]):
        how = "to rounding (experts)" if packed.leak else "to the bit"
        return FormChoice("packed", f"isolated {how}; distance to documents alone {packed.distance:.1e}")
    batched = _measure(model, target_layer_ids, "batched", flash=flash)
    if batched.passes(model, TOLERANCE[dtype]):
        return FormChoice(
            "batched", f"{refused}; batched, the distance to documents alone is {batched.distance:.1e}"
        )
    raise ConfigError(
        f"{type(model).__name__} does not give a document the same taps alone and among others: {refused}; batched, "
        f"it moves by {batched.leak:.2g} and differs by {batched.distance:.2g} (allowed {TOLERANCE[dtype]:.0e})"
    )


def _has_experts(model: PreTrainedModel) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def _measure(model: PreTrainedModel, taps: tuple[int, ...], form: Form, *, flash: bool) -> _Figures:
    vocab = int(text_config(model.config).vocab_size)
    generator = torch.Generator().manual_seed(0)
    documents, others = (
        [torch.randint(0, vocab, (n,), generator=generator) for n in TEST_LENGTHS] for _ in range(2)
    )
    alone = _alone(model, taps, documents)
    _refuse_not_finite(model, taps, torch.cat(alone))
    forward = TappedForward(model, taps, TEST_BUDGET, len(documents), form, flash=flash)
    row = _row(documents)
    there = _run(forward, row)
    moved = _run(forward, _row([others[0], documents[1], others[2]]))
    middle = slice(row.starts[1], row.starts[2])
    distances = [
        distance(there[start:stop], states, len(taps))
        for start, stop, states in zip(row.starts, row.starts[1:], alone, strict=False)
    ]
    return _Figures(
        leak=float((there[middle] - moved[middle]).abs().max()),
        drift=float(distance(moved[middle], there[middle], len(taps))),
        distance=float(torch.stack(distances).max()),
    )


def _refuse_not_finite(model: PreTrainedModel, taps: tuple[int, ...], states: Tensor) -> None:
    """A NaN is equal to nothing, so that it would look like a leak.

    Args:
        states: [tokens, K * D] in the order of `taps`.
    """
    finite = states.unflatten(-1, (len(taps), -1)).isfinite().all(dim=-1).all(dim=0).tolist()  # [K]
    bad = sorted(tap for tap, is_finite in zip(taps, finite, strict=True) if not is_finite)
    if not bad:
        return
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    cause = (
        f"{len(broken)} of its weights hold NaN or infinity ({', '.join(broken[:3])}); download it again"
        if broken
        else f"its weights are, so {str(states.dtype).removeprefix('torch.')} is too narrow; use another target.dtype, "
        "such as bfloat16 or float32"
    )
    raise ConfigError(
        f"{type(model).__name__}: the hidden states are not finite from tap {bad[0]} on (of {sorted(taps)}): {cause}"
    )


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


def distance(a: Tensor, b: Tensor, num_taps: int) -> Tensor:
    """How far taps a are from b, both [tokens, K * D]: relative L2 of each token and tap, root mean square over
    tokens, largest over taps []. Each token by itself, because in trained targets the first one is often a
    thousand times larger than the others and would hide them."""
    split = [x.float().unflatten(-1, (num_taps, -1)) for x in (a, b)]  # [tokens, K, D]
    relative = (split[0] - split[1]).norm(dim=-1) / split[1].norm(dim=-1).clamp_min(1e-12)
    return relative.square().mean(dim=0).sqrt().max()
