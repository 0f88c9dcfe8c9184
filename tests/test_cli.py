"""The commands as a user types them, on the builtin target: one short run, then everything that reads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftline.cli import app
from draftline.console import Screen
from draftline.demo import demo_config
from draftline.embedded import embedded_path
from draftline.errors import ConfigError, DataError
from draftline.run import train
from draftline.serving.export import export_drafter
from draftline.serving.importing import load_drafter
from draftline.settings import parse_run
from draftline.setup import check_target
from tests.oracles.tiny import random_drafter, tiny_spec

SETTINGS = (
    "--target.path=builtin:tiny",
    "--data.path=builtin:demo",
    "--data.eval-path=builtin:demo",
    "--data.max-length=256",
    "--rows.token-budget=256",
    "--rows.block-budget=32",
    "--drafter.num-layers=1",
    "--drafter.block-size=8",
    "--drafter.num-taps=2",
    "--drafter.intermediate-size=64",
    "--optim.rows-per-step=2",
    "--placement.mode=split",
    "--placement.targets=cpu",
    "--placement.drafters=cpu",
    "--placement.drafters=cpu",
    "--evaluation.num-prompts=3",
    "--evaluation.max-new-tokens=20",
    "--checkpoint.every=4",
)


def changed(flag: str) -> list[str]:
    """The settings with one of them replaced or added."""
    name = flag.partition("=")[0] + "="
    return [setting for setting in SETTINGS if not setting.startswith(name)] + [flag]


def draftline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from draftline.cli import main; main()"
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    done = draftline("train", *SETTINGS, "--optim.steps=6", "--output=run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert "step 0      training = decoding: 16 blocks" in done.stderr
    assert outcome["steps"] == 6
    assert outcome["before"]["overall"]["tau"] >= 1
    return folder / "run"


def test_an_answer_of_a_hybrid_target_streams_without_a_word_of_transformers(tmp_path: Path):
    settings = parse_run([*changed("--target.path=builtin:hybrid"), "--optim.steps=1", "--output=unused"])
    spec = check_target(settings)
    drafter = random_drafter(spec, dtype=torch.bfloat16)
    export_drafter(spec, drafter.state_dict(), tmp_path / "drafter")
    flags = ["--target", "builtin:hybrid", "--max-new-tokens", "8"]
    done = draftline("generate", "drafter", "Hello", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_leaves_a_drafter_checkpoints_metrics_and_a_result(run: Path):
    assert {path.name for path in (run / "drafter").iterdir()} >= {"config.json", "model.safetensors"}
    found = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert found == ["best.json", "step-000004", "step-000006"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["progress/step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0


def test_the_same_command_again_has_nothing_left_to_do(run: Path):
    again = draftline("train", *SETTINGS, "--optim.steps=6", "--output=run", cwd=run.parent)
    assert again.returncode == 0, again.stderr
    assert "resuming after step 6" in again.stderr
    assert re.search(r"tau after +\d\.\d\d tokens a verify step \(95 %", again.stdout)
    assert re.search(r"steps +6$", again.stdout, re.MULTILINE)  # none of them here, so no time and no rate


def test_a_run_with_other_settings_does_not_resume_it(run: Path):
    other = draftline(
        "train", *SETTINGS, "--optim.steps=6", "--optim.lr=1e-4", "--output=run", cwd=run.parent
    )
    assert other.returncode == 2
    assert "optim.lr" in other.stderr


def test_evaluate_reports_replay_and_real_decoding_of_every_set(run: Path, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 215 + 372?", "language": "en"}\n' * 2)
    flags = ("--target=builtin:tiny", "--num-prompts=3", "--max-new-tokens=20", "--compare=2", "--json")
    done = draftline(
        "evaluate", str(run), "builtin:demo", str(tmp_path / "mine.jsonl"), *flags, cwd=run.parent
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["evaluation"]["overall"]["prompts"] == 5
    assert {"demo", "demo/add", "mine", "language/en"} <= set(measured["evaluation"]["slices"])
    assert measured["metrics"]["eval/tau/mine"] >= 1
    assert measured["decoding"]["identical"] == measured["decoding"]["prompts"] == 2
    assert [each["block_size"] for each in measured["predictions"]] == [2, 4, 8]
    gain = measured["speedup_model"]["mine"]
    assert gain == measured["metrics"]["eval/speedup_model/mine"] > 0
    assert any("verify steps" in text for text in measured["warnings"])


def test_evaluate_prints_tables_and_leaves_speed_out_when_nothing_is_compared(run: Path):
    flags = ("--target=builtin:tiny", "--num-prompts=2", "--max-new-tokens=20", "--compare=0")
    done = draftline("evaluate", str(run), "builtin:demo", *flags, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "Acceptance length" in done.stdout
    assert "at least 7" in done.stdout
    assert "tokens/s" not in done.stdout


def test_generate_writes_what_the_target_would_write(run: Path):
    arguments = ("generate", str(run), "What is 215 + 372?", "--target=builtin:tiny", "--json")
    done = draftline(*arguments, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "587" in json.loads(done.stdout)["text"]


def test_generate_samples_at_a_temperature_and_repeats_with_a_seed(run: Path):
    common = ("generate", str(run), "What is 12 + 5?", "--target=builtin:tiny", "--temperature=3")
    texts = [
        json.loads(
            draftline(*common, f"--seed={seed}", "--max-new-tokens=12", "--json", cwd=run.parent).stdout
        )["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_generate_refuses_a_prompt_beyond_the_targets_context_and_a_switch_that_is_not_there(run: Path):
    common = ("generate", str(run), "--target=builtin:tiny")
    long = draftline(*common, "Hi " * 3000, cwd=run.parent)
    assert long.returncode == 4
    assert "target's context of 2048 tokens" in long.stderr
    thinking = draftline(*common, "Hi", "--thinking", cwd=run.parent)
    assert thinking.returncode == 2
    assert "has no switch for it" in thinking.stderr


def test_evaluate_without_prompts_says_what_to_name(run: Path):
    done = draftline("evaluate", str(run), "--target=builtin:tiny", cwd=run.parent)
    assert done.returncode == 2
    assert "name a file of chat records (.jsonl), builtin:demo, or a set: gsm8k" in done.stderr


def test_generate_refuses_sampling_settings_that_greedy_would_ignore(run: Path):
    done = draftline("generate", str(run), "Hi", "--target=builtin:tiny", "--top-p=0.5", cwd=run.parent)
    assert done.returncode != 0
    assert "no effect at temperature 0" in " ".join((done.stdout + done.stderr).split())


def test_export_of_a_checkpoint_equals_the_run_s_drafter(run: Path):
    out = run.parent / "exported"
    done = draftline("export", str(run / "checkpoints" / "step-000006"), str(out), "--json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == (run / "drafter" / "model.safetensors").read_bytes()
    outcome = json.loads(done.stdout)
    assert outcome["figures"] == f"kept from {run}/drafter/README.md"
    figures = (run / "drafter" / "README.md").read_text().partition("## Serving")[0].partition("## Acc")[2]
    assert "| all |" in figures
    assert "Measured on builtin:tiny in float32 on cpu" in figures
    assert outcome["sha256"] in figures
    assert figures in (out / "README.md").read_text()


def export_here(*arguments: object) -> None:
    words = ["export", *map(str, arguments)]
    app(words, exit_on_error=False, print_error=False, result_action="return_value")


def test_an_export_without_prompts_keeps_the_figures_of_this_drafter_and_drops_those_of_others(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    out, target = tmp_path / "out", "--target=builtin:tiny"
    export_here(run, out, "builtin:demo", target, "--num-prompts=3", "--max-new-tokens=20", "--compare=1")
    figures = (out / "README.md").read_text().partition("## Serving")[0].partition("## Acc")[2]
    assert "Measured with Draftline's own decoder" in figures
    for flags in ([], [target]):
        export_here(run, out, *flags)
        assert figures in (out / "README.md").read_text()
        assert "are kept: they were measured with this drafter" in capsys.readouterr().err

    export_here(run / "checkpoints" / "step-000004", out, "--overwrite")
    assert "Acceptance was not measured." in (out / "README.md").read_text()
    said = capsys.readouterr().err
    assert "are dropped: they were measured with other weights" in said
    assert "To measure, name prompts" in said

    shutil.copytree(run / "drafter", tmp_path / "edited")
    settings = json.loads((tmp_path / "edited" / "config.json").read_text())
    settings["rope_theta"] = settings["rope_parameters"]["rope_theta"] = 123.0
    (tmp_path / "edited" / "config.json").write_text(json.dumps(settings))
    export_here(tmp_path / "edited", tmp_path / "of edited")
    assert "Acceptance was not measured." in (tmp_path / "of edited" / "README.md").read_text()
    assert "do not apply: they were measured with these weights" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_export_measures_writes_a_card_and_proves_the_folder(run: Path, form: str):
    out = run.parent / f"exported-{form}"
    flags = (
        "--target=builtin:tiny",
        "--num-prompts=3",
        "--max-new-tokens=20",
        "--compare=1",
        f"--format={form}",
    )
    done = draftline(
        "export", str(run), str(out), "builtin:demo", *flags, "--name=me/it", "--json", cwd=run.parent
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["proof"]["logits"] < 1e-5
    assert outcome["proof"]["tau"] >= 1
    text = (out / "README.md").read_text()
    assert f"| all | {outcome['proof']['tau']:.2f} |" in text
    here = str(embedded_path("tiny"))  # serves it here, and is nothing for a card that may be published
    assert outcome["serve"]["vLLM"].replace(here, "TARGET") in text
    assert here not in text
    assert "me/it" in outcome["serve"]["vLLM"]
    architecture = json.loads((out / "config.json").read_text())["architectures"]
    assert architecture == [{"z-lab": "DFlashDraftModel", "speculators": "DFlashSpeculator"}[form]]
    assert [line.strip() for line in done.stderr.splitlines()] == [
        "loading builtin:tiny",
        "answers of the target 3/3",
        "replayed answers 3/3",
        "decoded with and without the drafter 1/1",
        "replayed with the exported folder 3/3",
        "the model card names no base_model: no hub name of the target is known. To name it, give --target OWNER/NAME, "
        f"or put the line base_model: OWNER/NAME into the front matter of {out}/README.md, which later exports of this "
        "drafter keep",
    ]


@pytest.mark.parametrize(
    "flags",
    [(), ("--target=builtin:tiny",), ("--target=builtin:tiny", "--format=speculators")],
    ids=["alone", "with its target", "as speculators"],
)
def test_export_replaces_another_drafter_when_it_is_told_to_and_not_before(
    run: Path, tmp_path: Path, flags: tuple[str, ...]
):
    other = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    out = export_drafter(other.spec, other.state_dict(), tmp_path / "out")
    refused = draftline("export", str(run), str(out), *flags, cwd=tmp_path)
    assert refused.returncode == 2
    assert "--overwrite to replace it" in refused.stderr
    done = draftline("export", str(run), str(out), *flags, "--overwrite", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trained = load_drafter(run / "drafter")[1].state_dict()
    assert all(
        torch.equal(tensor, trained[name]) for name, tensor in load_drafter(out, 4)[1].state_dict().items()
    )


def test_export_without_a_target_says_what_needs_one(run: Path):
    done = draftline("export", str(run), "out", "builtin:demo", cwd=run.parent)
    assert done.returncode == 2
    assert "measuring acceptance needs --target" in done.stderr


def test_held_out_prompts_may_be_one_source_or_several(tmp_path: Path):
    file = tmp_path / "run.yaml"
    text = "target: {path: builtin:tiny}\noutput: o\noptim: {steps: 1}\ndata: {path: x, eval_path: HELD}\n"
    file.write_text(text.replace("HELD", "a.jsonl"))
    assert parse_run([str(file)]).data.eval_path == ("a.jsonl",)
    file.write_text(text.replace("HELD", "[a.jsonl, gsm8k]"))
    assert parse_run([str(file)]).data.eval_path == ("a.jsonl", "gsm8k")
    flags = [*changed("--data.eval-path=b.jsonl"), "--data.eval-path=mbpp", "--optim.steps=6", "--output=o"]
    assert parse_run(flags).data.eval_path == ("b.jsonl", "mbpp")


def test_a_drafter_for_another_target_is_refused_with_the_difference(run: Path):
    done = draftline("evaluate", str(run), "builtin:demo", "--target=builtin:hybrid", cwd=run.parent)
    assert done.returncode != 0
    assert "draftline:" in done.stderr
    assert "Traceback" not in done.stderr


def test_prepare_accounts_for_every_row(run: Path, tmp_path: Path):
    source = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": "Hello."}]}
        for i in range(20)
    ]
    rows.append({"messages": [{"role": "user", "content": "Nobody answers"}]})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = draftline("prepare", str(source), "store", "--target=builtin:tiny", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows"] == 21
    assert report["kept"] == 20


def test_regenerate_lets_the_target_answer_and_goes_on_for_free(tmp_path: Path):
    source = tmp_path / "prompts.jsonl"
    prompts = ["What is 215 + 372?", "What is 314 + 251?"]
    lines = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n" for prompt in prompts]
    source.write_text("".join(lines))
    flags = ("--target=builtin:tiny", "--temperature=0", "--max-new-tokens=100", "--json")
    done = draftline("regenerate", str(source), "answers.jsonl", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["written"] == 2
    assert "587" in (tmp_path / "answers.jsonl").read_text()
    again = draftline("regenerate", str(source), "answers.jsonl", *flags, cwd=tmp_path)
    assert json.loads(again.stdout)["already_there"] == 2


def test_inspect_marks_what_the_drafter_learns(run: Path):
    arguments = ("inspect", str(run / "store"), "--target=builtin:tiny", "--document=0")
    done = draftline(*arguments, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "[[" in done.stdout
    assert "<|im_end|>]]" in done.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--optim.lrr=1e-4", "Did you mean --optim.lr"),
        ("--rows.token-budget=100", "use 128"),
        ("--rows.block-budget=5", "use rows.block_budget=16"),
        ("--optim.epochs=3", "exactly one"),
        ("--target.trust-remote-code", "40-digit"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_the_fix(flag: str, words: str):
    with pytest.raises(ConfigError) as refused:
        parse_run([*changed(flag), "--optim.steps=6", "--output=run"])
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prepare", "a", "b", "--target", "t", "--max-length", "0"), "max_length='0': Input should be"),
        (("prepare", "a", "b", "--target", "t", "--max-lenth", "9"), "Did you mean --max-length?"),
        (("synthesize", "p.jsonl", "--target=t", "--count=1", "--temperature=-1"), "temperature='-1': Input"),
        (("synthesize", "p.jsonl", "--target=t", "--count=1", f"--seed={2**64}"), f"seed='{2**64}': Input"),
        (
            ("generate", "d", "Hi", "--target=t", "--temperature=1", f"--seed={2**64}"),
            f"seed='{2**64}': Input",
        ),
        (("evaluat",), 'Did you mean "evaluate"?'),
    ],
)
def test_a_command_line_that_cannot_work_is_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    printed = capsys.readouterr()
    said = " ".join((printed.out + printed.err).split())
    assert ended.value.code == 2
    assert said.startswith("draftline: ")
    assert words in said
    assert "errors.pydantic.dev" not in said


@pytest.mark.parametrize(
    "command", [("evaluate", "run", "p"), ("generate", "run", "Hi"), ("export", "run", "out")]
)
def test_a_compute_type_that_there_is_not_is_refused_with_those_that_there_are(command, capsys):
    with pytest.raises(SystemExit) as ended:
        app([*command, "--target=builtin:tiny", "--dtype=int8"])
    printed = capsys.readouterr()
    said = " ".join((printed.out + printed.err).split())
    assert ended.value.code == 2
    assert said.startswith("draftline: ")
    assert all(name in said for name in ("--dtype", "int8", "auto", "float32", "bfloat16", "float16"))


def test_a_mistyped_key_in_the_file_gets_the_nearest_name(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("target: {path: builtin:tiny}\ndata: {path: x}\noutput: o\noptim: {steps: 1, lrr: 2}\n")
    with pytest.raises(ConfigError, match="Did you mean"):
        parse_run([str(file)])


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        parse_run(["nowhere.yaml"])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--target.path=/nowhere/model", "not a folder"),
        ("--target.path=builtin:huge", "builtin:tiny"),
        ("--data.path=/nowhere.jsonl", "neither a file"),
        ("--drafter.mask-token-id=2", "end-of-text"),
        ("--drafter.target-layer-ids=99", "outside"),
        ("--placement.targets=cuda:7", "CUDA devices"),
        ("--placement.attention=flex", "CPU"),
        ("--optim.rows-per-step=3", "multiple of 2 drafters"),
    ],
)
def test_a_run_that_cannot_work_is_refused_in_a_sentence(tmp_path: Path, flag: str, words: str):
    out = tmp_path / "run"
    with pytest.raises((ConfigError, DataError)) as refused:
        train(parse_run([*changed(flag), "--optim.steps=6", f"--output={out}"]), Screen(quiet=True))
    assert words in str(refused.value)
    result = json.loads((out / "result.json").read_text())
    assert result["exit_code"] == refused.value.exit_code
    assert not (out / "checkpoints").exists()


def test_both_demos_have_a_recipe_that_is_valid():
    for name in ("tiny", "smollm2"):
        config = demo_config(name, Path("somewhere"))
        assert len(config.placement.targets or ()) == len(config.placement.drafters or ()) == 2
