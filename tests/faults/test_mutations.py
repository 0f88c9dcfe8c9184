"""The list of mutations stays in step with the source; mutation_check.py applies them (minutes, nightly)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_changes_one_place_and_leaves_python_behind(mutation: Mutation) -> None:
    text = (REPOSITORY / "src" / "draftline" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    ast.parse(text.replace(mutation.old, mutation.new))
    for name in mutation.tests.split():
        assert (REPOSITORY / "tests" / name).is_file()


def test_no_sync_of_the_durable_state_is_forgotten_in_the_list() -> None:
    """Every line that syncs is covered by a mutation that removes it."""
    mutated = "".join(mutation.old for mutation in MUTATIONS)
    source = REPOSITORY / "src" / "draftline"
    for path in [
        source / "resilience/fsio.py",
        source / "resilience/folder.py",
        source / "resilience/result.py",
        *source.glob("checkpoint/*.py"),
    ]:
        for line in path.read_text().splitlines():
            if ".sync_file(" in line or ".sync_folder(" in line or "os.fsync(" in line:
                assert line.strip() in mutated, f"{path.name}: {line.strip()}"
