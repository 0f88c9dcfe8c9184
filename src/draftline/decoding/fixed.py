"""Decoding at fixed shapes and addresses: preallocated caches, so that on CUDA every pass is one graph.

The target's pass over one token or over a block, and the drafter's block, read their inputs from fixed tensors and
attend over whole buffers under masks that follow from positions on the device. On a CPU the same passes are launched:
the same code, the same tokens. Rejected tokens are not removed: the next pass overwrites them, and until then no mask
shows them.

Legend: C = capacity in tokens, B = block size, D = hidden size, K = taps, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from draftline.compiling import gate
from draftline.compiling.graphs import CapturedStep
from draftline.decoding.greedy import CachedTarget, Fed, cache_argument, is_recurrent, tapping
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.blocks import block_positions, block_token_ids
from draftline.drafter.mask import block_mask_dense
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError
from draftline.target.forward import decoder_layers
from draftline.target.load import Target, text_config
from draftline.target.rounding import rounding_limit

T = TypeVar("T")
NUM_WARM = 3
"""Launched passes before one is captured: they load kernels and start libraries."""
GATE_DEADLINE_S = 60.0
PROBE = 12
"""Tokens of the text that the fixed passes are proved on."""


class FixedDecoding:
    """Target and drafter for one sequence at a time of at most `capacity` tokens, reused from prompt to prompt.

    Raises:
        ConfigError: the target keeps a running state, or gives other logits this way than with a growing cache.
    """

    def __init__(self, target: Target, drafter: Drafter, capacity: int, sizes: Sequence[int] = ()) -> None:
        size = drafter.spec.block_size
        room = max(capacity, PROBE) + 2 * size  # a block past the end, and the drafter's overhang
        self.verifier = FixedTarget(
            target, drafter.spec.target_layer_ids, room, tuple(sorted({1, size, *sizes}))
        )
        self.block = FixedBlockDrafter(drafter, target.embedding, target.head, room)

    def reset(self) -> None:
        """Begin another sequence."""
        self.verifier.length = 0
        self.block.reset()


class _Slots(StaticLayer):
    """Keys and values at places that its owner names, not after what was written last."""

    def __init__(self, capacity: int, owner: FixedTarget) -> None:
        super().__init__(capacity)
        self._owner = owner

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert isinstance(self.keys, Tensor)
        assert isinstance(self.values, Tensor)
        self.keys.index_copy_(2, self._owner.places, key_states)
        self.values.index_copy_(2, self._owner.places, value_states)
        return self.keys, self.values


class FixedTarget:
    """`CachedTarget` with a preallocated cache: the same `feed` and `take_back`, passes of `sizes` tokens fixed.

    What `feed` returns for such a pass holds until the next one of that size. After the prompt, a pass over one token
    gives no taps: plain decoding needs none.
    """

    def __init__(
        self, target: Target, target_layer_ids: tuple[int, ...], capacity: int, sizes: tuple[int, ...]
    ) -> None:
        if is_recurrent(target):
            raise ConfigError(
                f"{target.name} keeps a running state, which has no fixed cache here; measure it with growing caches"
            )
        self.model, self.device, self.length = target.model, target.device, 0
        layers = decoder_layers(target.model)[2]
        self._tapped = [layers[index] for index in target_layer_ids]
        self._capacity, self._windows = capacity, _windows(target)
        self._cache = Cache(layers=[_Slots(capacity, self) for _ in layers])
        self._cache_argument = cache_argument(target)
        self.places = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._passes = {}
        self._prove(target, target_layer_ids)
        self._passes = {size: _Pass(self, size) for size in sizes}
        self.length = 0

    def feed(self, tokens: Tensor, num_logits: int) -> Fed:
        """Append tokens int64 [n]; logits of the last `num_logits` of them (dtype of the target)."""
        places = torch.arange(self.length, self.length + len(tokens), device=self.device)
        fixed = self._passes.get(len(tokens)) if self.length else None  # a prompt of any length is launched
        self.length += len(tokens)
        if fixed is None:
            return self.run(tokens, places, num_logits, taps=True)
        logits, taps = fixed.replay(tokens, places)
        return Fed(logits[-num_logits:], taps)

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self.length -= count

    def run(self, tokens: Tensor, places: Tensor, num_logits: int, *, taps: bool) -> Fed:
        """One pass over tokens int64 [n] at places int64 [n]."""
        self.places = places
        with tapping(self._tapped if taps else ()) as tapped:
            output = self.model(
                input_ids=tokens[None],
                position_ids=places[None],
                attention_mask=self._masks(places),
                use_cache=True,
                logits_to_keep=num_logits,
                **{self._cache_argument: self._cache},
            )
        empty = tokens.new_empty((len(tokens), 0))
        return Fed(output.logits[0], torch.cat([tap[0] for tap in tapped], dim=-1) if tapped else empty)

    def _masks(self, places: Tensor) -> Tensor | dict[str, Tensor]:
        """What a query at each place may see of the buffer, bool [1, 1, n, C]; by layer type if there are several."""
        key = torch.arange(self._capacity, device=self.device)[None]
        query = places[:, None]
        masks = {
            kind: ((key <= query) & (key > query - window))[None, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def _prove(self, target: Target, target_layer_ids: tuple[int, ...]) -> None:
        """The model's own code decides what it makes of a mask and a cache from outside: look at what it gives."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, len(target.embedding), (PROBE,), generator=generator).to(self.device)
        plain = CachedTarget(target, target_layer_ids)
        differences: list[Tensor] = []
        for sequence_part, rejected in ((text[:5], 0), (text[5:9], 3), (text[9:], 0)):
            ours, theirs = (each.feed(sequence_part, len(sequence_part)) for each in (self, plain))
            for mine, other in zip(ours, theirs, strict=True):
                differences.append((mine - other).abs().max() / other.abs().max())
            self.take_back(rejected)
            plain.take_back(rejected)
        worst = float(torch.stack(differences).max())  # a NaN is the largest here, and lost in Python's max
        last = len(decoder_layers(target.model)[2]) - 1
        allowed = rounding_limit(target.model, (last,), [text], worst)
        if not worst <= allowed:
            raise ConfigError(
                f"{target.name} gives other logits with a fixed cache than with a growing one: {worst:.2g} of the "
                f"largest (at most {allowed:.2g}); measure it with growing caches"
            )


