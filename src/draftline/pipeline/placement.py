"""Which devices should run what: every possible placement with its rate and its memory, best first.

A device that does both in turn needs the time of both a row; separate devices run side by side, and the slower
side sets the pace. So the best split follows from two times and a number of devices, and is computed, never
guessed. Colocated is never slower unless memory or the batch forbids it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from draftline.errors import ConfigError

Mode = Literal["split", "colocated"]
GIB = 2**30
"""Bytes."""


@dataclass(frozen=True)
class SideTimes:
    """Seconds that one device needs for a row, each side alone."""

    target_s: float
    drafter_s: float


@dataclass(frozen=True)
class Option:
    """One placement."""

    mode: Mode
    num_targets: int
    num_drafters: int
    rows_per_s: float
    bytes_on_target: int
    """On the fullest device that runs the target."""
    bytes_on_drafter: int
    refusal: str | None
    """Why it cannot be used; None when it can."""

    @property
    def name(self) -> str:
        """As a person would say it."""
        if self.mode == "colocated":
            return f"colocated on {self.num_drafters}"
        return f"split {self.num_targets} + {self.num_drafters}"


def rows_per_s(mode: Mode, times: SideTimes, num_targets: int, num_drafters: int) -> float:
    """Rate of the whole run."""
    if mode == "colocated":
        return num_drafters / (times.target_s + times.drafter_s)
    return min(num_targets / times.target_s, num_drafters / times.drafter_s)


def list_options(
    times: SideTimes,
    num_devices: int,
    rows_per_step: int,
    capacity: int,
    bytes_of: Callable[[Mode, int, int], tuple[int, int]],
) -> list[Option]:
    """Every placement of whole devices, the fastest usable one first.

    Args:
        capacity: bytes of one device that may be used.
        bytes_of: (mode, targets, drafters) -> bytes on a target's and on a drafter's device.
    """
    splits: list[tuple[Mode, int, int]] = [("split", num_devices - m, m) for m in range(1, num_devices)]
    places: list[tuple[Mode, int, int]] = [("colocated", num_devices, num_devices), *splits]
    options = []
    for mode, num_targets, num_drafters in places:
        needed = bytes_of(mode, num_targets, num_drafters)
        rate = rows_per_s(mode, times, num_targets, num_drafters)
        refusal = _refusal(max(needed), capacity, num_drafters, rows_per_step)
        options.append(Option(mode, num_targets, num_drafters, rate, *needed, refusal))
    return sorted(options, key=lambda option: (option.refusal is not None, -option.rows_per_s))


def _refusal(needed: int, capacity: int, num_drafters: int, rows_per_step: int) -> str | None:
    if rows_per_step % num_drafters:
        return f"optim.rows_per_step={rows_per_step} is not a multiple of {num_drafters} drafters"
    if needed > capacity:
        return f"needs {needed / GIB:.3g} GiB on a device, {capacity / GIB:.3g} GiB may be used"
    return None


def choose(options: Sequence[Option]) -> Option:
    """The fastest usable placement.

    Raises:
        ConfigError: none can be used; every reason is named.
    """
    if options[0].refusal is None:
        return options[0]
    reasons = "; ".join(f"{option.name} {option.refusal}" for option in options)
    raise ConfigError(
        f"no placement fits: {reasons}. Lower rows.token_budget, rows.block_budget or loss.chunk_rows, change "
        "optim.rows_per_step, or use more devices"
    )
