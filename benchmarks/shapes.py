"""Real shapes with random weights, and what all benchmarks share: the matmul peak, medians, one JSON layout."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import transformers
from parts import by_part
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config

from draftline.config import DrafterSpec
from draftline.target.inspect import default_target_layer_ids

PEAK_SIZE = 8192
"""Side of the square bf16 matrices whose product is the peak that steps are compared with."""
OPTIONAL = ("flash-attn-4", "nvidia-cutlass-dsl", "torchao")
"""Packages whose versions are told where they are installed: options run their kernels."""
NUM_WARM = 5
SUSTAINED_S = 2.0
"""Shortest time over which a GPU is measured."""
BATCH = 4
"""Launches between two looks at the clock."""


@dataclass(frozen=True)
class Shape:
    """A target and a drafter of 5 layers and 5 taps with blocks of 16."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    tied: bool = False

    def spec(self, num_layers: int = 5, num_taps: int = 5, block_size: int = 16) -> DrafterSpec:
        """The drafter."""
        return DrafterSpec(
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_layers=num_layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=40960,
            block_size=block_size,
            mask_token_id=self.vocab - 1,
            target_layer_ids=default_target_layer_ids(self.layers, num_taps),
            num_target_layers=self.layers,
            layer_types=("full_attention",) * num_layers,
        )

    def target(self, num_layers: int | None = None) -> Qwen3Config:
        """The target, or its first layers."""
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=num_layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40960,
            tie_word_embeddings=self.tied,
        )


SHAPES = {
    "tiny": Shape(64, 128, 4, 2, 16, 512, 8, tied=True),
    "135M": Shape(576, 1536, 9, 3, 64, 49152, 30, tied=True),
    "8B": Shape(4096, 12288, 32, 8, 128, 151936, 36),
    "27B": Shape(5120, 17408, 32, 8, 128, 248320, 64),
}
"""tiny is for a CPU; 135M has the shape of SmolLM2, 8B of Qwen3-8B, 27B of Qwen3.6-27B with attention in all layers."""


def settle(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of `work` on the current stream, by CUDA events where there are any.

    On a GPU it goes on for at least `SUSTAINED_S`, and only the second half counts: a cool chip runs faster than it
    can for longer, by a tenth and more.
    """
    for _ in range(NUM_WARM):
        work()
    settle(device)
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    marks, begin = [_mark()], time.perf_counter()
    while len(marks) <= 2 * repeats or time.perf_counter() - begin < SUSTAINED_S:
        for _ in range(BATCH):
            work()
            marks.append(_mark())
        marks[-BATCH].synchronize()  # launches stay ahead of the device, and not by seconds
    settle(device)
    steady = marks[len(marks) // 2 :]
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(steady))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def matmul_peak(device: torch.device) -> float:
    """FLOP a second of a large bf16 product (float32 and smaller on a CPU), sustained, measured now."""
    size, dtype = (PEAK_SIZE, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / (1e-3 * median_ms(lambda: left @ right, device, 20))


def write_kernels(work: Callable[[], object], device: torch.device, out: Path, repeats: int = 3) -> None:
    """What a GPU does in `work`, as text, the longest first: milliseconds of parts, then of kernels, with launches."""
    out.parent.mkdir(parents=True, exist_ok=True)
    settle(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repeats):
            work()
        settle(device)
    spent, count = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            spent[event.name] += event.device_time
            count[event.name] += 1
    lines = [f"{sum(spent.values()) / repeats / 1e3:9.3f} ms in kernels; {' '.join(['python', *sys.argv])}"]
    lines += [f"{time_us / repeats / 1e3:9.3f} ms {part}" for part, time_us in by_part(spent).items()]
    lines += [
        f"{time_us / repeats / 1e3:9.3f} ms {count[name] / repeats:6.1f} x {name[:140]}"
        for name, time_us in spent.most_common()
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def environment(device: torch.device) -> dict[str, Any]:
    """Date, hardware, versions, commit and command of a result."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{each.name: each.version for each in distributions() if each.name in OPTIONAL},
        "commit": commit.stdout.strip() or "no repository",
        "command": " ".join(["python", *sys.argv]),
    }


def _processor() -> str:
    return f"{os.cpu_count()} {platform.machine()} cores, load average {os.getloadavg()[2]:.1f}"


def report(title: str, rows: list[dict[str, Any]], device: torch.device, out: Path | None) -> None:
    """Print one table and write the same figures as JSON."""
    names = list(rows[0])
    print(title)
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(_text(row[name]) for name in names), flush=True)
    if out is not None:
        document = {**environment(device), "results": rows}
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
