"""`draftline evaluate`: acceptance by replay, speed by real decoding, and what both say about serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from draftline.console import Screen, fitting, visible
from draftline.decoding.acceptance import Acceptance
from draftline.decoding.advice import Prediction, Timings, block_sizes, predict_speedups, time_steps, warnings
from draftline.decoding.caches import choose_caches
from draftline.decoding.evaluate import Comparison, Evaluation, Reference, compare, evaluate
from draftline.decoding.greedy import Limit, is_recurrent
from draftline.drafter.model import Drafter
from draftline.metrics import eval_metrics
from draftline.options import Caches
from draftline.target.load import Target

BAR = 30
"""Columns of a bar for all verify steps."""


@dataclass(frozen=True)
class Measurement:
    """Everything that one evaluation of a drafter found."""

    target: str
    device: str
    dtype: str
    block_size: int
    max_new_tokens: int
    caches: Literal["growing", "fixed"]
    """Of real decoding and of the timings."""
    evaluation: Evaluation
    decoding: Comparison | None
    """Real decoding with and without the drafter; None when it was left out."""
    timings: Timings | None
    predictions: tuple[Prediction, ...]
    """By the model in `advice`, at other block lengths and the trained one."""
    speedup_model: dict[str, float]
    """By the same model at the trained block length, for each slice."""
    warnings: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """The figures under the names that training logs them by."""
        found = eval_metrics(self.evaluation)
        found |= {f"eval/speedup_model/{name}": gain for name, gain in self.speedup_model.items()}
        if self.decoding is not None:
            found |= {
                "eval/speedup": self.decoding.speedup,
                "eval/plain_tokens_per_s": self.decoding.plain_tokens_per_s,
                "eval/speculative_tokens_per_s": self.decoding.speculative_tokens_per_s,
                "eval/draft_ms": self.decoding.draft_ms,
                "eval/verify_ms": self.decoding.verify_ms,
            }
        return found

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values; slices and figures by name."""
        return {**asdict(self), "metrics": self.metrics()}


def measure(
    target: Target,
    drafter: Drafter,
    references: Sequence[Reference],
    limit: Limit,
    num_compared: int,
    caches: Caches = "auto",
    screen: Screen | None = None,
) -> Measurement:
    """Replay all answers, then decode some of their prompts for real, with and without the drafter.

    Args:
        num_compared: prompts that are decoded, evenly spread over all; 0 leaves speed out.
        caches: of both sides of the comparison, see `choose_caches`.
        screen: where progress is shown; none for nowhere.

    Raises:
        DataError: no answer is long enough to have a verify step.
    """
    screen = screen or Screen(quiet=True)
    with screen.counting("replayed answers", len(references)) as progress:
        evaluation = evaluate(target, drafter, references, progress=progress)
    decoding = timings = fixed = None
    size = drafter.spec.block_size
    if num_compared:
        chosen = [reference.prompt for reference in references]
        chosen = chosen[:: -(-len(chosen) // num_compared)]
        fixed = choose_caches(caches, target, drafter, chosen, limit, screen, block_sizes(size))
        with screen.counting("decoded with and without the drafter", len(chosen)) as progress:
            decoding = compare(target, drafter, chosen, limit, fixed, progress)
        sequence = fixed and fixed.verifier
        if fixed is not None:
            fixed.reset()
        timings = time_steps(target, chosen[0].input_ids, size, decoding.draft_ms, sequence)
    return Measurement(
        target=target.name,
        device=str(target.device),
        dtype=str(target.embedding.dtype).removeprefix("torch."),
        block_size=size,
        max_new_tokens=limit.max_new_tokens,
        caches="growing" if fixed is None else "fixed",
        evaluation=evaluation,
        decoding=decoding,
        timings=timings,
        predictions=predict_speedups(evaluation, timings) if timings else (),
        speedup_model={name: timings.speedup(found.tau, size) for name, found in evaluation.slices.items()}
        if timings
        else {},
        warnings=warnings(evaluation, decoding, timings, recurrent=is_recurrent(target)),
    )


def print_measurement(measured: Measurement, console: Console) -> None:
    """Tables for a person."""
    tables = [_acceptance_table(measured), _position_table(measured.evaluation)]
    if measured.decoding is not None and measured.timings is not None:
        tables += [_speed_table(measured.decoding), _prediction_table(measured)]
    for table in tables:
        console.print(fitting(table, console))
    for warning in measured.warnings:
        console.print(Text.assemble(("warning", "yellow"), f" {warning}"), soft_wrap=True)


def _acceptance_table(measured: Measurement) -> Table:
    table = Table(
        title=f"Acceptance length, greedy, {escape(measured.target)} in {measured.dtype} on {measured.device}",
        title_justify="left",
    )
    table.add_column("set")
    headings = ["tau", "95 %\ninterval", "mean of\nprompts", "prompts", "verify\nsteps"]
    for heading in [*headings, *(["predicted\nspeed-up"] if measured.speedup_model else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    overall = measured.evaluation.overall
    size = measured.block_size
    gain = measured.timings.speedup(overall.tau, size) if measured.timings else None
    for name, found in measured.evaluation.slices.items():
        table.add_row(*_acceptance_row(escape(visible(name)), found, measured.speedup_model.get(name)))
    table.add_section()
    table.add_row(*_acceptance_row("all", overall, gain), style="bold")
    return table


def _acceptance_row(name: str, found: Acceptance, gain: float | None) -> list[str]:
    cells = [
        name,
        f"{found.tau:.2f}",
        f"{found.tau_low:.2f} to {found.tau_high:.2f}",
        f"{found.tau_macro:.2f}",
        str(found.prompts),
        str(found.verify_steps),
    ]
    return cells if gain is None else [*cells, f"{gain:.2f}x"]


def _position_table(evaluation: Evaluation) -> Table:
    """Share of steps that kept at least so many drafts, as figures and as bars."""
    table = Table(
        *(Column(no_wrap=True) for _ in range(3)),
        title="Drafts kept, share of verify steps",
        title_justify="left",
        show_header=False,
    )
    for slot, share in enumerate(evaluation.overall.accept_pos, start=1):
        table.add_row(f"at least {slot}", f"{share:.3f}", f"[green]{'█' * round(BAR * share)}[/green]")
    return table


def _speed_table(decoding: Comparison) -> Table:
    table = Table(
        *(Column(no_wrap=True) for _ in range(2)),
        title="Real decoding, one prompt at a time",
        title_justify="left",
        show_header=False,
    )
    rows = {
        "without drafter": f"{decoding.plain_tokens_per_s:.1f} tokens/s",
        "with drafter": f"{decoding.speculative_tokens_per_s:.1f} tokens/s",
        "speed-up measured": f"{decoding.speedup:.2f}x",
        "draft": f"{decoding.draft_ms:.2f} ms a step",
        "verify": f"{decoding.verify_ms:.2f} ms a step",
        "same answer as plain greedy": f"{decoding.identical} of {decoding.prompts}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _prediction_table(measured: Measurement) -> Table:
    assert measured.timings is not None
    table = Table(title="Predicted at other block lengths (a model)", title_justify="left")
    for heading in ("block", "tau", "verify ms", "break-even tau", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in measured.predictions:
        table.add_row(
            str(each.block_size),
            f"{each.tau:.2f}",
            f"{measured.timings.verify_ms[each.block_size]:.2f}",
            f"{measured.timings.break_even(each.block_size):.2f}",
            f"{each.speedup:.2f}x",
            style="bold" if each.block_size == measured.block_size else None,
        )
    return table
