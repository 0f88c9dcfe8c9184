"""What every check trains: a small stack of attention layers with compiled flex_attention.

With `--device cpu` the scripts try themselves out without a GPU, on scaled_dot_product_attention; what they
then print says nothing about PyTorch on a GPU.

Legend: C = context tokens, Q = queries, H = query heads, KV = key/value heads, hd = head dim, W = width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from draftline.compiling import FLEX_BACKWARD, FLEX_FORWARD, Expectation, compile_isolated

NUM_CONTEXT, NUM_QUERIES, BLOCK = 256, 256, 16  # C, Q and queries that see each other
HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 4, 2, 64, 128, 2
WARM_STEPS = 3

Attention = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]


def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """Dense when called as it is, block-sparse when compiled."""
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)  # type: ignore[return-value]


def sdpa(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """Dense by design; ignores the mask."""
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Layer(nn.Module):
    """Attention from queries to context and to their own block, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, context: Tensor, block_mask: BlockMask, attention: Attention) -> Tensor:
        q = self.q(x).view(1, -1, HEADS, HEAD_DIM).transpose(1, 2)  # [1, H, Q, hd]
        kv = self.kv(torch.cat([context, x])).view(1, -1, 2, KV_HEADS, HEAD_DIM)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [1, KV, C + Q, hd]
        x = x + self.o(attention(q, k, v, block_mask).transpose(1, 2).flatten(2)[0])
        return x + self.down(silu(self.up(x)))


class Trainer:
    """One worker's model, optimizer, fixed inputs and stream. Build it on the worker's thread."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.is_cuda = device.type == "cuda"
        self.checkpointed = False
        self.compiled: Attention = compile_isolated(flex, name) if self.is_cuda else _cpu_attention(name)
        self.attention = self.compiled
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None
        with self.active():
            self._build(torch.bfloat16 if self.is_cuda else torch.float32)

    def _build(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to(self.device, dtype)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        self.x = torch.randn(NUM_QUERIES, WIDTH, generator=generator).to(self.device, dtype)
        self.set_context(NUM_CONTEXT)
        fused = {"fused": True, "capturable": True} if self.is_cuda else {}
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-3, **fused)

    def set_context(self, num_tokens: int) -> None:
        """New context [num_tokens, W] and its mask: a new shape for the attention."""
        generator = torch.Generator().manual_seed(num_tokens)
        self.context = torch.randn(num_tokens, WIDTH, generator=generator).to(self.device, self.x.dtype)
        num_blocks = NUM_QUERIES // BLOCK
        anchors = torch.sort(torch.randint(1, num_tokens, (num_blocks,), generator=generator))[0]
        self.anchors = anchors.to(self.device)
        self.block_mask = create_block_mask(
            _visible(self.anchors, num_tokens),
            None,
            None,
            NUM_QUERIES,
            num_tokens + NUM_QUERIES,
            str(self.device),
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the worker's device and stream the thread's current ones."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def step(self) -> Tensor:
        """One training step in place; returns the loss, a tensor without dimensions."""
        self.optimizer.zero_grad(set_to_none=False)
        x = self.x
        for layer in self.layers:
            inputs = (x, self.context, self.block_mask, self.attention)
            x = checkpoint(layer, *inputs, use_reentrant=False) if self.checkpointed else layer(*inputs)
        loss = x.float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Whole steps, so that everything compiles that ever will."""
        for _ in range(WARM_STEPS):
            self.step()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the worker's stream."""
        if self.stream is not None:
            self.stream.synchronize()

    def expectation(self) -> Expectation:
        """What one step must run; checkpointing runs each forward twice."""
        if not self.is_cuda:
            return Expectation({})
        return Expectation(
            {FLEX_FORWARD: LAYERS * (2 if self.checkpointed else 1), FLEX_BACKWARD: LAYERS},
            max_memory_bytes=512 * 2**20,
        )


def _visible(anchors: Tensor, num_context: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_context = (k < num_context) & (k < anchors[q // BLOCK])
        in_own_block = (k >= num_context) & ((k - num_context) // BLOCK == q // BLOCK)
        return in_context | in_own_block

    return visible


def _cpu_attention(name: str) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    compiled = compile_isolated(attention, name, backend="aot_eager")
    return lambda q, k, v, _: compiled(q, k, v)


def devices(kind: str, num_workers: int) -> list[torch.device]:
    """A device for each worker; with more workers than GPUs some share one."""
    if kind == "cpu":
        return [torch.device("cpu")] * num_workers
    return [torch.device("cuda", i % torch.cuda.device_count()) for i in range(num_workers)]
