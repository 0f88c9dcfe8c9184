"""`draftline plan`: the proposal as a table for a person, or as values for a program."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from draftline.config import PlacementConfig, RunConfig
from draftline.console import fitting
from draftline.options import PlanOptions
from draftline.outcome import readable
from draftline.pipeline.placement import GIB, Option
from draftline.pipeline.planning import Hardware, Proposal, hardware_here, propose
from draftline.setup import check_target
from draftline.target.load import sketch_target


def plan_run(config: RunConfig, options: PlanOptions) -> Proposal:
    """Plan for this machine, or for the devices described.

    Raises:
        ConfigError: the target cannot be used, or no placement fits.
    """
    here = hardware_here()
    memory = here.memory_bytes if options.memory_gib is None else int(options.memory_gib * GIB)
    kind = here.kind if options == PlanOptions() else "cuda"  # whoever describes devices means GPUs
    hardware = Hardware(options.devices or here.count, memory, kind, options.tflops)
    timed = options.tflops is None and here.kind == "cuda"
    return propose(config, check_target(config), sketch_target(config.target), hardware, timed=timed)


def plan_values(proposal: Proposal, placement: PlacementConfig) -> dict[str, Any]:
    """Everything that `show_proposal` shows."""
    costs = proposal.costs
    return {
        "chosen": proposal.chosen.name,
        "why": proposal.why(),
        "source": proposal.source,
        "target_weights": costs.target.num_weights,
        "drafter_weights": costs.drafter.num_weights,
        "target_s": proposal.times.target_s if proposal.source != "counted" else None,
        "drafter_s": proposal.times.drafter_s if proposal.source != "counted" else None,
        "untimed": proposal.untimed,
        "peak_gib": _gib(proposal.calibration.peak_bytes) if proposal.calibration else None,
        "asked": _asked(placement),
        "options": [_option_values(proposal, option) for option in proposal.options],
    }


def _option_values(proposal: Proposal, option: Option) -> dict[str, Any]:
    return {
        "placement": option.name,
        "tokens_per_s": proposal.tokens_per_s(option),
        "relative": option.rows_per_s / proposal.options[0].rows_per_s,
        "hours": proposal.hours(option),
        "target_device_gib": _gib(option.bytes_on_target),
        "drafter_device_gib": _gib(option.bytes_on_drafter),
        "refusal": option.refusal,
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 3)


def show_proposal(proposal: Proposal, placement: PlacementConfig, console: Console) -> None:
    """Print the table and the reason, and what the run itself asks for."""
    costs = proposal.costs
    console.print(
        f"target {costs.target.num_weights / 1e6:,.1f} M weights, drafter {costs.drafter.num_weights / 1e6:,.1f} M"
    )
    figures = (Column(name, no_wrap=True) for name in ("tokens/s", "best", "hours", "GiB"))
    table = Table("placement", *figures, box=SIMPLE)
    for option in proposal.options:
        values = _option_values(proposal, option)
        sizes = f"{values['target_device_gib']:.1f}"
        if option.mode == "split":
            sizes += f" + {values['drafter_device_gib']:.1f}"
        table.add_row(
            option.name,
            _number(values["tokens_per_s"], "{:,.0f}"),
            "cannot" if option.refusal else f"{values['relative']:.0%}",
            _number(values["hours"], "{:.2f}"),
            sizes,
        )
    console.print(fitting(table, console))
    console.print(proposal.why(), soft_wrap=True, markup=False)
    if placement != PlacementConfig():
        asked = readable({"The run itself names its placement, which `train` keeps:": _asked(placement)})
        console.print("\n".join(asked), soft_wrap=True, markup=False)
    if proposal.untimed is not None:
        console.print(proposal.untimed, soft_wrap=True, markup=False)
    elif proposal.source == "counted":
        console.print(
            "No GPU is here to be timed: add --tflops (what one device reaches on this, 500 for an H200) for tokens/s",
            soft_wrap=True,
        )
    if proposal.num_rows is None:
        console.print(
            "The data set is not prepared yet: hours follow from `draftline prepare` and data.path",
            soft_wrap=True,
        )


def _asked(placement: PlacementConfig) -> dict[str, Any]:
    return {
        f"placement.{name}": value
        for name, value in placement.model_dump(mode="json", exclude_defaults=True).items()
    }


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
