"""At start every target is tested on itself: a document alone equals the same document in a row, on every tap.

Two checks decide. *Isolation*: other text in the documents around it must not move one bit of a document's taps
(same shapes, same kernels, so any difference is a leak). Targets with experts are the exception: an expert's
matrix product has as many rows as tokens chose it, and another shape may round otherwise. *Equality*: each
document's taps in the row equal a plain forward of that document alone, within the target's own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline.data.document import Document
from draftline.data.rows import Row, RowShape, row_from_documents
from draftline.errors import ConfigError
from draftline.target.attention import UnsupportedPackingError
from draftline.target.forward import Form, TappedForward
from draftline.target.load import text_config
from draftline.target.rounding import distance, rounding_limit, taps_alone, usual_limit

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
    usual: float
    """Distances up to it are rounding in every target."""
    limit: float
    """Distances up to it are this target's rounding."""

    def passes(self, model: PreTrainedModel) -> bool:
        """Whether rows computed this way can be trained on: the neighbours' text does not matter, and the rest is
        rounding."""
        # experts that rounding chooses otherwise would make the target's own limit say nothing of a leak
        isolated = self.leak == 0 or (_has_experts(model) and self.drift <= self.usual)
        return isolated and self.distance <= self.limit


def choose_form(
    model: PreTrainedModel, target_layer_ids: tuple[int, ...], *, flash: bool = False
) -> FormChoice:
    """Packed if the target passes the self-test that way, else batched; `flash` as of `TappedForward`.

    Raises:
        ConfigError: neither form reproduces a document run alone, the figures are named; or the hidden states are
            not finite.
    """
    try:
        packed = _measure(model, target_layer_ids, "packed", flash=flash)
    except UnsupportedPackingError as error:
        packed, refused = None, str(error)
    else:
        refused = f"packed, a document moves by {packed.leak:.2g} with its neighbour and is off {packed.distance:.2g}"
    if packed is not None and packed.passes(model):
        how = "to rounding (experts)" if packed.leak else "to the bit"
        return FormChoice("packed", f"isolated {how}; distance to documents alone {packed.distance:.1e}")
    batched = _measure(model, target_layer_ids, "batched", flash=flash)
    if batched.passes(model):
        return FormChoice(
            "batched", f"{refused}; batched, the distance to documents alone is {batched.distance:.1e}"
        )
    raise ConfigError(
        f"{type(model).__name__} does not give a document the same taps alone and among others: {refused}; batched, "
        f"it moves by {batched.leak:.2g} and differs by {batched.distance:.2g} (allowed {batched.limit:.2g})"
    )


def _has_experts(model: PreTrainedModel) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def _measure(model: PreTrainedModel, taps: tuple[int, ...], form: Form, *, flash: bool) -> _Figures:
    vocab = int(text_config(model.config).vocab_size)
    generator = torch.Generator().manual_seed(0)
    documents, others = (
        [torch.randint(0, vocab, (n,), generator=generator) for n in TEST_LENGTHS] for _ in range(2)
    )
    alone = taps_alone(model, taps, documents)
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
    drift, apart = (
        float(x) for x in (distance(moved[middle], there[middle], len(taps)), torch.stack(distances).max())
    )
    return _Figures(
        leak=float((there[middle] - moved[middle]).abs().max()),
        drift=drift,
        distance=apart,
        usual=usual_limit(model),
        limit=rounding_limit(model, taps, documents, apart),
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
