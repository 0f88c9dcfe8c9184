"""The README of an exported drafter: what it is for, what was measured, and the exact lines that serve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from draftline.config import DrafterSpec
from draftline.decoding.advice import Prediction
from draftline.decoding.evaluate import Comparison, Evaluation
from draftline.serving.base_model import publishable
from draftline.serving.measured import ACCEPTANCE

Format = Literal["z-lab", "speculators"]
NO_TARGET = "TARGET"
"""Stands for the target in serve lines where no name of it is known that others can use."""


def serve_lines(spec: DrafterSpec, target: str, drafter: str, form: Format = "z-lab") -> dict[str, str]:
    """Command line of each engine, with the block size that was trained.

    Args:
        target: path or hub name of the target.
        drafter: path or hub name of the exported drafter.
        form: layout of the drafter's folder; only vLLM reads speculators'.
    """
    if form == "speculators":
        return {"vLLM": f"vllm serve {drafter} --attention-backend flash_attn"}
    vllm = f'{{"method": "dflash", "model": "{drafter}", "num_speculative_tokens": {spec.block_size - 1}}}'
    return {
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {spec.block_size}"
        ),
        "vLLM": f"vllm serve {target} --speculative-config '{vllm}' --attention-backend flash_attn",
        "z-lab": (
            f"dflash generate transformers --model {target} --draft {drafter} --block-size {spec.block_size} "
            '"Your prompt"'
        ),
        "Draftline": f'draftline generate {drafter} --target {target} "Your prompt"',
    }


def model_card(
    spec: DrafterSpec,
    base_model: str | None,
    drafter: str,
    form: Format = "z-lab",
    figures: str | None = None,
) -> str:
    """Markdown with front matter as model hubs read it.

    Args:
        base_model: hub name of the target; None leaves the field out, and serve lines say TARGET.
        drafter: name that the serve lines should use for this folder.
        form: layout of the folder.
        figures: what was measured with these weights (`measured.figures_to_show`), if anything was.
    """
    lines = serve_lines(spec, base_model or NO_TARGET, drafter, form)
    named = f"base_model: {base_model}\n" if base_model else ""
    meant = "" if base_model else f" {NO_TARGET} stands for the model that it was trained for."
    parts = [
        f"---\n{named}library_name: transformers\ntags: [dflash, speculative-decoding]\n---",
        f"# DFlash drafter for {base_model}" if base_model else "# DFlash drafter",
        f"It drafts blocks of {spec.block_size} tokens (one known, {spec.block_size - 1} drafted) from the "
        f"hidden states of target layers {list(spec.target_layer_ids)} (0-based; a state is a layer's output). "
        "The target checks every draft, so its output does not change. It works with this target only.",
        figures or "Acceptance was not measured.",
        "## Serving",
        f"Serve at the trained block size, {spec.block_size}; other sizes accept less, down to nothing.{meant}",
        *(f"{engine}:\n\n```\n{line}\n```" for engine, line in lines.items()),
        "Trained and exported by Draftline.",
    ]
    return "\n\n".join(parts) + "\n"


def measured_section(
    evaluation: Evaluation,
    conditions: str,
    compared: Comparison | None = None,
    predictions: Sequence[Prediction] = (),
) -> str:
    """The figures of a card.

    Args:
        evaluation: acceptance on held-out prompts.
        conditions: under which all of it was measured: see `measured_in`.
        compared: real decoding with and without the drafter, when it was measured.
        predictions: speed-up at other block lengths, by the model in `advice`.
    """
    parts = [
        _acceptance(evaluation, conditions),
        _speed(compared) if compared else "",
        _predictions(predictions) if predictions else "",
    ]
    return "\n\n".join(part for part in parts if part)


def measured_in(target: str, dtype: str, device: str, max_new_tokens: int) -> str:
    """Conditions of a measurement, as a sentence that tells no path of this machine."""
    return f"Measured on {publishable(target)} in {dtype} on {device}, answers of at most {max_new_tokens} tokens."


def _acceptance(evaluation: Evaluation, conditions: str) -> str:
    overall = evaluation.overall
    rows = [("all", overall), *evaluation.slices.items()]
    table = "\n".join(
        f"| {name} | {found.tau:.2f} | {found.tau_low:.2f} to {found.tau_high:.2f} | {found.tau_macro:.2f} | "
        f"{found.prompts} | {found.verify_steps} |"
        for name, found in rows
    )
    shares = ", ".join(f"{share:.2f}" for share in overall.accept_pos)
    return (
        f"{ACCEPTANCE}\n\n"
        "Greedy, on held-out prompts. tau counts tokens per verification step, the target's own included, "
        f"pooled, the last block cut. {conditions}\n\n"
        "| prompts | tau | 95 % interval | mean of per-prompt tau | count | verify steps |\n"
        "|---|---|---|---|---|---|\n"
        f"{table}\n\n"
        f"Share of steps that kept at least 1, 2, ... drafts: {shares}."
    )


def _speed(compared: Comparison) -> str:
    return (
        f"Measured with Draftline's own decoder, one request at a time: {compared.plain_tokens_per_s:.1f} tokens/s "
        f"without and {compared.speculative_tokens_per_s:.1f} with the drafter ({compared.speedup:.2f}x); "
        f"{compared.identical} of {compared.prompts} answers equal plain greedy decoding."
    )


def _predictions(predictions: Sequence[Prediction]) -> str:
    rows = "\n".join(f"| {each.block_size} | {each.tau:.2f} | {each.speedup:.2f} |" for each in predictions)
    return (
        "Predicted by a model from these times, one request at a time (the drafts past the length are not "
        f"verified):\n\n| block | tau | speed-up |\n|---|---|---|\n{rows}"
    )
