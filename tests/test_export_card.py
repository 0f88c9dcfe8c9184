"""What the README of a drafter and the advice about it say."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from draftline.console import Screen
from draftline.data.fingerprint import hash_file
from draftline.decoding.acceptance import Walk, acceptance
from draftline.decoding.advice import Timings, block_sizes, predict_speedups, time_steps, warnings
from draftline.decoding.evaluate import Comparison, Evaluation
from draftline.run import train
from draftline.serving.card import measured_in, measured_section, model_card, serve_lines
from draftline.serving.importing import load_drafter
from draftline.serving.measured import (
    DrafterHash,
    account,
    bound,
    drafter_hash,
    earlier_figures,
    figures_to_show,
)
from draftline.settings import parse_run
from tests.oracles.targets import random_target
from tests.oracles.tiny import tiny_spec
from tests.test_cli import SETTINGS

ACCEPTANCE = acceptance([Walk((4, 3), (3, 2)), Walk((2, 1, 1), (1, 0, 0))], slots=3)
EVALUATION = Evaluation(ACCEPTANCE, {"math": ACCEPTANCE}, ce=1.5, tau_by_drafts=(1.6, 1.9, 2.2))
TIMINGS = Timings(draft_ms=2.0, verify_ms={1: 10.0, 2: 11.0, 4: 12.0})
MANY = replace(EVALUATION, overall=replace(ACCEPTANCE, verify_steps=2000))
COMPARISON = Comparison(
    prompts=2,
    identical=2,
    tokens=13,
    tau=2.2,
    plain_tokens_per_s=50.0,
    speculative_tokens_per_s=90.0,
    speedup=1.8,
    draft_ms=4.0,
    verify_ms=20.0,
)


def test_serve_lines_carry_the_trained_block_size():
    lines = serve_lines(tiny_spec(), "owner/target", "me/drafter")

    assert lines["SGLang"].endswith("--speculative-num-draft-tokens 4")
    assert '"num_speculative_tokens": 3' in lines["vLLM"]
    assert all("owner/target" in line and "me/drafter" in line for line in lines.values())


def test_zlabs_own_parser_takes_its_line():
    cli = pytest.importorskip("dflash.cli", reason="oracle: pip install --no-deps dflash==0.1.0")
    words = shlex.split(serve_lines(tiny_spec(), "owner/target", "me/drafter")["z-lab"])

    parsed = cli._parser().parse_args(words[1:])

    assert words[0] == "dflash"
    assert (parsed.model, parsed.draft, parsed.block_size) == ("owner/target", "me/drafter", 4)


def test_a_folder_in_speculators_format_is_served_by_vllm_alone():
    lines = serve_lines(tiny_spec(), "owner/target", "me/drafter", "speculators")
    assert list(lines) == ["vLLM"]
    assert lines["vLLM"].startswith("vllm serve me/drafter ")


def test_a_card_shows_what_was_measured_and_admits_what_was_not():
    section = measured_section(
        EVALUATION,
        measured_in("owner/target", "float32", "cpu", 256),
        COMPARISON,
        predict_speedups(EVALUATION, TIMINGS),
    )
    measured = model_card(tiny_spec(), "owner/target", "me/drafter", figures=section)
    silent = model_card(tiny_spec(), "owner/target", "me/drafter")

    assert f"| math | {ACCEPTANCE.tau:.2f} |" in measured
    assert "2 of 2 answers equal plain greedy decoding" in measured
    assert "Measured on owner/target in float32 on cpu, answers of at most 256 tokens." in measured
    assert "| 2 | 1.60 | 1.23 |" in measured
    assert "Acceptance was not measured." in silent
    assert "| prompts |" not in silent


OURS = drafter_hash("a" * 64, tiny_spec())
OTHERS = DrafterHash("b" * 64, OURS.settings)
OTHER_BLOCK = drafter_hash(OURS.weights, tiny_spec(block_size=tiny_spec().block_size // 2))


def card_in(folder: Path, figures: str | None) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text(model_card(tiny_spec(), "owner/target", "me/it", figures=figures))
    return folder


def test_a_drafter_is_named_by_what_it_does_and_not_by_how_its_settings_are_spelled():
    spec = tiny_spec()
    spelled = spec.model_copy(update={"is_causal": False, "tokenizer_sha256": "c" * 64, "eos_token_id": 3})
    assert drafter_hash(OURS.weights, spelled) == OURS
    for change in (
        {"rope_theta": 1e4},
        {"target_layer_ids": (0, 2)},
        {"mask_token_id": 5},
        {"is_causal": True},
    ):
        assert drafter_hash(OURS.weights, spec.model_copy(update=change)) != OURS, change


def test_figures_of_the_very_same_drafter_are_found_in_an_earlier_card_word_for_word(tmp_path):
    section = bound(measured_section(EVALUATION, "Measured on owner/target."), OURS)
    folders = [
        tmp_path / "nothing here",
        card_in(tmp_path / "none", None),
        card_in(tmp_path / "ours", section),
    ]

    earlier = earlier_figures(folders)

    assert figures_to_show(None, earlier, OURS) == section
    assert f"`{OURS.weights}`" in section
    assert f"figures of {folders[2]}/README.md are kept" in account(earlier, OURS, folders[2])


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (bound("## Acceptance", OTHERS), "other weights (SHA-256 bbbbbbbbbbbb, these are aaaaaaaaaaaa)"),
        (bound("## Acceptance", OTHER_BLOCK), "these weights (SHA-256 aaaaaaaaaaaa) under other settings in"),
        ("## Acceptance", "does not tell with which drafter"),
    ],
)
def test_figures_of_another_or_an_unknown_drafter_are_never_kept_and_said_to_be_dropped(
    section, why, tmp_path
):
    folder = card_in(tmp_path / "out", section)
    earlier = earlier_figures([folder])

    assert figures_to_show(None, earlier, OURS) is None
    assert why in account(earlier, OURS, folder)
    assert "To measure, name prompts and the target" in account(earlier, OURS, folder)


def test_what_is_measured_now_takes_the_place_of_earlier_figures(tmp_path):
    earlier = earlier_figures([card_in(tmp_path / "out", bound("## Acceptance\n\nold", OURS))])
    assert figures_to_show("new", earlier, OURS) == bound("new", OURS)


def test_a_run_that_measures_nothing_keeps_the_figures_that_its_drafter_has(tmp_path):
    flags = [flag for flag in SETTINGS if not flag.startswith(("--data.eval-path", "--evaluation"))]
    config = parse_run([*flags, "--optim.steps=1", f"--output={tmp_path / 'run'}"])
    drafter = train(config, Screen(quiet=True)).drafter
    spec, _ = load_drafter(drafter)
    named = drafter_hash(hash_file(drafter / "model.safetensors"), spec)
    section = bound("## Acceptance\n\nby an export", named)
    assert "Acceptance was not measured." in (drafter / "README.md").read_text()
    (drafter / "README.md").write_text(section)

    train(config, Screen(quiet=True))

    assert section in (drafter / "README.md").read_text()
    assert "## Serving" in (drafter / "README.md").read_text()


def test_a_run_that_measures_nothing_says_that_it_drops_the_figures_of_what_it_replaces(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    flags = [flag for flag in SETTINGS if not flag.startswith(("--data.eval-path", "--evaluation"))]
    config = parse_run([*flags, "--optim.steps=1", f"--output={tmp_path / 'run'}"])
    drafter = train(config, Screen()).drafter
    assert "figures" not in capsys.readouterr().err
    (drafter / "README.md").write_text(bound("## Acceptance", OTHERS))

    train(config, Screen())

    assert "Acceptance was not measured." in (drafter / "README.md").read_text()
    assert "are dropped: they were measured with other weights" in capsys.readouterr().err


def test_a_card_that_cannot_be_read_has_no_figures(tmp_path):
    section = bound("## Acceptance", OURS)
    for name in ("link", "bytes"):
        (tmp_path / name).mkdir()
    (tmp_path / "real.md").write_text(section)
    (tmp_path / "link" / "README.md").symlink_to(tmp_path / "real.md")
    (tmp_path / "bytes" / "README.md").write_bytes(section.encode() + b"\xff")
    assert earlier_figures([tmp_path / "link", tmp_path / "bytes"]) == []


def test_the_model_is_tau_times_a_plain_token_over_a_step():
    assert predict_speedups(EVALUATION, TIMINGS)[1].speedup == 2.2 * 10.0 / (2.0 + 12.0)
    assert TIMINGS.break_even(4) == (2.0 + 12.0) / 10.0
    assert TIMINGS.speedup(TIMINGS.break_even(4), 4) == pytest.approx(1)


def test_predictions_cover_shorter_blocks_with_their_own_tau():
    assert [(p.block_size, p.tau) for p in predict_speedups(EVALUATION, TIMINGS)] == [(2, 1.6), (4, 2.2)]


@pytest.mark.parametrize(
    ("trained", "sizes"), [(2, [2]), (7, [2, 4, 7]), (8, [2, 4, 8]), (16, [2, 4, 8, 16])]
)
def test_the_trained_block_is_always_among_the_lengths(trained, sizes):
    assert block_sizes(trained) == sizes


@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_every_length_is_timed_and_the_context_stays_as_it_was(family):
    timings = time_steps(random_target(family), [1, 2, 3], 8, draft_ms=1.0)
    assert list(timings.verify_ms) == [1, 2, 4, 8]
    assert all(value > 0 for value in timings.verify_ms.values())


def advice(evaluation=MANY, compared=COMPARISON, timings=TIMINGS, recurrent=False):
    return warnings(evaluation, compared, timings, recurrent=recurrent)


def test_a_good_drafter_measured_well_draws_no_warning():
    assert advice() == ()


def test_a_drafter_that_slows_decoding_is_called_so_with_the_arithmetic():
    slow = replace(COMPARISON, speedup=0.8, verify_ms=60.0)
    assert "a step costs 3.2 plain tokens and gives 2.20" in advice(compared=slow)[0]


def test_different_answers_and_too_few_steps_are_pointed_out():
    found = advice(EVALUATION, replace(COMPARISON, identical=1))
    assert any("1 of 2 answers differ" in text for text in found)
    assert any("tau rests on 5 verify steps" in text for text in found)


def test_a_set_on_which_it_would_not_pay_is_named_with_its_break_even():
    poor = replace(MANY, slices={"math": ACCEPTANCE, "poetry": replace(ACCEPTANCE, tau=1.3)})
    assert any(
        "would not pay on poetry (1.30): a step costs 1.40 plain tokens" in text for text in advice(poor)
    )


def test_a_shorter_block_that_would_be_faster_is_recommended():
    slow_long = Timings(draft_ms=2.0, verify_ms={1: 10.0, 2: 11.0, 4: 20.0})
    assert any(
        "blocks of 2 should be faster here than the trained 4" in text for text in advice(timings=slow_long)
    )


@pytest.mark.parametrize("kind", ["mode", "language"])
def test_acceptance_that_depends_on_mode_or_language_is_pointed_out(kind):
    uneven = {f"{kind}/a": ACCEPTANCE, f"{kind}/b": replace(ACCEPTANCE, tau=1.45)}
    assert any(
        f"depends on the {kind}: {kind}/b 1.45" in text for text in advice(replace(MANY, slices=uneven))
    )
    even = {f"{kind}/a": ACCEPTANCE, f"{kind}/b": replace(ACCEPTANCE, tau=2.0)}
    assert advice(replace(MANY, slices=even)) == ()


def test_speed_on_a_recurrent_target_is_not_passed_off_as_an_engines():
    slow = replace(COMPARISON, speedup=0.8)
    found = advice(compared=slow, recurrent=True)
    assert any("says nothing about an engine" in text for text in found)
    assert not any("slower with this drafter" in text for text in found)
