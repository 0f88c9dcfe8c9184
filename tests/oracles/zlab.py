"""z-lab's own `dflash` 0.1.0 package as an oracle: the same weights, its forward, its decoder."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from draftline.config import DrafterSpec
from draftline.decoding.greedy import Limit
from draftline.drafter.model import Drafter

dflash_model = pytest.importorskip("dflash.model", reason="oracle: pip install --no-deps dflash==0.1.0")


def zlab_config(spec: DrafterSpec) -> Qwen3Config:
    """The configuration that z-lab's class reads, built from a spec without our exporter."""
    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        layer_types=list(spec.layer_types),
        use_sliding_window="sliding_attention" in spec.layer_types,
        sliding_window=spec.sliding_window,
    )
    extra = {
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": {
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
            "input_embedding_scale": spec.input_embedding_scale,
        },
    }
    if spec.is_causal is not None:
        extra["is_causal"] = spec.is_causal
    config.update(extra)
    return config


def zlab_drafter(drafter: Drafter) -> torch.nn.Module:
    """z-lab's model with our weights; a missing or unused tensor is an error."""
    model = dflash_model.DFlashDraftModel(zlab_config(drafter.spec))
    model.to(next(drafter.parameters()).dtype)
    model.load_state_dict(drafter.state_dict(), strict=True)
    return model.eval()


def zlab_block(model: torch.nn.Module, block_embeds: Tensor, taps: Tensor) -> Tensor:
    """z-lab's hidden states [B, D] of one block after `taps` [S, K*D] of one whole document prefix."""
    return model(
        position_ids=torch.arange(taps.shape[0] + block_embeds.shape[0])[None],
        target_hidden=taps[None],
        noise_embedding=block_embeds[None],
    )[0]


def zlab_decode(
    model: torch.nn.Module, target: torch.nn.Module, prompt: list[int], limit: Limit
) -> tuple[list[int], list[int]]:
    """Answer and tokens of each verify step by z-lab's decoder, greedy."""
    dflash_model._cuda_time = time.perf_counter  # it synchronises a GPU that need not be there
    result = dflash_model.dflash_generate(
        model,
        target,
        torch.tensor([prompt]),
        limit.max_new_tokens,
        sorted(limit.stop_token_ids) or None,
        return_stats=True,
    )
    return result.output_ids[0, len(prompt) :].tolist(), list(result.acceptance_lengths)
