"""What several files share: one run that nothing disturbed, and its token store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.real_runs import Trainers, settings, train_here, trainers


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one target and one drafter that came to its end."""
    output = tmp_path_factory.mktemp("unbroken") / "run"
    train_here(settings(output))
    return output


@pytest.fixture(scope="session")
def store(unbroken: Path) -> Path:
    """Its token store, so that other runs need not prepare theirs."""
    return unbroken / "store"


@pytest.fixture(scope="session")
def warm() -> Iterator[Trainers]:
    """A process that forks trainers."""
    with trainers() as server:
        yield server
