"""How far apart two forwards of one target are, and how much of that is rounding.

Half precision rounds each layer's output, and a target carries that on and lets it grow: the deeper and wider it is,
the further two right forwards drift apart that differ only in the order of their sums (0.065 for 62 random layers of
5120 channels in bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline.target.forward import decoder_layers, share_weights

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Distance between a document's taps in two forwards that is rounding in every target; see `distance`."""
Hook = Callable[[nn.Module, Any, Any], Any]


def distance(a: Tensor, b: Tensor, num_taps: int) -> Tensor:
    """How far taps a are from b, both [tokens, K * D]: relative L2 of each token and tap, root mean square over
    tokens, largest over taps []. Each token by itself, because in trained targets the first one is often a
    thousand times larger than the others and would hide them."""
    split = [x.float().unflatten(-1, (num_taps, -1)) for x in (a, b)]  # [tokens, K, D]
    relative = (split[0] - split[1]).norm(dim=-1) / split[1].norm(dim=-1).clamp_min(1e-12)
    return relative.square().mean(dim=0).sqrt().max()


@torch.inference_mode()
def taps_alone(
    model: PreTrainedModel, taps: tuple[int, ...], documents: Sequence[Tensor], change: Hook | None = None
) -> list[Tensor]:
    """Taps of each document in a plain forward of its own, [tokens, K * D].

    Args:
        change: a hook on every layer, whose output goes on in place of the layer's.
    """
    copy = share_weights(model)
    _, _, layers = decoder_layers(copy)
    if change is not None:
        for layer in layers:
            layer.register_forward_hook(change)
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


def usual_limit(model: PreTrainedModel) -> float:
    """The distance up to which taps of any target in this one's type differ by rounding only."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return TOLERANCE.get(weight.dtype, TOLERANCE[torch.float32])


def rounding_limit(
    model: PreTrainedModel, taps: tuple[int, ...], documents: Sequence[Tensor], found: float
) -> float:
    """The distance up to which taps of `documents` differ by rounding only.

    More than rounding makes in every target is allowed if this one's taps move as far when each of its layers' outputs
    is off by half a unit in the last place, up or down: right forwards round the same sums, and are closer.

    Args:
        found: the distance in question; the target is run only if it is more than usual.
    """
    usual = usual_limit(model)
    if found <= usual:
        return usual
    plain, moved = (taps_alone(model, taps, documents, change) for change in (None, _last_bits()))
    return max(usual, *(float(distance(a, b, len(taps))) for a, b in zip(moved, plain, strict=True)))


def _last_bits() -> Hook:
    generator = torch.Generator().manual_seed(0)

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        signs = 2 * torch.randint(0, 2, states.shape, generator=generator).to(states.device) - 1
        moved = (states.float() * (1 + signs * (torch.finfo(states.dtype).eps / 2))).to(states.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    return hook


def _keep(seen: dict[int, Tensor], tap: int, output: Any) -> None:
    seen[tap] = output[0] if isinstance(output, tuple) else output
