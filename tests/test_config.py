"""Settings: one default each, no unknown key, and complaints that name the value, the reason and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from draftline.config import DrafterConfig, OptimConfig, RowConfig, RunConfig, TargetConfig
from draftline.errors import ConfigError
from draftline.pipeline.schedule import Schedule
from draftline.settings import parse_run

NEEDED = ("--target.path=builtin:tiny", "--data.path=chats.jsonl", "--output=out", "--optim.steps=10")
NEEDED_YAML = """
target: {path: "builtin:tiny"}
data: {path: chats.jsonl}
output: out
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refused(*flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_run([*NEEDED, *flags])
    message = str(error.value)
    assert "\n" not in message
    return message


def test_four_settings_are_enough_for_a_run():
    config = parse_run(NEEDED)
    assert (config.target.path, config.data.path, config.output) == (
        "builtin:tiny",
        "chats.jsonl",
        Path("out"),
    )
    assert config.rows == RowConfig()
    assert config.drafter == DrafterConfig()


def test_flags_win_over_the_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(NEEDED_YAML + "optim: {steps: 10, lr: 1e-4}\nrows: {token_budget: 512}\n")
    config = parse_run([str(file), "--optim.lr=2e-3"])
    assert (config.optim.lr, config.optim.steps, config.rows.token_budget) == (2e-3, 10, 512)


def test_an_unknown_flag_is_refused_with_the_nearest_name():
    message = refused("--drafter.num-layer=3")
    assert "--drafter.num-layer" in message
    assert "Did you mean --drafter.num-layers?" in message


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest_name(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(NEEDED_YAML + "optim: {steps: 10}\nrows: {token_budgt: 512}\n")
    with pytest.raises(ConfigError, match=r"token_budgt.*Did you mean rows\.token_budget\?"):
        parse_run([str(file)])


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"configuration file .*run\.yaml is not there"):
        parse_run([str(tmp_path / "run.yaml")])


def test_a_setting_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="optim is missing"):
        parse_run(NEEDED[:-1])


VALUES = {
    "--optim.lr=fast": "optim.lr='fast': Input should be a valid number",
    "--optim.lr=0": "optim.lr='0': Input should be greater than 0",
    "--placement.mode=nowhere": "placement.mode='nowhere': Input should be 'auto', 'split' or 'colocated'",
    "--checkpoint.keep=1": "checkpoint.keep='1': Input should be greater than or equal to 2",
    "--drafter.block-size=1": "drafter.block_size='1': Input should be greater than or equal to 2",
    "--seed=-1": "seed='-1': Input should be greater than or equal to 0",
    "--drafter.num-layers=100000": "drafter.num_layers='100000': Input should be less than or equal to 1000",
    "--drafter.init-from=": "drafter.init_from='': String should have at least 1 character",
}


@pytest.mark.parametrize(("flag", "message"), VALUES.items())
def test_a_value_that_cannot_work_is_named_with_the_reason(flag: str, message: str):
    assert message in refused(flag)


def test_a_moving_average_that_never_moves_is_refused():
    assert refused("--optim.betas", "0.9", "1") == "optim.betas.1='1': Input should be less than 1"
    assert refused("--optim.betas", "-1", "0.9").startswith(
        "optim.betas.0='-1': Input should be greater than"
    )


@pytest.mark.parametrize("group", ["target", "data"])
def test_an_empty_path_is_not_the_present_folder(group: str):
    flags = [f"--{group}.path=" if flag.startswith(f"--{group}.path") else flag for flag in NEEDED]
    with pytest.raises(ConfigError, match=rf"{group}\.path='': String should have at least 1 character"):
        parse_run(flags)


@pytest.mark.parametrize(("budget", "better"), [(1000, 1024), (1, 128), (4097, 4224)])
def test_a_token_budget_that_is_no_multiple_of_128_is_refused_with_the_next_one(budget: int, better: int):
    message = refused(f"--rows.token-budget={budget}")
    assert message == (f"rows.token_budget={budget} is not a multiple of 128 (attention tile); use {better}")


@pytest.mark.parametrize(("blocks", "size", "better"), [(3, 16, 8), (5, 7, 128), (100, 10, 128), (65, 8, 80)])
def test_blocks_that_do_not_fill_tiles_are_refused_with_the_next_budget(blocks: int, size: int, better: int):
    message = refused(f"--rows.block-budget={blocks}", f"--drafter.block-size={size}")
    assert message.endswith(f"= {blocks * size} is not a multiple of 128; use rows.block_budget={better}")
    config = parse_run([*NEEDED, f"--rows.block-budget={better}", f"--drafter.block-size={size}"])
    assert config.rows.block_budget * config.drafter.block_size % 128 == 0


def test_the_length_of_a_run_is_given_once():
    with pytest.raises(ValidationError, match=r"exactly one of optim\.steps and optim\.epochs"):
        OptimConfig()
    assert refused("--optim.epochs=2") == "give exactly one of optim.steps and optim.epochs"
    assert OptimConfig(epochs=0.5).steps is None


@pytest.mark.parametrize(
    "revision", [None, "main", COMMIT[:-1], "release-of-the-tenth-of-october-version-a"[:40]]
)
def test_remote_code_runs_only_from_a_commit_that_is_named(revision: str | None):
    with pytest.raises(
        ValidationError, match=r"set target\.revision to the 40-digit commit that you have read"
    ):
        TargetConfig(path="owner/name", trust_remote_code=True, revision=revision)
    assert TargetConfig(path="owner/name", trust_remote_code=True, revision=COMMIT).trust_remote_code


def test_rows_of_a_step_must_divide_over_the_drafters():
    with pytest.raises(
        ConfigError, match=r"optim\.rows_per_step=8 is not a multiple of 3 drafters; use 6 or 9"
    ):
        Schedule(
            num_steps=1, rows_per_step=parse_run(NEEDED).optim.rows_per_step, num_targets=1, num_drafters=3
        )


def test_evaluation_without_held_out_prompts_is_refused_since_none_would_be_made():
    message = refused("--evaluation.every=5", "--evaluation.thinking=on")
    assert "evaluation.every=5 and evaluation.thinking=on would have no effect" in message
    assert "data.eval_path" in message
    parse_run([*NEEDED, "--evaluation.every=5", "--data.eval-path=held-out.jsonl"])


def test_a_configuration_never_changes():
    config = parse_run(NEEDED)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3


def test_every_setting_is_described_with_its_default():
    def undescribed(model: type[Any], prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found += undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                found.append(prefix + name)
        return found

    assert undescribed(RunConfig) == []
