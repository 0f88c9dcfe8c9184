"""What a GPU's time goes into: kernels by name, summed up into the parts that docs/speed.md tells of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

PARTS = {
    "matrix products": r"nvjet|gemm|splitKreduce",
    "attention, backward": r"flash_bwd|^triton_tem\w*attention_backward",
    "attention, forward": r"flash_fwd|^triton_tem",
    "AdamW, norm": r"sqrt_sub_unbind|NormTwoOps",
    "cross-entropy beside its products": r"softmax_onl",
    "copies": r"^Memcpy",
    "float8 copies, scales and what is fused with them": r"scaled_mm|abs_max|reciprocal",
}
"""Part: pattern of its kernels; the first that matches takes a kernel."""
REST = "norms, rotary, SwiGLU, embedding"


def by_part(spent: Mapping[str, float]) -> dict[str, float]:
    """Time of each part, the longest first, from the time of each kernel; in whatever unit that is."""
    parts = Counter[str]()
    for name, time in spent.items():
        parts[next((part for part, pattern in PARTS.items() if re.search(pattern, name)), REST)] += time
    return dict(parts.most_common())
