"""An export proves itself on its target: the proof passes for what was written and fails for anything else."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.decoding.evaluate import Prompt, evaluate, reference_answers
from draftline.decoding.greedy import Limit
from draftline.errors import CheckpointError, ConfigError
from draftline.serving.export import export_drafter, export_speculators
from draftline.serving.export_proof import prove_on_target
from draftline.serving.importing import load_drafter
from draftline.serving.speculators import Verifier
from tests.oracles.targets import random_prompts, random_target, taught_drafter

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@pytest.fixture(scope="module", params=["qwen3", "hybrid", "sliding"])
def case(request, tmp_path_factory):
    """Target, drafter with the weights as a file holds them, answers, and the drafter's evaluation."""
    target = random_target("qwen3" if request.param == "sliding" else request.param)
    taught = taught_drafter(target, **(SLIDING if request.param == "sliding" else {}))
    written = export_drafter(taught.spec, taught.state_dict(), tmp_path_factory.mktemp("x") / "d")
    drafter = load_drafter(written)[1].float()
    answers = reference_answers(target, [Prompt(tuple(prompt)) for prompt in random_prompts(3)], Limit(24))
    return target, drafter, answers, evaluate(target, drafter, answers)


def export(drafter, folder, prove, form="z-lab"):
    if form == "z-lab":
        return export_drafter(drafter.spec, drafter.state_dict(), folder, prove=prove)
    verifier = Verifier("owner/model", ("Qwen3ForCausalLM",))
    return export_speculators(drafter.spec, drafter.state_dict(), folder, verifier, prove=prove)


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_logits_and_acceptance_of_the_folder_are_those_of_the_weights(case, form, tmp_path):
    target, drafter, answers, measured = case
    proofs = []

    def prove(folder):
        proofs.append(prove_on_target(target, drafter, folder, answers, measured))

    if form == "speculators" and "sliding_attention" in drafter.spec.layer_types:
        with pytest.raises(ConfigError, match="differ in causality"):
            export(drafter, tmp_path / "out", prove, form)
        return
    folder = export(drafter, tmp_path / "out", prove, form)

    assert folder.is_dir()
    assert proofs[0].blocks > 5
    assert proofs[0].logits < 1e-5
    assert proofs[0].tau == measured.overall.tau > 1


def test_a_weight_that_changed_on_the_way_is_found_by_its_logits(case, tmp_path):
    target, drafter, answers, measured = case
    folder = export(drafter, tmp_path / "out", lambda _: None)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.self_attn.v_proj.weight"][0] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match="drafts something else"):
        prove_on_target(target, drafter, folder, answers, measured)


@pytest.mark.parametrize("key", ["rope_theta", "mask_token_id"])
def test_a_configuration_that_serves_otherwise_is_found(case, key, tmp_path):
    target, drafter, answers, measured = case
    folder = export(drafter, tmp_path / "out", lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config["dflash_config"], config["rope_parameters"]):
        place.update({key: {"rope_theta": 100.0, "mask_token_id": 3}[key]} if key in place else {})
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match="drafts something else"):
        prove_on_target(target, drafter, folder, answers, measured)


def test_another_acceptance_is_found_even_where_logits_are_not_compared(case, tmp_path):
    target, drafter, answers, _ = case
    other = evaluate(target, drafter, answers[:1])
    folder = export(drafter, tmp_path / "out", lambda _: None)
    with pytest.raises(CheckpointError, match="is accepted otherwise"):
        prove_on_target(target, drafter, folder, answers, other)


def test_a_proof_that_fails_leaves_no_folder(case, tmp_path):
    drafter = case[1]

    def fail(_folder):
        raise CheckpointError("no")

    with pytest.raises(CheckpointError):
        export(drafter, tmp_path / "out", fail)
    assert list(tmp_path.iterdir()) == []


def test_without_an_evaluation_only_logits_are_proved(case, tmp_path):
    target, drafter, answers, _ = case
    folder = export(drafter, tmp_path / "out", lambda _: None)
    assert prove_on_target(target, drafter, folder, answers, None).tau is None


def test_bf16_targets_are_proved_too(tmp_path):
    target = random_target(dtype=torch.bfloat16)
    drafter = taught_drafter(random_target()).to(torch.bfloat16)
    answers = reference_answers(target, [Prompt((1, 2, 3))], Limit(24))
    measured = evaluate(target, drafter, answers)
    folder = export(drafter, tmp_path / "out", lambda _: None)
    proof = prove_on_target(target, drafter, folder, answers, measured)
    assert proof.logits < 1e-5
    assert proof.tau == measured.overall.tau
