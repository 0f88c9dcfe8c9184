"""From a target's configuration to a complete drafter architecture: taps, mask token, shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from draftline.config import DrafterConfig, DrafterSpec, TargetConfig
from draftline.data.fingerprint import hash_tokenizer
from draftline.drafter.model import refuse_impossible_shapes
from draftline.errors import ConfigError
from draftline.target.load import resolve_path, text_config


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Tapped layers by the published rule (z-lab dflash, `build_target_layer_ids`).

    0-based ids of layers whose outputs are read: evenly spread from layer 1 to layer N-3, halves rounded to
    even; a single tap is the middle layer.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def resolve_target_layer_ids(wanted: DrafterConfig, num_target_layers: int) -> tuple[int, ...]:
    """The taps in use: the ones given (negative ids count from the end), else the published rule.

    Raises:
        ConfigError: an id is out of range or named twice, or the target is too shallow for the rule.
    """
    if wanted.target_layer_ids is None:
        return _default_taps_that_fit(wanted.num_taps, num_target_layers)
    ids = wanted.target_layer_ids
    resolved = tuple(i + num_target_layers if i < 0 else i for i in ids)
    outside = [i for i, r in zip(ids, resolved, strict=True) if not 0 <= r < num_target_layers]
    if outside:
        raise ConfigError(
            f"tap {outside[0]} is outside the target's layers 0..{num_target_layers - 1}; name layers that it has"
        )
    if len(set(resolved)) != len(resolved):
        raise ConfigError(
            f"taps {list(resolved)} name a layer twice; the target has {num_target_layers} layers; name each layer once"
        )
    return resolved


def _default_taps_that_fit(num_taps: int, num_target_layers: int) -> tuple[int, ...]:
    ids = default_target_layer_ids(num_target_layers, num_taps)
    if len(set(ids)) != num_taps or min(ids) < 0 or max(ids) >= num_target_layers:
        raise ConfigError(
            f"drafter.num_taps={num_taps} needs a target of at least {num_taps + 3} layers, this one has "
            f"{num_target_layers}; use at most drafter.num_taps={max(1, num_target_layers - 3)}, or name layers "
            f"(0..{num_target_layers - 1}) in drafter.target_layer_ids"
        )
    return ids


def resolve_mask_token_id(
    wanted: int | None, tokenizer: PreTrainedTokenizerBase, head_rows: int, stops: tuple[int, ...]
) -> int:
    """Embedding row that stands for a token to be drafted; the target must never write it.

    Order: the one given, the tokenizer's mask token, the first row beyond the tokenizer (padded head).

    Args:
        head_rows: rows of the target's output head, V.
        stops: tokens that end an answer, see `stop_token_ids`.

    Raises:
        ConfigError: none can be found, or the one given is outside the head, ends text, pads, or is text.
    """
    own: Any = tokenizer.mask_token_id
    mask = wanted if wanted is not None else own
    spare = 1 + max(tokenizer.get_vocab().values())  # not its length: ids may have gaps
    if mask is None and head_rows > spare:
        return spare
    if mask is None:
        raise ConfigError(
            f"the target has no mask token and no spare embedding row ({head_rows} rows, token ids up to "
            f"{spare - 1}); set drafter.mask_token_id to a special token that the target never writes"
        )
    _refuse_unsafe_mask(int(mask), tokenizer, head_rows, stops)
    return int(mask)


def _refuse_unsafe_mask(
    mask: int, tokenizer: PreTrainedTokenizerBase, head_rows: int, stops: tuple[int, ...]
) -> None:
    if not 0 <= mask < head_rows:
        raise ConfigError(f"mask_token_id={mask} is outside the target's {head_rows} embedding rows")
    if mask in (*stops, tokenizer.pad_token_id):
        raise ConfigError(
            f"mask_token_id={mask} is the target's end-of-text or padding token; choose a reserved token that is "
            "neither"
        )
    added = tokenizer.added_tokens_decoder
    special = mask in tokenizer.all_special_ids or (mask in added and added[mask].special)
    if mask in tokenizer.get_vocab().values() and not special:
        token = tokenizer.convert_ids_to_tokens(mask)
        raise ConfigError(
            f"mask_token_id={mask} is the ordinary token {token!r}, which the target may write; choose a special token"
        )


def context_limit(text_config: Any) -> int | None:
    """Most tokens that a target can read by its text configuration; None where it does not say.

    Stretched rope (yarn, dynamic, linear) reaches `factor` times the length it was trained at, which some
    configurations keep as their `max_position_embeddings`.
    """
    limit: int | None = _field(text_config, "max_position_embeddings", None)
    rope: dict[str, Any] = (
        _field(text_config, "rope_parameters", None) or _field(text_config, "rope_scaling", None) or {}
    )
    if limit is None or rope.get("rope_type", rope.get("type")) not in ("yarn", "dynamic", "linear"):
        return limit
    trained = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(trained * (rope.get("factor") or 1)))


def declared_context(config: TargetConfig) -> int | None:
    """`context_limit` of a target by its config.json as it is written, for which its code need not be trusted; None
    too for a folder that holds a tokenizer only."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(resolve_path(config), revision=config.revision)
    except OSError:
        return None
    return context_limit(SimpleNamespace(**raw.get("text_config", raw)))


