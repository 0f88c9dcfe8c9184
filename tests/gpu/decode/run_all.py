"""Decoding with fixed caches on a real GPU, as one script: `python tests/gpu/decode/run_all.py --json out.json`.

On CUDA every fixed pass is a captured graph. Each check prints PASS or FAIL with its figures; the exit code is the
number of failures. `--device cpu` runs the same checks with launched passes, on a smaller shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.oracles.targets import fitting_spec, random_prompts, random_target, taught_drafter  # noqa: E402

from draftline.decoding.advice import time_steps  # noqa: E402
from draftline.decoding.decode import decode  # noqa: E402
from draftline.decoding.evaluate import Prompt, compare  # noqa: E402
from draftline.decoding.fixed import FixedDecoding  # noqa: E402
from draftline.decoding.greedy import Limit, greedy  # noqa: E402
from draftline.decoding.sampling import Sampled  # noqa: E402
from draftline.drafter.model import Drafter  # noqa: E402
from draftline.target.load import Target, wrap_target  # noqa: E402

LIMIT = Limit(48)


def moved(target: Target, device: torch.device) -> Target:
    """A target with its model on another device."""
    nn.Module.to(target.model, device)
    return wrap_target(target.name, target.model, target.tokenizer)


def pair(family: str, device: torch.device) -> tuple[Target, Drafter]:
    """A small random target in float64, where no rounding hides a fault, and a drafter that is right now and then."""
    target = random_target(family, dtype=torch.float64)
    drafter = taught_drafter(target)
    return moved(target, device), drafter.to(device)


def same_steps(device: torch.device) -> dict[str, Any]:
    """Fixed and growing caches: the same tokens in the same steps, and plain decoding the same text."""
    kept: dict[str, int] = {}
    for family in ("qwen3", "llama", "gemma3"):
        target, drafter = pair(family, device)
        fixed = FixedDecoding(target, drafter, 96)
        for prompt in random_prompts(3):  # what its drafter was taught on
            ours = decode(target, drafter, prompt, LIMIT, fixed=fixed)
            growing = decode(target, drafter, prompt, LIMIT)
            assert (ours.tokens, ours.accepted) == (growing.tokens, growing.accepted), family
            fixed.reset()
            assert greedy(target, prompt, LIMIT, fixed.verifier) == list(growing.tokens), family
            kept[family] = kept.get(family, 0) + sum(ours.accepted)
        assert kept[family] > 0, family
    return {"drafts_kept": kept}


def same_draws(device: torch.device) -> dict[str, Any]:
    """Sampling with the same seed draws the same tokens."""
    target, drafter = pair("qwen3", device)
    fixed = FixedDecoding(target, drafter, 96)
    for seed in range(5):
        found = [
            decode(target, drafter, [1, 2, 3], LIMIT, Sampled(seed, device, temperature=1.5), each).tokens
            for each in (None, fixed)
        ]
        assert found[0] == found[1], seed
    return {"seeds": 5}


def large(device: torch.device) -> tuple[Target, Drafter]:
    """A target in the shape of Qwen3-1.7B (a small one on a CPU) and a five-layer drafter, random, half precision."""
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 151936 if cuda else 512,
        "hidden_size": 2048 if cuda else 64,
        "intermediate_size": 6144 if cuda else 128,
        "num_hidden_layers": 28 if cuda else 6,
        "num_attention_heads": 16 if cuda else 4,
        "num_key_value_heads": 8 if cuda else 2,
        "head_dim": 128 if cuda else 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16).eval().requires_grad_(False)
    target = wrap_target("random large", model, cast("Any", None))
    spec = fitting_spec(
        target,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_layers=5,
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        block_size=16,
        mask_token_id=shape["vocab_size"] - 1,
        num_target_layers=shape["num_hidden_layers"],
        layer_types=("full_attention",) * 5,
    )
    drafter = Drafter(spec)
    drafter.init_weights(0)
    return target, drafter.to(device=device, dtype=torch.bfloat16).eval()


def speed(device: torch.device) -> dict[str, Any]:
    """Time both kinds of caches; on CUDA the captured passes must be the faster ones, plain decoding included."""
    target, drafter = large(device)
    prompts = [Prompt(tuple(range(5, 5 + length))) for length in (60, 200)]
    limit = Limit(64)
    fixed = FixedDecoding(target, drafter, 512, sizes=(2, 4, 8))
    found = {
        "growing": compare(target, drafter, prompts, limit),
        "fixed": compare(target, drafter, prompts, limit, fixed),
    }
    fixed.reset()
    timings = time_steps(target, prompts[0].input_ids, 16, found["fixed"].draft_ms, fixed.verifier)
    if device.type == "cuda":
        assert found["fixed"].plain_tokens_per_s > found["growing"].plain_tokens_per_s
        assert found["fixed"].verify_ms < found["growing"].verify_ms
        assert found["fixed"].draft_ms < found["growing"].draft_ms
    return {**{name: asdict(each) for name, each in found.items()}, "timings": asdict(timings)}


def flat_memory(device: torch.device) -> dict[str, Any]:
    """Prompt after prompt through one pair of caches, memory stays where it is."""
    target, drafter = pair("qwen3", device)
    fixed = FixedDecoding(target, drafter, 96)
    used = []
    for prompt in random_prompts(20):
        decode(target, drafter, prompt, replace(LIMIT, max_new_tokens=24), fixed=fixed)
        used.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
    assert used[-1] == used[2], used
    return {"bytes": used[-1]}


CHECKS: tuple[Callable[[torch.device], dict[str, Any]], ...] = (same_steps, same_draws, flat_memory, speed)


def main() -> None:
    """Run all checks and exit with the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    failures = 0
    for check in CHECKS:
        try:
            results[check.__name__] = check(device)
            print(f"PASS {check.__name__} {json.dumps(results[check.__name__])}", flush=True)
        except Exception:  # noqa: BLE001 - every check has its say
            failures += 1
            results[check.__name__] = {"failed": traceback.format_exc()}
            print(f"FAIL {check.__name__}\n{traceback.format_exc()}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(failures)


if __name__ == "__main__":
    main()
