"""Which worker does which row, and when everybody stops. Row i goes to drafter i mod M from target i mod N."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from draftline.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The rows of a run: steps `first_step` .. `num_steps` - 1 of `rows_per_step` rows each."""

    num_steps: int
    rows_per_step: int
    num_targets: int
    num_drafters: int
    first_step: int = 0

    def __post_init__(self) -> None:
        if self.rows_per_step % self.num_drafters:
            down = self.rows_per_step // self.num_drafters * self.num_drafters
            up = down + self.num_drafters
            raise ConfigError(
                f"optim.rows_per_step={self.rows_per_step} is not a multiple of {self.num_drafters} drafters; use "
                + (f"{down} or {up}" if down else f"{up}")
            )

    @property
    def first_row(self) -> int:
        """First row of the run."""
        return self.first_step * self.rows_per_step

    @property
    def rows_per_drafter(self) -> int:
        """Rows of one optimizer step that each drafter learns from."""
        return self.rows_per_step // self.num_drafters

    def rows_of_target(self, target: int) -> Iterator[int]:
        """Rows that target worker `target` computes, ascending."""
        end = self.num_steps * self.rows_per_step
        offset = (target - self.first_row) % self.num_targets
        return iter(range(self.first_row + offset, end, self.num_targets))

    def rows_of_step(self, step: int) -> range:
        """All rows of one optimizer step."""
        return range(step * self.rows_per_step, (step + 1) * self.rows_per_step)

    def rows_of_drafter(self, drafter: int, step: int) -> range:
        """Rows of one optimizer step that drafter `drafter` learns from, ascending."""
        rows = self.rows_of_step(step)
        offset = (drafter - rows.start) % self.num_drafters
        return rows[offset :: self.num_drafters]

    def drafter_of(self, row: int) -> int:
        """The drafter that learns from a row."""
        return row % self.num_drafters

    def first_row_of_drafter(self, drafter: int) -> int:
        """The first row of the run that goes to a drafter."""
        return self.rows_of_drafter(drafter, self.first_step)[0]


class StopLine:
    """Lets drafters, which run in lock step, agree on the last step when a stop is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = -1
        self._requested = False
        self._stop_at: int | None = None

    def request(self) -> None:
        """Ask for a stop after the step that is running."""
        with self._lock:
            self._requested = True

    def may_start(self, step: int) -> bool:
        """Whether a drafter goes on with `step`; every drafter gets the same answer for the same step."""
        with self._lock:
            if self._requested and self._stop_at is None:
                self._stop_at = max(self._newest + 1, step)
            if self._stop_at is not None and step >= self._stop_at:
                return False
            self._newest = max(self._newest, step)
            return True
