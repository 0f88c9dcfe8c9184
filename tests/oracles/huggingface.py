"""transformers' own DFlash decoder as an oracle: `generate(assistant_model=..., speculation_type="dflash")`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from draftline.decoding.greedy import Limit
from draftline.drafter.model import Drafter
from draftline.target.load import Target

RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def assistant(drafter: Drafter) -> nn.Module:
    """The one DFlash drafter class that transformers ships, with our weights; names must match strictly."""
    spec = drafter.spec
    config = MuseGlimmerAssistantConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        layer_types=list(spec.layer_types),
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        target_layer_ids=list(spec.target_layer_ids),
    )
    model = cast("nn.Module", MuseGlimmerAssistantModel(config))
    model.to(dtype=drafter.fc.weight.dtype)
    model.load_state_dict({_renamed(name): tensor for name, tensor in drafter.state_dict().items()})
    return model.eval()


def _renamed(name: str) -> str:
    for ours, theirs in RENAMED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


@dataclass(frozen=True)
class Generated:
    """An answer and the target passes that it took after the prompt was read."""

    tokens: tuple[int, ...]
    steps: int


def generate(target: Target, prompt: list[int], limit: Limit, drafter: nn.Module | None = None) -> Generated:
    """Greedy answer by transformers, with or without a drafter."""
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = target.model.register_forward_hook(count)
    extra = {} if drafter is None else {"assistant_model": drafter, "speculation_type": "dflash"}
    generate_text: Any = target.model.generate
    output = generate_text(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=limit.max_new_tokens,
        eos_token_id=sorted(limit.stop_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        **extra,
    )
    hook.remove()
    return Generated(tuple(output[0, len(prompt) :].tolist()), passes - 1)