def resolve_spec(
    wanted: DrafterConfig,
    target: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    head_rows: int,
    scale: float,
) -> DrafterSpec:
    """Fill in everything that follows from the target.

    Only rope theta is copied of the target's rope settings: a partial factor or m-rope in a drafter's config
    is honoured by engines but not by training (dflash.md 1.5).

    Args:
        head_rows: rows of the target's output head, V.
        scale: factor on the target's embedding rows.

    Raises:
        ConfigError: taps, mask token, layer types or shapes cannot work.
    """
    text = text_config(target)
    num_layers = wanted.num_layers
    layer_types = wanted.layer_types or ("full_attention",) * num_layers
    _check_layer_types(wanted, layer_types)
    heads = wanted.num_heads or text.num_attention_heads
    spec = DrafterSpec(
        hidden_size=text.hidden_size,
        intermediate_size=wanted.intermediate_size or _field(text, "intermediate_size", 3 * text.hidden_size),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=wanted.num_kv_heads or _field(text, "num_key_value_heads", heads),
        head_dim=wanted.head_dim or _field(text, "head_dim", text.hidden_size // text.num_attention_heads),
        vocab_size=head_rows,
        rms_norm_eps=_field(text, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(text),
        max_position_embeddings=_field(text, "max_position_embeddings", 32768),
        block_size=wanted.block_size,
        mask_token_id=resolve_mask_token_id(
            wanted.mask_token_id, tokenizer, head_rows, stop_token_ids(text.eos_token_id, tokenizer)
        ),
        target_layer_ids=resolve_target_layer_ids(wanted, text.num_hidden_layers),
        num_target_layers=text.num_hidden_layers,
        layer_types=tuple(layer_types),
        sliding_window=wanted.sliding_window if "sliding_attention" in layer_types else None,
        input_embedding_scale=scale,
        bos_token_id=_single(tokenizer.bos_token_id),
        eos_token_id=_single(tokenizer.eos_token_id),
        pad_token_id=_single(tokenizer.pad_token_id),
        tokenizer_sha256=hash_tokenizer(tokenizer),
    )
    refuse_impossible_shapes(spec)
    return spec


def _check_layer_types(wanted: DrafterConfig, layer_types: tuple[str, ...]) -> None:
    if len(layer_types) != wanted.num_layers:
        raise ConfigError(
            f"drafter.layer_types has {len(layer_types)} entries for num_layers={wanted.num_layers}"
        )
    if "sliding_attention" in layer_types and wanted.sliding_window is None:
        raise ConfigError(
            "drafter.layer_types has sliding layers; set drafter.sliding_window (tokens, such as 2048)"
        )
    if "sliding_attention" not in layer_types and wanted.sliding_window is not None:
        raise ConfigError(
            f"drafter.sliding_window={wanted.sliding_window} has no effect without a sliding layer; name them in "
            "drafter.layer_types (full_attention or sliding_attention, one for each layer), or leave it out"
        )
    if wanted.sliding_window is not None and wanted.sliding_window < wanted.block_size:
        raise ConfigError(
            f"drafter.sliding_window={wanted.sliding_window} is smaller than block_size={wanted.block_size}"
        )


def _rope_theta(text: PreTrainedConfig) -> float:
    rope: dict[str, Any] = _field(text, "rope_parameters", {}) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 keeps one set of parameters per layer type
    return float(rope.get("rope_theta", _field(text, "default_theta", 10000.0)))


def _field(config: PreTrainedConfig, name: str, default: Any) -> Any:
    """A foreign configuration's attribute; families differ in which they have."""
    value = getattr(config, name, None)
    return default if value is None else value


def _single(token: Any) -> int | None:
    return token if isinstance(token, int) else None


def stop_token_ids(model_eos: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end an answer: the generation config's and the tokenizer's end-of-text."""
    listed = model_eos if isinstance(model_eos, list) else [model_eos]
    ids = {i for i in [*listed, tokenizer.eos_token_id] if i is not None}
    return tuple(sorted(ids))
