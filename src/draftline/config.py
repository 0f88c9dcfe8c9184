"""Every setting of a run: frozen, typed, each default once, with its unit. Unknown keys are errors.

`RunConfig` is what `run.yaml` holds. `DrafterSpec` is the drafter's architecture after everything that
follows from the target has been filled in; it is what a checkpoint's `config.json` records.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

TILE = 128
"""Tokens: side of a block-sparse attention tile; token and block budgets are multiples of it."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Compute type of a target."""
Linears = Literal["drafter_dtype", "float8", "float8_emulated"]
"""What the products of the drafter's linear maps are computed in."""
OnCorrupt = Literal["stop", "skip"]
"""What a missing or corrupt shard of a token store means."""


Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share of a moving average that is kept; with 1 it would never move."""


class Frozen(BaseModel):
    """Base of all settings: immutable, no unknown keys, docstrings under fields become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class TargetConfig(Frozen):
    """The language model that will be made faster. It is read, never changed."""

    path: str = Field(min_length=1)
    """Folder of a transformers model, `builtin:tiny`, `builtin:hybrid`, or a hub name."""
    dtype: Dtype = "auto"
    """Compute type; auto takes the checkpoint's own type on CUDA and float32 on a CPU."""
    revision: str | None = None
    """Hub commit; required when `trust_remote_code` is set."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint. Needs a 40-digit `revision`."""

    @model_validator(mode="after")
    def _remote_code_is_pinned(self) -> Self:
        pinned = self.revision is not None and re.fullmatch(r"[0-9a-f]{40}", self.revision)
        if self.trust_remote_code and not pinned:
            raise ValueError(
                f"trust_remote_code runs code from {self.path}; set target.revision to the 40-digit commit "
                "that you have read"
            )
        return self


class DataConfig(Frozen):
    """Training conversations."""

    path: str = Field(min_length=1)
    """A token store made by `draftline prepare`, or a chat JSONL file that is prepared on the fly."""
    eval_path: tuple[str, ...] = ()
    """Held-out prompts for acceptance length: files of chat records, or sets by name (gsm8k, mt-bench, ...; see
    docs/serving.md); none means no evaluation."""
    max_length: int = Field(default=4096, ge=2)
    """Tokens: a longer conversation is clipped, and counted. The default gives way to the target's context."""
    on_corrupt: OnCorrupt = "stop"
    """What a missing or corrupt shard of a prepared store means. stop: the run does not start (exit code 4). skip: it
    leaves out that shard's documents, says so, and counts them in `result.json`. The shards left out are part of the
    run: it resumes only while they are the same."""

    @field_validator("eval_path", mode="before")
    @classmethod
    def _one_or_several(cls, given: object) -> object:
        return (given,) if isinstance(given, str) else given


class RowConfig(Frozen):
    """A row is the unit of work: fixed shapes, filled with whole documents."""

    token_budget: int = Field(default=4096, gt=0)
    """Tokens of context in a row; a multiple of 128."""
    block_budget: int = Field(default=512, gt=0)
    """Blocks (anchors) in a row; block_budget x block_size must be a multiple of 128."""
    anchors_per_document: int = Field(default=512, gt=0)
    """Most anchors that one document may take, so that long documents do not starve short ones."""

    @model_validator(mode="after")
    def _token_budget_is_tiled(self) -> Self:
        if self.token_budget % TILE:
            best = -(-self.token_budget // TILE) * TILE
            raise ValueError(
                f"rows.token_budget={self.token_budget} is not a multiple of {TILE} (attention tile); use {best}"
            )
        return self


class DrafterConfig(Frozen):
    """Shape of the drafter. None means: take it from the target."""

    num_layers: int = Field(default=5, ge=1, le=1000)
    """Transformer layers."""
    block_size: int = Field(default=16, ge=2)
    """Tokens in a block: one anchor and block_size - 1 drafts. """
    num_taps: int = Field(default=5, ge=1)
    """Target layers that are read, spread by the published rule, unless `target_layer_ids` is given."""
    target_layer_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    """0-based target layers whose outputs are read; negative ids count from the last layer."""
    mask_token_id: int | None = None
    """Embedding row that stands for a token to be drafted; none takes the tokenizer's mask token or a
    reserved row."""
    intermediate_size: int | None = Field(default=None, gt=0)
    """Width of the MLP."""
    num_heads: int | None = Field(default=None, gt=0)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, gt=0)
    """Key/value heads."""
    head_dim: int | None = Field(default=None, gt=0)
    """Size of one head."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Attention of each layer; none means full attention everywhere."""
    sliding_window: int | None = Field(default=None, gt=1)
    """Tokens a sliding layer sees, the current one included."""
    init_from: str | None = Field(default=None, min_length=1)
    """Drafter, checkpoint or run folder whose weights training starts from (warm start); its architecture must be
    this one."""


