"""Warm start: training begins at the weights of another drafter of the same architecture for the same tokenizer.

Nothing is adapted. A drafter whose taps, block size or positions differ has learnt something else, and would start
worse than its loss tells; so every difference is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftline.config import DrafterConfig, DrafterSpec
from draftline.errors import CheckpointError, ConfigError
from draftline.serving.importing import find_drafter, load_drafter

IRRELEVANT = {"max_position_embeddings", "bos_token_id", "pad_token_id"}
"""Fields of a spec that change neither what is computed nor what is learnt."""


@dataclass(frozen=True)
class WarmStart:
    """Weights to start from."""

    source: Path
    weights: Mapping[str, Tensor]
    """fp32, by name."""
    sha256: str
    """Of the weights: what a resumed run must find again, wherever the folder has gone."""


def load_warm_start(wanted: DrafterConfig, spec: DrafterSpec, output: Path) -> WarmStart | None:
    """The weights that `drafter.init_from` names; None when it names nothing.

    Args:
        spec: the architecture that will be trained.
        output: the run's own folder, which cannot be the start of itself.

    Raises:
        ConfigError: the folder is no drafter, lies in the run's own folder, or differs; each difference is named.
        CheckpointError: its files are damaged, incomplete or of an unknown kind.
    """
    if wanted.init_from is None:
        return None
    folder = Path(wanted.init_from).expanduser()
    if folder.resolve().is_relative_to(output.resolve()):
        raise ConfigError(
            f"drafter.init_from={folder} lies in this run's own output {output}; a run resumes by itself, "
            "start from another folder"
        )
    source = find_drafter(folder)
    found, drafter = load_drafter(source, spec.num_target_layers)
    refuse_other_architecture(found, spec, source)
    weights = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    return WarmStart(source, weights, _hash_weights(weights, source))


def refuse_other_architecture(found: DrafterSpec, wanted: DrafterSpec, source: Path) -> None:
    """Make sure that two specs describe one architecture.

    Raises:
        ConfigError: they do not; every field is named with both values and, where there is one, the setting.
    """
    differences = [
        f"{name} is {getattr(found, name)!r} there and {getattr(wanted, name)!r} here"
        + (f" (drafter.{name})" if name in DrafterConfig.model_fields else "")
        for name in DrafterSpec.model_fields
        if _differs(name, found, wanted)
    ]
    if differences:
        raise ConfigError(
            f"drafter.init_from={source} is a drafter of another kind: {'; '.join(differences)}. Make the "
            "settings agree, or start without it"
        )


def _differs(name: str, found: DrafterSpec, wanted: DrafterSpec) -> bool:
    if name in IRRELEVANT:
        return False
    if name in ("tokenizer_sha256", "eos_token_id") and None in (getattr(found, name), getattr(wanted, name)):
        return False  # not every trainer records it
    return found.effective(name) != wanted.effective(name)


def _hash_weights(weights: Mapping[str, Tensor], source: Path) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{source}: {name} holds a value that is not finite; use an earlier checkpoint"
            )
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
