"""SGLang's own model file loads an export whole and computes what the trainer computes.

SGLang ignores unknown tensors and leaves missing ones as they are, so parameters are poisoned with NaN first.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d SOURCE
    SGLANG_SOURCE=SOURCE pytest tests/engines/test_sglang.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.serving.export import export_drafter
from tests.engines.sglang_source import load_poisoned, load_sglang, sglang_block
from tests.oracles.tiny import FULL, MIXED, packed_row, random_drafter, row_hidden, tiny_spec

SOURCE = os.environ.get("SGLANG_SOURCE")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(SOURCE is None, reason="SGLANG_SOURCE names no unpacked wheel"),
]
LAYOUTS = {
    "full": {"layer_types": FULL},
    "mixed": {"layer_types": MIXED, "sliding_window": 6},
    "sliding": {"layer_types": ("sliding_attention",) * 3, "sliding_window": 6},
    "sliding, both ways": {
        "layer_types": ("sliding_attention",) * 3,
        "sliding_window": 6,
        "is_causal": False,
    },
}


def sglang_model(folder: Path) -> torch.nn.Module:
    """SGLang's model with what a folder gives it."""
    return load_poisoned(load_sglang(Path(str(SOURCE)))[0], folder)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_parameter_is_loaded_and_a_block_is_the_trainers(layout, tmp_path):
    drafter = random_drafter(tiny_spec(**layout), dtype=torch.bfloat16).float()
    folder = export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    row = packed_row(drafter.spec, (30,), [3, 11, 24])
    row = replace(row, taps=row.taps.float(), block_embeds=row.block_embeds.float())

    model = sglang_model(folder)
    hidden = row_hidden(drafter, row)

    assert [name for name, parameter in model.named_parameters() if parameter.isnan().any()] == []
    for block, anchor in enumerate((3, 11, 24)):
        embeds = row.block_embeds.unflatten(0, (-1, drafter.spec.block_size))[block]
        assert (sglang_block(model, embeds, row.taps[:anchor]) - hidden[block]).abs().max() < 1e-5


def test_the_poison_shows_a_renamed_tensor(tmp_path):
    drafter = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    folder = export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.mlp.down.weight"] = tensors.pop("layers.1.mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors")

    model = sglang_model(folder)

    assert model.get_parameter("layers.1.mlp.down_proj.weight").isnan().all()