class LossConfig(Frozen):
    """Weighted cross-entropy against the frozen head."""

    decay_gamma: float | None = Field(default=None, gt=0)
    """Slots: weight of slot k is exp(-(k-1)/gamma). None takes 7 for blocks of 16, 5 for 10, 4 for 8
    (paper, section 5), and block_size / 2 otherwise."""
    chunk_rows: int = Field(default=1024, gt=0)
    """Slots whose logits exist at one time."""


class OptimConfig(Frozen):
    """AdamW on fp32 masters, cosine schedule with warm-up."""

    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps in which the rate rises linearly."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's moving-average factors."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices; norm weights are never decayed."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    rows_per_step: int = Field(default=8, gt=0)
    """Rows in one optimizer step, over all drafters; a multiple of their number."""
    steps: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Optimizer steps; give this or `epochs`."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data; give this or `steps`."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of optim.steps and optim.epochs")
        return self


class PlacementConfig(Frozen):
    """Which devices run the target and which the drafter."""

    mode: Literal["auto", "split", "colocated"] = "auto"
    """split: different workers feed each other; colocated: each device does both in turn; auto: colocated
    with one device, split otherwise."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Device of each target worker, such as ["cuda:0", "cuda:0", "cuda:1"]; a device may be named twice."""
    drafters: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Device of each drafter worker."""
    channel_slots: int = Field(default=3, ge=1)
    """Rows that may wait in front of each drafter."""
    attention: Literal["auto", "flex", "flash", "sdpa"] = "auto"
    """Drafter attention: flex is compiled and block-sparse (CUDA), sdpa is dense with a boolean mask (CPU). flash is
    block-sparse by FlashAttention 4 (the extra `flash`, Hopper GPUs), for a packed target too: faster than flex, but
    two runs differ in their last bits. auto is flex or sdpa, resolved once at start and printed; it never changes
    afterwards."""
    drafter_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of the drafter; masters are always float32. auto: bfloat16 on CUDA, float32 on a CPU."""
    drafter_linears: Linears = "drafter_dtype"
    """Products of the drafter's linear maps in training. drafter_dtype: in it, like the rest. float8: in float8 with
    dynamic scales, by torchao (the extra `float8`); needs GPUs of compute capability 8.9 and sizes that are multiples
    of 16. float8_emulated: what float8 rounds to, on a CPU, slower than without; for its effect on the loss. Weights
    that are saved are ordinary, and a run may go on with another choice."""


class CheckpointConfig(Frozen):
    """When the state is saved."""

    every: int = Field(default=500, gt=0)
    """Optimizer steps between checkpoints."""
    keep: int = Field(default=2, ge=2)
    """Newest checkpoints that stay."""
    on_disk_full: Literal["stop", "continue"] = "stop"
    """What a checkpoint without room on the disk means. stop: the run ends (exit code 8). continue: it goes on,
    says so, counts it in `result.json`, and tries again at the next one; more steps may be lost."""


class EvaluationConfig(Frozen):
    """Acceptance length on held-out prompts."""

    every: int | None = Field(default=None, gt=0)
    """Optimizer steps between evaluations; none means before and after training only."""
    num_prompts: int = Field(default=64, gt=0)
    """Held-out prompts used of each file or set."""
    max_new_tokens: int = Field(default=256, gt=0)
    """Tokens generated for each prompt."""
    thinking: Literal["off", "on", "both"] = "off"
    """The target's thinking switch; both asks every prompt twice and reports two slices."""