class _Pass:
    """The target's pass over a fixed number of tokens."""

    def __init__(self, owner: FixedTarget, size: int) -> None:
        self._tokens = torch.zeros(size, dtype=torch.int64, device=owner.device)
        self._places = torch.arange(size, device=owner.device)
        self._run = fix(
            lambda: owner.run(self._tokens, self._places, size, taps=size > 1), (self, owner), owner.device
        )

    def replay(self, tokens: Tensor, places: Tensor) -> Fed:
        """Logits [n, V] and taps [n, K*D]."""
        self._tokens.copy_(tokens)
        self._places.copy_(places)
        return self._run()


class FixedBlockDrafter:
    """`BlockDrafter` with a preallocated context: the same `observe` and `logits`, one fixed pass for both."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, capacity: int) -> None:
        spec, weight = drafter.spec, drafter.fc.weight
        self.drafter, self.spec = drafter, spec
        self.embedding, self.head, device = embedding, head, weight.device
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity, spec.head_dim)
        self._store = torch.zeros(shape, dtype=weight.dtype, device=device)
        self._taps = torch.zeros(spec.block_size, weight.shape[1], dtype=weight.dtype, device=device)
        self._start, self._length = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._anchor = torch.zeros(1, dtype=torch.int64, device=device)
        self._ahead = torch.arange(spec.block_size, device=device)
        self._positions = torch.arange(capacity, device=device)
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._valid = torch.ones(1, dtype=torch.bool, device=device)
        self.observed = 0
        """Tokens whose taps are in the context or wait for the next block."""
        self._waiting = 0
        self._run = fix(self._step, (self,), device)

    def reset(self) -> None:
        """Begin another sequence."""
        self.observed = self._waiting = 0

    def observe(self, taps: Tensor) -> None:
        """Take in the taps [n, K*D] of tokens that were committed; a block's come with the next pass."""
        assert self._waiting == 0, "one block's taps at a time"
        if len(taps) <= self.spec.block_size:
            self._taps[: len(taps)].copy_(taps)
            self._waiting = len(taps)
        else:
            places = torch.arange(self.observed, self.observed + len(taps), device=taps.device)
            self._append(taps.to(self._taps.dtype), places)
        self.observed += len(taps)

    def logits(self, anchor: int) -> Tensor:
        """Logits [B-1, V] of the drafts after the token `anchor`, which follows everything observed."""
        self._start.fill_(self.observed - self._waiting)
        self._length.fill_(self.observed)
        self._anchor.fill_(anchor)
        self._waiting = 0
        return self._run()

    @torch.inference_mode()
    def _append(self, taps: Tensor, places: Tensor) -> None:
        context, rotary = self.drafter.fuse(taps), self.drafter.rotary(places)
        for layer, store in zip(self.drafter.decoder_layers(), self._store, strict=True):
            keys, values = layer.context_kv(context, rotary)
            store[0].index_copy_(1, places, keys)
            store[1].index_copy_(1, places, values)

    @torch.inference_mode()
    def _step(self) -> Tensor:
        """Add the waiting taps and draft. Rows of `_taps` that do not wait land past the context, unseen."""
        spec = self.spec
        self._append(self._taps, self._start + self._ahead)
        ids = block_token_ids(self._anchor, self._first, self._valid, spec.mask_token_id, spec.block_size)
        positions = block_positions(self._length, self._first, spec.block_size)
        x = F.embedding(ids.flatten(), self.embedding).to(self._taps.dtype) * spec.input_embedding_scale
        rotary, attend = self.drafter.rotary(positions.flatten()), sdpa_attend(self._masks())
        for layer, store in zip(self.drafter.decoder_layers(), self._store, strict=True):
            x = layer.block(x, (store[0], store[1]), rotary, attend)
        return F.linear(self.drafter.norm(x)[1:].to(self.head.dtype), self.head)

    def _masks(self) -> list[Tensor]:
        """The training rule for one block whose anchor follows the context, bool [B, C + B] for each layer."""
        spec, documents = self.spec, torch.zeros_like(self._positions)
        kinds = [(spec.window_of(layer), spec.causal_in_block(layer)) for layer in range(spec.num_layers)]
        made = {
            (window, causal): block_mask_dense(
                self._length,
                self._valid,
                documents,
                self._positions,
                block_size=spec.block_size,
                window=window,
                causal=causal,
            )
            for window, causal in set(kinds)
        }
        return [made[kind] for kind in kinds]


def fix(function: Callable[[], T], owners: Sequence[object], device: torch.device) -> Callable[[], T]:
    """A pass that is replayed: on CUDA one graph, in order with the caller's stream; elsewhere the function."""
    function = torch.inference_mode()(function)
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with gate.compiling("decoder", deadline_s=GATE_DEADLINE_S):
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM):
                function()
        captured = CapturedStep(function, owners=owners, stream=stream)

    def replay() -> T:
        stream.wait_stream(torch.cuda.current_stream(device))
        output = captured.replay()
        torch.cuda.current_stream(device).wait_stream(stream)
        return output

    return replay


def _windows(target: Target) -> dict[str, int]:
    """Tokens that each type of layer sees, the current one included; full attention sees more than there are."""
    config = text_config(target.model.config)
    # a foreign configuration: families without these attend to everything in every layer
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    window = getattr(config, "sliding_window", None)
    return {
        kind: int(window) if kind == "sliding_attention" and window else 2**40
        for kind in dict.fromkeys(kinds)
    }
