"""Warm start: training begins at the weights of another drafter of the same architecture for the same tokenizer.

Nothing is adapted. A drafter whose taps, block size or positions differ has learnt something else, and would start
worse than its loss tells; so every difference is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from draftline.config import DrafterConfig, DrafterSpec
from draftline.errors import CheckpointError, ConfigError
from draftline.serving.importing import find_drafter, load_drafter

IRRELEVANT = {"max_position_embeddings", "bos_token_id", "pad_token_id"}
"""Fields of a spec that change neither what is computed nor what is learnt."""

PER_LAYER = {"layer_types", "sliding_window", "is_causal"}
MAY_BE_UNKNOWN = {"tokenizer_sha256", "eos_token_id"}
"""Not every trainer records them."""


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
        f"{name} is {theirs!r} there and {ours!r} here"
        + (f" (drafter.{name})" if name in DrafterConfig.model_fields else "")
        for name in DrafterSpec.model_fields
        if name not in IRRELEVANT
        for theirs, ours in [_values(name, found, wanted)]
        if theirs != ours
    ]
    if differences:
        raise ConfigError(
            f"drafter.init_from={source} is a drafter of another kind: {'; '.join(differences)}. Make the "
            "settings agree, or start without it"
        )


def _values(name: str, found: DrafterSpec, wanted: DrafterSpec) -> tuple[object, object]:
    """A field of two specs by what it does, as it is compared and shown."""
    values = found.effective(name), wanted.effective(name)
    if name in PER_LAYER:  # over the layers that both have: num_layers is a difference of its own
        shared = min(found.num_layers, wanted.num_layers)
        theirs, ours = (list(cast("Sequence[object]", value))[:shared] for value in values)
        return theirs, ours
    if name in MAY_BE_UNKNOWN and None in values:
        return None, None
    return values


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