class DeadlineConfig(Frozen):
    """How long anything may wait before the run ends with the reason."""

    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without a row from a worker that others wait for."""
    startup_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds for all workers to load, compile and prove themselves."""
    write_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one checkpoint may take to reach the disk, and so the longest that a run which has failed goes on to
    finish the one in flight."""


class RunConfig(Frozen):
    """A complete training run."""

    target: TargetConfig
    data: DataConfig
    output: Path
    """Folder of the run; one run at a time. The present folder is `.`, never an empty name."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Every row, anchor and initial weight follows from it."""
    rows: RowConfig = RowConfig()
    drafter: DrafterConfig = DrafterConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    deadlines: DeadlineConfig = DeadlineConfig()

    @field_validator("output", mode="before")
    @classmethod
    def _output_is_named(cls, given: object) -> object:
        if given == "":
            raise ValueError("output='' would be the present folder; name a folder, or . if that is meant")
        return given

    @model_validator(mode="after")
    def _blocks_are_tiled(self) -> Self:
        queries = self.rows.block_budget * self.drafter.block_size
        if queries % TILE:
            step = TILE // math.gcd(TILE, self.drafter.block_size)
            best = -(-self.rows.block_budget // step) * step
            raise ValueError(
                f"rows.block_budget={self.rows.block_budget} x drafter.block_size={self.drafter.block_size} = "
                f"{queries} is not a multiple of {TILE}; use rows.block_budget={best}"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_has_prompts(self) -> Self:
        plain = EvaluationConfig()
        given = [
            f"evaluation.{name}={getattr(self.evaluation, name)}"
            for name in EvaluationConfig.model_fields
            if getattr(self.evaluation, name) != getattr(plain, name)
        ]
        if given and not self.data.eval_path:
            raise ValueError(
                f"{' and '.join(given)} would have no effect without held-out prompts; name them in data.eval_path"
            )
        return self


class DrafterSpec(Frozen):
    """The drafter's architecture, complete. Shapes: D = hidden_size, K = len(target_layer_ids)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's head (may exceed the tokenizer's length)."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based; a tap is the output of that layer, before any final norm."""
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    """None: sliding layers are causal inside the block and full ones are not, as engines serve them."""
    input_embedding_scale: float = 1.0
    """Factor on the target's raw embedding rows (Gemma: sqrt(D))."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tokenizer_sha256: str | None = None
    """What the target's tokenizer does, hashed; None for drafters of trainers that do not record it."""

    @property
    def num_taps(self) -> int:
        """K, the number of tapped target layers."""
        return len(self.target_layer_ids)

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal_in_block(self, layer: int) -> bool:
        """Whether slots of a block see only earlier slots in this layer (dflash.md 1.8)."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"

    def effective(self, name: str) -> object:
        """A field by what it does: two spellings of one behaviour are equal."""
        if name == "is_causal":
            return [self.causal_in_block(layer) for layer in range(self.num_layers)]
        if name == "sliding_window":
            return [self.window_of(layer) for layer in range(self.num_layers)]
        return getattr(self, name)


_NEEDED = {
    "target": ("target.path",),
    "data": ("data.path",),
    "optim": ("optim.steps", "optim.epochs"),
}
"""Groups that a run must name, and what of them has no default."""


def missing(name: str) -> str:
    """What to say of a setting, or of a group of them, that a run must name."""
    parts = _NEEDED.get(name, (name,))
    flags = " or ".join("--" + part.replace("_", "-") for part in parts)
    return f"{name} is missing; set {' or '.join(parts)} in the run.yaml, or give {flags}"


def explain(error: ValidationError) -> str:
    """Pydantic's complaints as one readable sentence each: the setting, its value, the reason."""
    return "; ".join(_explain(item) for item in error.errors())


def _explain(item: ErrorDetails) -> str:
    where = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return missing(where)
    if item["type"] == "model_type":
        return (
            f"{where}={item['input']!r} is a group of settings, not a value; write {where}: {{name: value}}"
        )
    if item["type"] == "value_error":
        return message
    return f"{where}={item['input']!r}: {message}"
