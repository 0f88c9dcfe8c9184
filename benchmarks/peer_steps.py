"""What `peers.py` measures: one step of other trainers of DFlash drafters, through their own public classes."""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from shapes import SHAPES
from torch import Tensor, nn
from transformers import Qwen3Config

from draftline.config import DrafterSpec

GAMMA = 7.0
"""Of the loss weights exp(-(slot - 1) / gamma), as in `step.py`."""


@dataclass(frozen=True)
class Row:
    """One document of random tokens and hidden states on the device, every token supervised."""

    config: Qwen3Config
    """The drafter's decoder layers."""
    spec: DrafterSpec
    blocks: int
    tokens: Tensor
    """[1, S]"""
    taps: Tensor
    """[1, S, K * D]"""
    final: Tensor
    """[1, S, D], the target's last hidden states"""

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        return self.taps.dtype


@dataclass(frozen=True)
class Built:
    """A peer's trainer, ready."""

    model: nn.Module
    step: Callable[[], Tensor | float]
    """Forward, backward, clipping and AdamW; gives the loss."""
    path: str
    """The kernels it was told to use."""


def make_row(name: str, options: argparse.Namespace) -> Row:
    """The row of one shape."""
    torch.manual_seed(0)
    shape, device = SHAPES[name], options.device
    spec = shape.spec()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Row(
        config=shape.target(num_layers=spec.num_layers),
        spec=spec,
        blocks=options.blocks,
        tokens=torch.randint(shape.vocab - 1, (1, options.tokens), device=device),
        taps=torch.randn(1, options.tokens, spec.num_taps * shape.hidden, dtype=dtype, device=device),
        final=torch.randn(1, options.tokens, shape.hidden, dtype=dtype, device=device),
    )


def build_speculators(row: Row) -> Built:
    """speculators: its DFlash model, losses and optimizer."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # noqa: PLC0415
    from speculators.train.optimizers import build_optimizers  # noqa: PLC0415

    on_cuda, spec = row.device.type == "cuda", row.spec
    attention, kernel = ("simple_flex_attention", "fused") if on_cuda else ("sdpa", "eager")
    row.config._attn_implementation = attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=row.config,
        draft_vocab_size=spec.vocab_size,
        block_size=spec.block_size,
        aux_hidden_state_layer_ids=[tap + 1 for tap in spec.target_layer_ids],
        mask_token_id=spec.mask_token_id,
    )
    with row.device:
        model = DFlashDraftModel(config)
    for table in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        nn.init.normal_(table.weight, std=0.02)
    how, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation=kernel,
        dflash_decay_gamma=GAMMA,
        max_anchors=row.blocks,
        per_position_loss_weight="fixed-exp-decay",
    )
    if kernel == "fused":
        give_kernels_their_own_tiles()
    (optimizer,) = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=1e-3, weight_decay=0.01))
    ones, zeros = torch.ones_like(row.tokens), torch.zeros_like(row.tokens)
    positions = torch.arange(row.tokens.shape[1], device=row.device).unsqueeze(0)
    model.train()

    def step() -> Tensor:
        with torch.autocast(row.device.type, row.dtype, enabled=on_cuda):
            _, loss, _ = model(
                hidden_states=row.taps,
                input_ids=row.tokens,
                loss_mask=ones,
                verifier_last_hidden_states=row.final,
                document_ids=zeros,
                position_ids=positions,
                **how,
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Built(model, step, f"{attention}, {kernel} loss")


def give_kernels_their_own_tiles() -> None:
    """Undo that the forward and the backward kernel of speculators' loss share one list of tiles to try.

    torch 2.11 cannot compile a step that uses both otherwise: "ListVariable is already tracked for mutation".
    """
    from speculators.losses import fused  # noqa: PLC0415

    for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
        kernel.configs = copy.deepcopy(kernel.configs)


def build_specforge(row: Row) -> Built:
    """SpecForge: its DFlash draft, training model, strategy, optimizer and trainer core."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # noqa: PLC0415
    from specforge.modeling.draft.dflash import DFlashDraftModel  # noqa: PLC0415
    from specforge.optimizer import BF16Optimizer  # noqa: PLC0415
    from specforge.runtime.contracts import TrainBatch  # noqa: PLC0415
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig  # noqa: PLC0415
    from specforge.training.controller import TrainerCore  # noqa: PLC0415
    from specforge.training.strategies.base import DFlashTrainStrategy  # noqa: PLC0415

    spec = row.spec
    attention = "flex_attention" if row.device.type == "cuda" else "sdpa"
    row.config._attn_implementation = attention
    row.config.update(
        {
            "num_target_layers": spec.num_target_layers,
            "block_size": spec.block_size,
            "dflash_config": {
                "mask_token_id": spec.mask_token_id,
                "target_layer_ids": list(spec.target_layer_ids),
            },
        }
    )
    with row.device:
        draft = DFlashDraftModel(row.config)
        head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
    for table in (head, embedding):
        nn.init.normal_(table.weight, std=0.02)
        table.requires_grad_(requires_grad=False)
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=spec.mask_token_id,
        block_size=spec.block_size,
        attention_backend=attention,
        num_anchors=row.blocks,
        loss_decay_gamma=GAMMA,
    ).to(row.dtype)
    backend = FSDPTrainingBackend(
        ParallelConfig(),
        optimizer_factory=functools.partial(BF16Optimizer, lr=6e-4, max_grad_norm=1.0, warmup_ratio=0.04),
    )
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    core = TrainerCore(DFlashTrainStrategy(model), backend)
    mask = torch.ones_like(row.tokens, dtype=torch.float32)
    tensors = {"input_ids": row.tokens, "hidden_states": row.taps, "loss_mask": mask}
    batch = TrainBatch(sample_ids=["row"], strategy="dflash", tensors=tensors)
    model.train()
    return Built(model, lambda: core.train_step(batch).loss, attention)


@dataclass(frozen=True)
class Peer:
    """Another trainer of DFlash drafters."""

    needs: tuple[str, ...]
    """Modules that its `build` imports."""
    build: Callable[[Row], Built]
    notes: str
    """What remains different of the step, and which of its training defaults were set aside to compare."""


PEERS = {
    "speculators": Peer(
        ("speculators.models.dflash", "speculators.train.optimizers"),
        build_speculators,
        "labels are the argmax of target logits made in the step; set aside: Muon, D-PACE, a window on all layers",
    ),
    "specforge": Peer(
        (
            "specforge.algorithms.common.dflash_family_model",
            "specforge.training.backend",
            "specforge.training.controller",
        ),
        build_specforge,
        "logits computed again in the backward pass, 128 blocks at a time; set aside: its FSDP wrapper of one rank",
    ),
}
