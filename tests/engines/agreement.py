"""One drafter, the same prompts, every decoder that runs in Draftline's environment: tokens, drafts, kept drafts.

    python -m tests.engines.agreement CASE.json --json OUT.json [--sglang SOURCE]

CASE is made by `tests.engines.vllm_case`; SOURCE is an unpacked SGLang wheel. Rows are added to OUT, where
`vllm_serve.py --json` adds vLLM's. Exit code 1 unless every row equals the replay's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from draftline import __version__
from draftline.commands import load_pair
from draftline.config import TargetConfig
from draftline.decoding.decode import decode
from draftline.decoding.evaluate import Prompt, Reference, replay
from draftline.decoding.greedy import CachedTarget, Limit
from draftline.decoding.sampling import leading_run
from draftline.drafter.model import Drafter
from draftline.target.load import Target
from tests.engines.rows import as_json
from tests.engines.vllm_case import per_position, steps_within
from tests.oracles.huggingface import assistant, generate
from tests.oracles.zlab import zlab_decode, zlab_drafter

Row = dict[str, Any]
Answer = tuple[list[int], list[int]]
"""Tokens, and drafts kept in each step, both past the end of what is compared."""


def row(decoder: str, answers: Sequence[Answer], case: Row) -> Row:
    """What one decoder did, up to as many tokens of each answer as the case holds."""
    length, slots = len(case["answers"][0]), case["block_size"] - 1
    steps = [kept for _, accepted in answers for kept in steps_within(accepted, length)]
    return {
        "decoder": decoder,
        "same_tokens": all(
            tokens[:length] == wanted for (tokens, _), wanted in zip(answers, case["answers"], strict=True)
        ),
        "tokens": length * len(answers),
        "drafts": len(steps),
        "accepted_per_position": per_position(steps, slots),
    }


def by_prompt(case: Row, decode_one: Callable[[list[int]], Answer]) -> list[Answer]:
    """A decoder's answers to all prompts."""
    return [decode_one(prompt) for prompt in case["prompts"]]


def rows(target: Target, drafter: Drafter, case: Row, sglang: Path | None) -> Iterator[Row]:
    """One row of figures for each decoder."""
    size, length = case["block_size"], len(case["answers"][0])
    longer = Limit(length + 2 * size)

    def ours(prompt: list[int]) -> Answer:
        decoded = decode(target, drafter, prompt, longer)
        return list(decoded.tokens), list(decoded.accepted)

    decoded = by_prompt(case, ours)

    def replayed(index: int) -> Answer:
        reference = Reference(Prompt(tuple(case["prompts"][index])), tuple(decoded[index][0]))
        return decoded[index][0], list(replay(target, drafter, reference).accepted)

    yield row(f"Draftline {__version__}, replay", [replayed(index) for index in range(len(decoded))], case)
    yield row(f"Draftline {__version__}, decoder", decoded, case)

    oracle = zlab_drafter(drafter)

    def zlab(prompt: list[int]) -> Answer:
        tokens, steps = zlab_decode(oracle, target.model, prompt, longer)
        return tokens, [produced - 1 for produced in steps]

    yield row("z-lab dflash 0.1.0, its decoder", by_prompt(case, zlab), case)
    yield transformers_row(target, drafter, case)
    if sglang is not None:
        model, version = sglang_model(sglang, Path(case["drafter"]))
        name = f"SGLang {version}, its model file in Draftline's loop"
        yield row(
            name, by_prompt(case, lambda prompt: sglang_decode(model, target, drafter, prompt, longer)), case
        )


def transformers_row(target: Target, drafter: Drafter, case: Row) -> Row:
    """transformers tells tokens and passes, not what each pass kept."""
    oracle, limit = assistant(drafter), Limit(len(case["answers"][0]))
    found = [generate(target, prompt, limit, oracle) for prompt in case["prompts"]]
    same = all(list(each.tokens) == wanted for each, wanted in zip(found, case["answers"], strict=True))
    return {
        "decoder": f"transformers {transformers.__version__}, assisted generation",
        "same_tokens": same,
        "tokens": sum(len(each.tokens) for each in found),
        "drafts": sum(each.steps for each in found),
        "accepted_per_position": None,
    }


def sglang_model(source: Path, folder: Path) -> tuple[nn.Module, str]:
    """SGLang's model with a folder's weights, and its version."""
    from tests.engines.sglang_source import load_poisoned, load_sglang

    module, version = load_sglang(source)
    return load_poisoned(module, folder), version


@torch.inference_mode()
def sglang_decode(
    model: nn.Module, target: Target, drafter: Drafter, prompt: list[int], limit: Limit
) -> Answer:
    """Greedy speculative decoding whose blocks SGLang's model drafts."""
    from tests.engines.sglang_source import sglang_block

    spec = drafter.spec
    verifier = CachedTarget(target, spec.target_layer_ids)
    fed = verifier.feed(torch.tensor(prompt), num_logits=1)
    tokens, taps, accepted = [int(fed.logits[-1].argmax())], fed.taps, list[int]()
    while len(tokens) < limit.max_new_tokens:
        ids = torch.tensor([tokens[-1]] + [spec.mask_token_id] * (spec.block_size - 1))
        hidden = sglang_block(model, target.embedding[ids] * spec.input_embedding_scale, taps)
        drafts = (hidden[1:] @ target.head.T).argmax(dim=-1)
        fed = verifier.feed(torch.cat([ids[:1], drafts]), num_logits=spec.block_size)
        choices = fed.logits.argmax(dim=-1)
        kept = leading_run(drafts == choices[:-1])
        verifier.take_back(len(drafts) - kept)
        taps = torch.cat([taps, fed.taps[: kept + 1]])
        accepted.append(kept)
        tokens += [*drafts[:kept].tolist(), int(choices[kept])]
    return tokens, accepted


def about(case: Row) -> Row:
    """What the rows were made from."""
    return {
        "command": ".ci/engines",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prompts": len(case["prompts"]),
        "tokens_each": len(case["answers"][0]),
        "block_size": case["block_size"],
    }


def main() -> None:
    """Write the rows and exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sglang", type=Path)
    arguments = parser.parse_args()
    case = json.loads(arguments.case.read_text(encoding="utf-8"))
    target, drafter = load_pair(Path(case["drafter"]), TargetConfig(path=case["target"], dtype="float32"))
    found = []
    for each in rows(target, drafter, case, arguments.sglang):
        print(json.dumps(each), flush=True)
        found.append(each)
    arguments.json.write_text(as_json({**about(case), "rows": found}), encoding="utf-8")
    wanted = found[0]
    differing = [
        each["decoder"]
        for each in found
        if not each["same_tokens"]
        or each["drafts"] != wanted["drafts"]
        or each["accepted_per_position"] not in (None, wanted["accepted_per_position"])
    ]
    print(f"DIFFERENT: {', '.join(differing)}" if differing else "all agree")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
