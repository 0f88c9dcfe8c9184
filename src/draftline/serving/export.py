"""Write a drafter as the folder that z-lab's code, SGLang and vLLM load, and prove it by loading it back.

`config.json` is written by hand, never through transformers: its `save_pretrained` drops the rope theta that
older readers look for, and engines take a missing key's default without a word. Tensor names and shapes are
z-lab's; there is no embedding and no head, which are the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.checkpoint.files import CheckpointFileSystem
from draftline.config import DrafterSpec
from draftline.data.fingerprint import hash_file
from draftline.data.output import writing
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.blocks import block_positions
from draftline.drafter.model import Drafter, drafter_of
from draftline.errors import CheckpointError, ConfigError
from draftline.resilience.fsio import TEMPORARY, FileSystem, disk_failures_explained, remove_tree
from draftline.serving.importing import CONFIG, MODEL, load_drafter, match_tensors
from draftline.serving.measured import CARD
from draftline.serving.published import ARCHITECTURE, OWN_KEYS
from draftline.serving.speculators import Verifier, speculators_config_json

Card = Callable[[str], str]
"""Text of a drafter's README, from the SHA-256 of its `model.safetensors`."""
SERVED_DTYPE = torch.bfloat16
PROOF_CONTEXT = 40
"""Context tokens of the block that an export is proved on."""
PROOF_TOLERANCE = 1e-5


def config_json(spec: DrafterSpec) -> str:
    """`config.json` of a drafter, with every key that a reader may look for, wherever it may look."""
    return json.dumps(_config(spec), indent=2) + "\n"


def _config(spec: DrafterSpec) -> dict[str, Any]:
    sliding = "sliding_attention" in spec.layer_types
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": _dflash_config(spec),
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
        "initializer_range": 0.02,
        "layer_types": list(spec.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window if sliding else None,
        "max_window_layers": spec.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        # transformers 4 reads the first two and ignores the third, transformers 5 the other way round.
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
    }
    causal = {spec.causal_in_block(layer) for layer in range(spec.num_layers)}
    if len(causal) == 1:
        config["is_causal"] = causal.pop()
    if spec.tokenizer_sha256 is not None:
        config[OWN_KEYS] = {"tokenizer_sha256": spec.tokenizer_sha256}
    return config


def _dflash_config(spec: DrafterSpec) -> dict[str, Any]:
    nested: dict[str, Any] = {
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
    }
    if spec.input_embedding_scale != 1.0:
        nested["input_embedding_scale"] = spec.input_embedding_scale
    return nested


