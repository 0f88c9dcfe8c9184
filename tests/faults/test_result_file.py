"""`result.json` tells how the run ended; no secret reaches it or any manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftline.checkpoint import Checkpointer, Identity, Snapshot
from draftline.resilience.redact import redact, redact_argv, redact_text
from draftline.resilience.result import RunResult, write_result

SECRETS = [
    "hf_abcdefghijklmnopqrstuvwxyz0123456789",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijklmnop",
    "glpat-abcdefghijklmnopqrst",
    "sk-proj-abcdefghijklmnopqrstuvwx",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefghijkl",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
]
ORDINARY = {
    "token_budget": 4096,
    "mask_token_id": 151669,
    "max_new_tokens": 256,
    "eos_token": "<|im_end|>",
    "pad_token": "<pad>",
    "num_tokens": 3,
    "monkey": "value",
    "key": "model.layers.0",
    "revision": "0123456789abcdef0123456789abcdef01234567",
}


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    result = RunResult(
        exit_code=5,
        cause="loss of drafter-1 is NaN at step 12",
        error="NonFiniteError",
        worker="drafter-1",
        step=12,
        row=97,
        checkpoint="checkpoints/step-000010",
        consequences=("drafter-0: aborted",),
        command=("draftline", "train", "run.yaml"),
    )
    write_result(tmp_path, result)
    assert RunResult.model_validate_json((tmp_path / "result.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_later_result_replaces_the_earlier_one(tmp_path: Path) -> None:
    write_result(tmp_path, RunResult(exit_code=75, cause="stopped"))
    write_result(tmp_path, RunResult(exit_code=0, cause="finished"))
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == 0


def test_a_folder_that_is_gone_is_told_and_does_not_hide_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path / "gone", RunResult(exit_code=8, cause="disk full"))
    assert "could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_redacted_wherever_it_stands(tmp_path: Path, secret: str) -> None:
    result = RunResult(
        exit_code=2,
        cause=f"401 for https://user:{secret}@huggingface.co/x with Authorization: Bearer {secret}",
        consequences=(f"HF_TOKEN={secret}", f"wandb: api_key: {secret}"),
        command=("draftline", "train", "--hf-token", secret, f"--api-key={secret}", f"data={secret}"),
        stacks=f"token = '{secret}'",
    )
    write_result(tmp_path, result)
    assert secret not in (tmp_path / "result.json").read_text()


def test_a_secret_of_no_known_form_is_redacted_by_its_name() -> None:
    config = {"hub": {"token": "plain", "password": "plain"}, "wandb_api_key": "plain", "HF_TOKEN": "plain"}
    assert "plain" not in json.dumps(redact(config))
    assert redact_argv(["--token", "plain", "--client-secret=plain"]) == [
        "--token",
        "[redacted]",
        "--client-secret=[redacted]",
    ]
    assert "plain" not in redact_text(
        "WANDB_API_KEY=plain x?token=plain&y password: plain; s3://me:plain@host"
    )


def test_ordinary_settings_of_language_models_are_not_redacted() -> None:
    assert redact(ORDINARY) == ORDINARY
    text = "token_budget=4096, mask_token=<mask>, the next token: <|im_end|>, key=value"
    assert redact_text(text) == text
    assert redact_argv(["--eos-token", "<|im_end|>"]) == ["--eos-token", "<|im_end|>"]


def test_a_checkpoints_manifest_holds_no_secret_and_still_resumes(tmp_path: Path) -> None:
    identity = Identity(config={"target": {"path": f"https://u:{SECRETS[0]}@host/x", "hf_token": "plain"}})
    for step in (1, 2):
        with Checkpointer(tmp_path / "c", identity, keep=2, write_timeout_s=20) as saver:
            saver.load_latest()
            saver.save(Snapshot(step=step, row=step, tensors={"w.safetensors": {"w": torch.ones(1)}}))
    text = (tmp_path / "c" / "step-000002" / "manifest.json").read_text()
    assert SECRETS[0] not in text
    assert "plain" not in text
