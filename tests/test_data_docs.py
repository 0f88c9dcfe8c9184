"""The page about data says what the command line does: every flag, every default, every command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from draftline.cli import app
from draftline.config import Frozen
from draftline.data.options import LocalOptions, PrepareOptions, RegenerateOptions, RequestOptions
from draftline.data.sampling import Sampling

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
POSITIONAL = {"--source", "--out", "--store"}
FLAG = re.compile(r"`(--[\w-]+)")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(title: str) -> dict[str, str]:
    """Default by flag."""
    rows = [line.split("|") for line in section(title).splitlines() if line.startswith("| `--")]
    return {flag: row[2].strip() for row in rows for flag in FLAG.findall(row[1])}


def flags(command: str) -> set[str]:
    names = {name for argument in app[command].assemble_argument_collection() for name in argument.names}
    return {name for name in names if name.startswith("--") and not name.startswith("--empty-")} - POSITIONAL


@pytest.mark.parametrize("command", ["prepare", "regenerate", "synthesize"])
def test_the_table_of_a_command_has_its_flags_and_no_others(command: str):
    assert set(table(command.capitalize())) == flags(command) - {"--no-overwrite"}


def test_inspect_is_shown_with_all_its_flags():
    assert flags("inspect") - {"--source"} <= set(re.findall(r"--[\w-]+", section("The report")))


@pytest.mark.parametrize(
    ("title", "options"),
    [
        ("Prepare", PrepareOptions),
        ("Regenerate", RegenerateOptions),
        ("Regenerate", RequestOptions),
        ("Regenerate", LocalOptions),
        ("Regenerate", Sampling),
    ],
)
def test_the_defaults_in_a_table_are_those_of_the_settings(title: str, options: type[Frozen]):
    written = table(title)
    for name, field in options.model_fields.items():
        if isinstance(field.default, int | float | str):
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            assert written["--" + name.replace("_", "-")] == default


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_every_command_in_the_docs_parses(page: str):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("draftline ")]
    assert lines
    for line in lines:
        app.parse_args(shlex.split(line, comments=True)[1:], exit_on_error=False, print_error=False)