def serving_tensors(spec: DrafterSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are served: bf16, contiguous, on the CPU, exactly the names and shapes of the spec.

    Raises:
        CheckpointError: a tensor is missing, unused or of another shape; all are listed.
    """
    matched = match_tensors(spec, weights, "the weights to export")
    # Copies: a trainer's weights are views of one buffer, and the file format refuses shared memory.
    return {
        name: tensor.detach().to("cpu", SERVED_DTYPE, copy=True).contiguous()
        for name, tensor in matched.items()
    }


def export_drafter(
    spec: DrafterSpec,
    weights: Mapping[str, Tensor],
    out: Path,
    card: Card | None = None,
    prove: Callable[[Path], None] = lambda _folder: None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write and prove a drafter's folder as z-lab's code, SGLang and vLLM load it.

    `out` appears whole or not at all. The same drafter there is written anew; a folder that holds anything but a
    drafter is refused.

    Args:
        card: writes its README, see `card.model_card`; None leaves it out.
        prove: a further check of the folder before it appears as `out`; what it raises leaves nothing behind.
        overwrite: replace another drafter in `out` too.

    Raises:
        ConfigError: `out` exists and is not a drafter's folder, or that of another drafter, or cannot be written.
        CheckpointError: the weights do not fit the spec, or the folder does not read back as written.
        DiskFullError: there is no room.
    """
    refuse_occupied(spec, weights, out, overwrite=overwrite)
    return _export(spec, weights, out, config_json(spec), card, prove)


def export_speculators(
    spec: DrafterSpec,
    weights: Mapping[str, Tensor],
    out: Path,
    verifier: Verifier,
    card: Card | None = None,
    prove: Callable[[Path], None] = lambda _folder: None,
    *,
    overwrite: bool = False,
) -> Path:
    """Like `export_drafter`, in the speculators library's format, from which vLLM serves drafter and target.

    Raises:
        ConfigError: as above, or the format cannot express this drafter.
        CheckpointError, DiskFullError: as above.
    """
    refuse_occupied(spec, weights, out, overwrite=overwrite)
    return _export(spec, weights, out, speculators_config_json(spec, verifier), card, prove)


def _export(
    spec: DrafterSpec,
    weights: Mapping[str, Tensor],
    out: Path,
    config: str,
    card: Card | None,
    prove: Callable[[Path], None],
) -> Path:
    require_writable(out)
    tensors = serving_tensors(spec, weights)
    temporary = _temporary(out)
    with disk_failures_explained(out.parent, "exporting the drafter"):
        try:
            _write(temporary, tensors, config, card)
            prove_export(spec, tensors, temporary)
            prove(temporary)
        except BaseException:  # raised again: what is half written or not proved must not stay
            with suppress(OSError):
                remove_tree(FileSystem(), temporary)
            raise
        _put_in_place(temporary, out)
    return out


def _temporary(out: Path) -> Path:
    return out.with_name(TEMPORARY + out.name)


def require_writable(out: Path) -> None:
    """Make sure that a folder can be written as `out`, before minutes are spent on measuring what goes in.

    Raises:
        ConfigError: the disk refuses, such as one that is mounted read-only.
        DiskFullError: there is no room for a folder.
    """
    temporary = _temporary(out)
    with writing(out, "nothing was exported"):
        out.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():  # of an export that was killed
            remove_tree(FileSystem(), temporary)
        temporary.mkdir()
        temporary.rmdir()


def refuse_occupied(
    spec: DrafterSpec, weights: Mapping[str, Tensor], out: Path, *, overwrite: bool = False
) -> None:
    """Make sure that writing a drafter to `out` loses nothing that the user may want.

    Raises:
        ConfigError: `out` is no drafter's folder or, unless it may be overwritten, that of another drafter; what it
            holds is named.
        CheckpointError: the weights do not fit the spec.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    known = {CONFIG, MODEL, CARD}
    if not out.is_dir() or not (out / CONFIG).is_file() or {path.name for path in out.iterdir()} - known:
        raise ConfigError(
            f"{out} exists and holds something other than an exported drafter; choose another folder"
        )
    if not overwrite and (found := _other_drafter(spec, weights, out)):
        raise ConfigError(f"{out} holds {found}; choose another folder, or --overwrite to replace it")


def _other_drafter(spec: DrafterSpec, weights: Mapping[str, Tensor], out: Path) -> str | None:
    """What lies in a drafter's folder, as far as it is not the drafter that is to be written there."""
    try:
        found_spec, found = load_drafter(out, spec.num_target_layers)
    except CheckpointError as error:
        return f"a drafter that cannot be read ({error})"
    differing = _differences(spec, found_spec, "here and", "there")
    if differing:
        return f"a drafter of another shape ({'; '.join(differing)})"
    lying, tensors = found.state_dict(), serving_tensors(spec, weights)
    if all(torch.equal(lying[name], tensor) for name, tensor in tensors.items()):
        return None
    return "a drafter of the same shape with other weights"


def _differences(ours: DrafterSpec, theirs: DrafterSpec, between: str, after: str = "") -> list[str]:
    """Fields that do not do the same in two drafters, each as OURS between THEIRS."""
    return [
        f"{name} {getattr(ours, name)!r} {between} {getattr(theirs, name)!r} {after}".rstrip()
        for name in type(ours).model_fields
        if ours.effective(name) != theirs.effective(name)
    ]


def _put_in_place(temporary: Path, out: Path) -> None:
    fs, old = FileSystem(), out.with_name(f"{TEMPORARY}old-{out.name}")
    if out.exists():
        fs.rename(out, old)
    fs.rename(temporary, out)
    fs.sync_folder(out.parent)
    if old.exists():
        remove_tree(fs, old)


def _write(folder: Path, tensors: dict[str, Tensor], config: str, card: Card | None) -> None:
    fs = CheckpointFileSystem()
    if folder.exists():
        remove_tree(fs, folder)
    fs.make_folder(folder)
    fs.write_tensors(folder / MODEL, tensors)
    texts = {CONFIG: config} if card is None else {CONFIG: config, CARD: card(hash_file(folder / MODEL))}
    for name, text in texts.items():
        fs.write_bytes(folder / name, text.encode())
    for name in (MODEL, *texts):
        fs.sync_file(folder / name)
    fs.sync_folder(folder)


def prove_export(spec: DrafterSpec, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load a folder back and compare architecture, names, shapes and the hidden states of one block, in fp32.

    Raises:
        CheckpointError: any of them differs.
    """
    read_spec, reloaded = load_drafter(folder, spec.num_target_layers)
    differing = _differences(spec, read_spec, "became")
    if differing:
        raise CheckpointError(f"the exported {folder / CONFIG} does not read back: {'; '.join(differing)}")
    original = drafter_of(spec, tensors)
    difference = (proof_block(original.float()) - proof_block(reloaded.float())).abs().max().item()
    if not difference <= PROOF_TOLERANCE:
        raise CheckpointError(
            f"the exported {folder / MODEL} computes something else: hidden states of one block differ by "
            f"{difference:.3g} (at most {PROOF_TOLERANCE}); check the disk and export again"
        )


@torch.no_grad()
def proof_block(drafter: Drafter) -> Tensor:
    """Hidden states [B, D] of one block after a fixed random context."""
    spec, generator = drafter.spec, torch.Generator().manual_seed(0)
    taps = torch.randn(PROOF_CONTEXT, spec.num_taps * spec.hidden_size, generator=generator)
    embeds = torch.randn(spec.block_size, spec.hidden_size, generator=generator)
    positions = torch.arange(PROOF_CONTEXT + 1)
    block = block_positions(positions, positions[-1:], spec.block_size)[0]
    return drafter(embeds, taps, positions[:-1], block, sdpa_attend([None] * spec.num_layers))
