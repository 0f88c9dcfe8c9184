"""`config.json` in the format of the speculators library (0.9); the tensors are those of z-lab's layout.

Embedding and head belong to the verifier and are not stored, as the library itself stores drafters with the
target's whole vocabulary. Its class defaults (a vocabulary of 32000, blocks of 8) make every key necessary.
There is no `model_type`: vLLM recognises the format by its absence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from draftline.config import DrafterSpec
from draftline.errors import ConfigError
from draftline.serving.published import OWN_KEYS

VERSION = "0.9.0"
"""Version of the library whose format this is."""


@dataclass(frozen=True)
class Verifier:
    """The target, as the format names it."""

    name_or_path: str
    architectures: tuple[str, ...]


def speculators_config_json(spec: DrafterSpec, verifier: Verifier) -> str:
    """The configuration file of a drafter.

    Raises:
        ConfigError: causality or embedding scale that the format has no key for.
    """
    refuse_inexpressible(spec)
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        # The library counts the embedding as layer 0.
        "aux_hidden_state_layer_ids": [index + 1 for index in spec.target_layer_ids],
        "draft_vocab_size": spec.vocab_size,
        "target_hidden_size": spec.hidden_size,
        # The library means sliding layers by this; vLLM 0.32 takes its opposite for the causality of all layers.
        "sliding_window_non_causal": not _causal(spec),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(spec),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
    }
    if spec.tokenizer_sha256 is not None:
        config[OWN_KEYS] = {"tokenizer_sha256": spec.tokenizer_sha256}
    return json.dumps(config, indent=2) + "\n"


def _layer_config(spec: DrafterSpec) -> dict[str, Any]:
    sliding = "sliding_attention" in spec.layer_types
    return {
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(spec.layer_types),
        "is_causal": _causal(spec),
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window if sliding else None,
        "max_window_layers": spec.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
    }


def _causal(spec: DrafterSpec) -> bool:
    """Whether all layers, which agree, are causal inside a block."""
    return spec.causal_in_block(0)


def refuse_inexpressible(spec: DrafterSpec) -> None:
    """Make sure that the format has a key for all that a drafter does.

    Raises:
        ConfigError: it has none for the layers' causality or the scale of the embedding.
    """
    what = None
    if len({spec.causal_in_block(layer) for layer in range(spec.num_layers)}) > 1:
        what = "layers that differ in causality, which vLLM serves as one"
    elif _causal(spec) and "full_attention" in spec.layer_types:
        what = "full layers that are causal"
    elif spec.input_embedding_scale != 1.0:
        what = "a scaled input embedding"
    if what is not None:
        raise ConfigError(f"the speculators format has no key for {what}; export in z-lab's format instead")
