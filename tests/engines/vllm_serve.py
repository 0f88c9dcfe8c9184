"""Second half of the vLLM check, in an environment with vLLM: serve the drafter and compare with the case file.

    python tests/engines/vllm_serve.py CASE.json

Exit code 1 unless the engine writes the same tokens with and without the drafter, both equal to Draftline's, and
accepts as many drafts at every position.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters live in the engine's own process

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm import __version__ as version  # pyright: ignore[reportMissingImports]


def answers(case: dict[str, Any], **extra: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy answers of one engine, and its counters."""
    engine = LLM(
        model=case["target"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=1024,
        gpu_memory_utilization=0.2,  # of main memory, on a CPU
        **extra,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=len(case["answers"][0]), ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    outputs = engine.generate(prompts, sampling)
    return [list(output.outputs[0].token_ids) for output in outputs], counters(engine)


def counters(engine: Any) -> dict[str, Any]:
    """Speculative decoding counters, by the last part of their names."""
    found = {}
    for metric in engine.get_metrics():
        if "spec_decode" in metric.name:
            values = getattr(metric, "values", None)
            found[metric.name.removeprefix("vllm:spec_decode_num_")] = values or metric.value
    return found


def main() -> None:
    """Compare and exit."""
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plain, _ = answers(case)
    drafter = {
        "method": "dflash",
        "model": case["drafter"],
        "num_speculative_tokens": case["block_size"] - 1,
    }
    speculative, counted = answers(case, speculative_config=drafter)
    checks = {
        "plain answers are Draftline's": plain == case["answers"],
        "speculative answers are the plain ones": speculative == plain,
        "drafts": counted["drafts"] == case["drafts"],
        "accepted per position": counted["accepted_tokens_per_pos"] == case["accepted_per_position"],
    }
    print(f"vLLM {version}: {counted}; expected {case['drafts']} drafts {case['accepted_per_position']}")
    for name, passed in checks.items():
        print(f"{'ok' if passed else 'DIFFERENT'}  {name}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
