"""Matrix products of a drafter's step and of its parts: `python benchmarks/products.py [--shape 8B] [--json out.json]`.

What fusing or splitting them could win at most: the products of q, k and v beside that of all three, gate and up
beside both in one, weight gradients in bfloat16 beside float32 sums, and the head in chunks of several sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from shapes import SHAPES, Shape, matmul_peak, median_ms, report
from torch import Tensor

ADD_PRODUCT = torch.ops.aten.addmm.dtype_out
"""A product of bfloat16 matrices added to a float32 one in place; CUDA only."""
Product = tuple[str, int, Callable[[], object]]
"""Name, floating-point operations, work."""


def products(
    shape: Shape, tokens: int, queries: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Product]:
    """Every product, its operands made just before and freed just after."""

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    hidden, head_dim = shape.hidden, shape.head_dim
    query_width, key_width = shape.heads * head_dim, shape.kv_heads * head_dim
    widths = {
        "q": query_width,
        "k": key_width,
        "q, k and v": query_width + 2 * key_width,
        "gate": shape.mlp,
        "gate and up": 2 * shape.mlp,
    }
    block = random(queries, hidden)
    for name, width in widths.items():
        weight, slope, flops = random(width, hidden), random(queries, width), 2 * queries * hidden * width
        sums = torch.zeros(width, hidden, device=device)
        yield f"forward {name}", flops, lambda w=weight: block @ w.T
        yield f"input gradient {name}", flops, lambda y=slope, w=weight: y @ w
        yield f"weight gradient {name}", flops, lambda y=slope: y.T @ block
        if device.type == "cuda":
            yield (
                f"weight gradient {name}, added to float32",
                flops,
                lambda y=slope, s=sums: ADD_PRODUCT(s, y.T, block, torch.float32, out=s),
            )
        gradient = random(width, hidden)
        yield f"adding it to float32 afterwards, {name}", 0, lambda g=gradient, s=sums: s.add_(g)
    context = random(tokens, hidden)
    for name, width in (("k", key_width), ("k and v", 2 * key_width)):
        weight = random(width, hidden)
        yield f"context {name}", 2 * tokens * hidden * width, lambda w=weight: context @ w.T
    head = random(shape.vocab, hidden)
    for rows in (512, 1024, 1536, 2560, 3840):
        states, slope = random(rows, hidden), random(rows, shape.vocab)
        flops = 2 * rows * hidden * shape.vocab
        yield f"logits of {rows} slots", flops, lambda h=states: h @ head.T
        yield f"their input gradient, {rows} slots", flops, lambda s=slope: s @ head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device: torch.device = options.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = [{"product": "peak", "ms": 0.0, "tflops": matmul_peak(device) / 1e12}]
    for name, flops, work in products(SHAPES[options.shape], options.tokens, options.queries, device, dtype):
        milliseconds = median_ms(work, device, options.repeats)
        rows.append({"product": name, "ms": milliseconds, "tflops": flops / milliseconds / 1e9})
    report(f"products of {options.shape}", rows, device, options.json)


if __name__ == "__main__":
    main()
