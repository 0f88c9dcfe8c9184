"""What the commands do, apart from parsing and printing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from draftline.config import DrafterSpec, TargetConfig
from draftline.decode import collect, decode_events
from draftline.drafter.model import Drafter
from draftline.evaluate import compare, evaluate, reference_answers
from draftline.export import export_drafter
from draftline.greedy import Limit
from draftline.importing import find_drafter, load_drafter, refuse_misfit
from draftline.paths import builtin_prompts
from draftline.pipeline.plan import available_devices
from draftline.prompts import chat_prompt, load_prompts
from draftline.render import LEGEND, styled_steps
from draftline.target.inspect import stop_token_ids
from draftline.target.load import Target, load_target


def load_pair(drafter: Path, target: TargetConfig) -> tuple[Target, Drafter]:
    """Target and drafter on the first device, in the target's dtype, checked to belong together.

    Raises:
        ConfigError, CheckpointError: a folder is not what it should be, or the two do not fit.
    """
    loaded = load_target(target, available_devices()[0])
    spec, module = load_drafter(
        find_drafter(drafter), loaded.model.config.get_text_config().num_hidden_layers
    )
    refuse_misfit(spec, loaded)
    return loaded, module.to(device=loaded.device, dtype=loaded.embedding.dtype).eval()


def answer_limit(target: Target, max_new_tokens: int) -> Limit:
    """Where the target's answers end."""
    generation = target.model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    return Limit(max_new_tokens, frozenset(stop_token_ids(eos, target.tokenizer)))


def evaluate_drafter(
    drafter: Path,
    prompts: str,
    target: TargetConfig,
    num_prompts: int,
    max_new_tokens: int,
    num_compared: int,
) -> dict[str, Any]:
    """Acceptance by replay, then real decoding with and without the drafter."""
    loaded, module = load_pair(drafter, target)
    held_out = load_prompts(builtin_prompts(prompts), loaded.tokenizer, num_prompts)
    limit = answer_limit(loaded, max_new_tokens)
    evaluation = evaluate(loaded, module, reference_answers(loaded, held_out, limit))
    measured: dict[str, Any] = {
        **asdict(evaluation.overall),
        "tasks": {k: v.tau for k, v in evaluation.tasks.items()},
    }
    if num_compared:
        measured["decoding"] = asdict(compare(loaded, module, held_out[:num_compared], limit))
    return measured


def export_run(run: Path, out: Path) -> dict[str, Any]:
    """Export a drafter from wherever it lies."""
    source = find_drafter(run)
    spec, module = load_drafter(source)
    folder = export_drafter(spec, module.state_dict(), out)
    return {
        "from": str(source),
        "drafter": str(folder),
        "tensors": len(module.state_dict()),
        **_serving(spec),
    }


def _serving(spec: DrafterSpec) -> dict[str, Any]:
    return {"block_size": spec.block_size, "target_layer_ids": list(spec.target_layer_ids)}


def generate_text(
    drafter: Path, prompt: str, target: TargetConfig, max_new_tokens: int, *, show: bool
) -> dict[str, Any]:
    """Answer one prompt; with `show` the text streams to standard output in colour."""
    loaded, module = load_pair(drafter, target)
    limit = answer_limit(loaded, max_new_tokens)
    events = list[Any]()

    def noted():
        for event in decode_events(loaded, module, chat_prompt(loaded.tokenizer, prompt).input_ids, limit):
            events.append(event)
            yield event

    console = Console(quiet=not show, soft_wrap=True, highlight=False)
    for text in styled_steps(noted(), loaded.tokenizer):
        console.print(text, end="")
    decoded = collect(iter(events))
    console.print()
    console.print(LEGEND)
    console.print(
        f"{len(decoded.tokens)} tokens in {len(decoded.produced)} verify steps, tau {decoded.tau:.2f}"
    )
    return {
        "text": loaded.tokenizer.decode(list(decoded.tokens), skip_special_tokens=True),
        "tau": decoded.tau,
        "produced": decoded.produced,
        "accepted": decoded.accepted,
    }
