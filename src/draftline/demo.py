"""`draftline demo`: the whole journey on a small real target, in about a minute on two cores.

Every number it prints is measured in that run: training through the real pipeline with two target and two
drafter workers, acceptance length on prompts that no training conversation contains, real speculative decoding
compared with plain greedy decoding token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from draftline.checkpoint import Identity, refuse_other_run
from draftline.commands import answer_limit, load_pair
from draftline.config import RunConfig
from draftline.console import Screen, fitting
from draftline.decoding.caches import choose_caches
from draftline.decoding.decode import decode_events
from draftline.decoding.evaluate import Comparison, Evaluation, Prompt, compare
from draftline.decoding.greedy import Limit
from draftline.decoding.prompts import load_prompts
from draftline.decoding.render import print_answer
from draftline.drafter.model import Drafter
from draftline.pipeline.plan import available_devices
from draftline.resilience.folder import CHECKPOINTS
from draftline.run import refuse_store, train
from draftline.setup import shared_settings
from draftline.smollm2.own_answers import with_own_answers
from draftline.target.load import Target
from draftline.trained import Trained

NUM_COMPARED = {"tiny": 12, "smollm2": 4}
"""Unseen prompts decoded for real, with and without the drafter."""
NUM_SHOWN = 2
"""Answers shown in colour."""
WORKERS = 2
"""Target workers, and as many drafter workers."""


def demo_config(target: Literal["tiny", "smollm2"], output: Path) -> RunConfig:
    """The demo's run, from the recipe file, on this machine's devices."""
    recipe = yaml.safe_load(
        files("draftline.recipes").joinpath(f"demo-{target}.yaml").read_text(encoding="utf-8")
    )
    devices = available_devices()
    names = [str(devices[i % len(devices)]) for i in range(2 * WORKERS)]
    placement = {"mode": "split", "targets": names[:WORKERS], "drafters": names[WORKERS:]}
    return RunConfig.model_validate({**recipe, "output": output, "placement": placement})


def run_demo(
    target: Literal["tiny", "smollm2"], output: Path, command: Sequence[str], *, json_output: bool
) -> dict[str, Any]:
    """Train, measure, compare, export, show; returns the figures.

    Args:
        json_output: keep standard output free for them; what is shown goes to standard error.

    Raises:
        DraftlineError: see errors.py.
    """
    config = demo_config(target, output)
    if target == "smollm2":
        _refuse_before_fetching(config)
        config = with_own_answers(config, output.parent / f"{output.name}-smollm2", Screen())
    trained = train(config, Screen(), command)
    target_model, drafter = load_pair(trained.drafter, config.target)
    prompts = load_prompts(config.data.eval_path, target_model.tokenizer, NUM_COMPARED[target])
    limit = answer_limit(target_model, config.evaluation.max_new_tokens)
    fixed = choose_caches("auto", target_model, drafter, prompts, limit, Screen())
    compared = compare(target_model, drafter, prompts, limit, fixed)
    console = Console(stderr=json_output, highlight=False)
    _show_answers(
        console, target_model, drafter, prompts[:: max(1, len(prompts) // NUM_SHOWN)][:NUM_SHOWN], limit
    )
    console.print(fitting(_summary(trained, compared), console))
    console.print(f"The drafter lies in {trained.drafter}", soft_wrap=True, markup=False)
    return _figures(trained, compared)


def _refuse_before_fetching(config: RunConfig) -> None:
    """Refuse what `train` would refuse of the output folder, but before a target is fetched and answers."""
    refuse_store(config.output)
    settings = shared_settings(config)
    del settings["target"]  # its folder is not known yet
    refuse_other_run(config.output / CHECKPOINTS, Identity(settings), partial=True)


def _show_answers(
    console: Console, target: Target, drafter: Drafter, prompts: Sequence[Prompt], limit: Limit
) -> None:
    for prompt in prompts:
        asked = Text(str(target.tokenizer.decode(list(prompt.input_ids))), style="dim")
        console.print(asked, end="", soft_wrap=True)
        print_answer(decode_events(target, drafter, prompt.input_ids, limit), target.tokenizer, console)


def _summary(trained: Trained, compared: Comparison) -> Table:
    table = Table(
        Column(no_wrap=True), Column(), title="Draftline demo", show_header=False, title_justify="left"
    )
    assert trained.before is not None
    assert trained.after is not None
    rows = {
        "training": f"{trained.steps} steps in {trained.seconds:.0f} s, {trained.tokens_per_s:.0f} target tokens/s",
        "acceptance length before": _tau(trained.before),
        "acceptance length after": f"{_tau(trained.after)} on {trained.after.overall.prompts} unseen prompts",
        "outputs identical to plain greedy": f"{compared.identical} of {compared.prompts}",
        "speculative decoding": f"{compared.speculative_tokens_per_s:.0f} tokens/s, plain "
        f"{compared.plain_tokens_per_s:.0f} ({compared.speedup:.2f} x)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _tau(evaluation: Evaluation) -> str:
    overall = evaluation.overall
    return (
        f"{overall.tau:.2f} tokens per step (95 % interval {overall.tau_low:.2f} to {overall.tau_high:.2f})"
    )


def _figures(trained: Trained, compared: Comparison) -> dict[str, Any]:
    return {
        "steps": trained.steps,
        "seconds": trained.seconds,
        "target_tokens_per_s": trained.tokens_per_s,
        "tau_before": trained.before and asdict(trained.before.overall),
        "tau_after": trained.after and asdict(trained.after.overall),
        "slices": {name: found.tau for name, found in trained.after.slices.items()} if trained.after else {},
        "decoding": asdict(compared),
        "drafter": str(trained.drafter),
    }
