"""What a published drafter's `config.json` means, by z-lab, Model-Optimizer, TorchSpec or speculators.

A key that would make the drafter compute something that this version does not is refused rather than ignored,
because engines honour it and training would not.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from draftline.config import DrafterSpec
from draftline.errors import CheckpointError
from draftline.target.load import CAUSAL_SUFFIXES

ARCHITECTURE = "DFlashDraftModel"
OWN_KEYS = "draftline"
"""Key of what only Draftline records; other readers keep keys that they do not know and use none of them."""

PLAIN_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
}
"""Fields of a spec that have one name everywhere, at the top or inside `dflash_config`."""
UNTRAINED: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "shift_label": (None, False),
    "sample_from_anchor": (None, False),
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
}
"""Keys that change what is computed, with the values under which they do not."""


def spec_from_config(
    config: dict[str, Any], source: str, num_target_layers: int | None = None
) -> DrafterSpec:
    """The architecture that a published `config.json` describes.

    Raises:
        CheckpointError: a key is missing or asks for what this version does not compute.
    """
    if config.get("speculators_model_type") == "dflash":
        config = _from_speculators(config, source)
    _refuse_other_models(config, source)
    nested = config.get("dflash_config") or {}
    merged = {**config, **{key: value for key, value in nested.items() if value is not None}}
    raw = {field: merged.get(key) for field, key in PLAIN_KEYS.items()} | {
        "rope_theta": _rope_theta(config, source),
        "num_target_layers": _target_layers(merged, num_target_layers, source),
        "input_embedding_scale": merged.get("input_embedding_scale", 1.0),
        "bos_token_id": _first(merged.get("bos_token_id")),
        "eos_token_id": _first(merged.get("eos_token_id")),
        "pad_token_id": merged.get("pad_token_id"),
        "tokenizer_sha256": (config.get(OWN_KEYS) or {}).get("tokenizer_sha256"),
        **_attention(merged),
    }
    try:
        return DrafterSpec.model_validate(raw)
    except ValidationError as error:
        wrong = [f"{item['loc'][0]}={item['input']!r} ({item['msg']})" for item in error.errors()]
        raise CheckpointError(
            f"{source} is not a complete drafter configuration: {'; '.join(wrong)}"
        ) from None


def _attention(merged: dict[str, Any]) -> dict[str, Any]:
    """Layer types, window and causality; the three spellings of z-lab, SGLang and Model-Optimizer."""
    num_layers = merged.get("num_hidden_layers") or 0
    types = merged.get("layer_types") or ["full_attention"] * num_layers
    window = merged.get("sliding_window")
    if merged.get("use_swa"):
        types, window = ["sliding_attention"] * num_layers, merged.get("swa_window_size", window)
    causal = merged.get("is_causal", merged.get("causal"))
    uniform = len(set(types)) == 1
    if uniform and causal == (types[0] == "sliding_attention"):
        causal = None  # what engines do anyway
    return {
        "layer_types": types,
        "sliding_window": window if "sliding_attention" in types else None,
        "is_causal": causal,
    }


def _rope_theta(config: dict[str, Any], source: str) -> float | None:
    """Rope theta, which every reader must find equal.

    Raises:
        CheckpointError: two different values, or rope that is scaled or partial.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kinds = {settings.get("rope_type", settings.get("type", "default")) for settings in (parameters, scaling)}
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kinds != {"default"} or partial != 1.0:
        raise CheckpointError(
            f"{source} asks for rope {sorted(kinds)} with partial factor {partial}; this version computes "
            "plain rope only"
        )
    given = {value for value in (parameters.get("rope_theta"), config.get("rope_theta")) if value is not None}
    if len(given) > 1:
        raise CheckpointError(
            f"{source} names two rope thetas, {sorted(given)}; engines would not agree on one"
        )
    return float(given.pop()) if given else None


def _target_layers(merged: dict[str, Any], given: int | None, source: str) -> int | None:
    """Layers of the target. TorchSpec and AngelSpec store the number of taps under that name."""
    stored, ids = merged.get("num_target_layers"), merged.get("target_layer_ids")
    if isinstance(stored, int) and isinstance(ids, list) and max(ids, default=0) < stored:
        return stored
    if given is None and ids:
        raise CheckpointError(
            f"{source} does not tell how many layers the target has (num_target_layers={stored}, taps "
            f"{ids}); name it: --target TARGET"
        )
    return given


def _refuse_other_models(config: dict[str, Any], source: str) -> None:
    """Refuse what would be loaded but computed differently."""
    nested = config.get("dflash_config") or {}
    architectures = config.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        other = f"this version reads {ARCHITECTURE} drafters"
        model = "the folder of a language model, such as a target, and no drafter's"
        what = model if any(str(name).endswith(CAUSAL_SUFFIXES) for name in architectures) else other
        raise CheckpointError(
            f"{source} is a {architectures}: {what}; name an exported drafter, a checkpoint or a run folder"
        )
    for key, accepted in UNTRAINED.items():
        value = nested.get(key, config.get(key))
        if value not in accepted:
            raise CheckpointError(f"{source} sets {key}={value!r}, which this version does not compute")


def _from_speculators(config: dict[str, Any], source: str) -> dict[str, Any]:
    """A speculators configuration in z-lab's terms; its tap ids count the embedding as layer 0."""
    layer = config.get("transformer_layer_config")
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(layer, dict) or not isinstance(ids, list):
        raise CheckpointError(f"{source} lacks transformer_layer_config or aux_hidden_state_layer_ids")
    vocabulary, pruned = layer.get("vocab_size"), config.get("draft_vocab_size")
    if pruned != vocabulary:
        raise CheckpointError(
            f"{source} has a reduced vocabulary (draft_vocab_size={pruned} of {vocabulary}); this version "
            "reads drafters with the target's whole vocabulary"
        )
    both_ways = bool(config.get("sliding_window_non_causal"))  # full layers are so in any case
    return {
        **layer,
        OWN_KEYS: config.get(OWN_KEYS),
        "architectures": [ARCHITECTURE],
        "sample_from_anchor": config.get("sample_from_anchor"),
        "num_target_layers": None,
        "dflash_config": {
            "block_size": config.get("block_size"),
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [index - 1 for index in ids],
            **({"causal": False} if both_ways else {}),
        },
    }


def _first(token: int | list[int] | None) -> int | None:
    return token[0] if isinstance(token, list) else token
