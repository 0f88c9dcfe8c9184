"""Words to settings: what cannot be read is refused in a sentence, and lists can be written as lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.cli import app
from draftline.errors import ConfigError
from draftline.settings import parse_run, read_yaml, spread_lists

NEEDED = ["--target.path=builtin:tiny", "--data.path=x", "--output=o", "--optim.steps=1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "line 1: not valid YAML"),
        ("", "holds nothing, not settings"),
        ("- 1", "holds a list, not settings"),
        ("seed: 3\nrows: {}\nseed: 4\n", "line 3: the key 'seed' stands twice"),
        ("optim: {lr: 1.0, lr: 2.0}", "the key 'lr' stands twice"),
        ("seed: 3\n3: 3\n", "line 2: the key 3 is no name of a setting"),
        ("null: 3", "the key None is no name of a setting"),
        ("rows: {[1]: 3}", r"the key \[1\] is no name of a setting"),
        ("base: &b {lr: 1}\noptim: {<<: *b}", "line 2: settings cannot be merged with <<"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused_with_its_line(tmp_path: Path, text: str, words: str):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_yaml(tmp_path / "run.yaml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "run.yaml")


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a folder"):
        parse_run([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"none\.yaml is not there"):
        parse_run([str(tmp_path / "none.yaml")])


def test_a_run_without_any_words_says_what_it_needs():
    with pytest.raises(ConfigError, match=r"name a run\.yaml"):
        parse_run([])


RUN = "target: {path: builtin:tiny}\ndata: {path: x}\noutput: o\noptim: {steps: 1}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sed: 1", r"Unknown setting in .*run\.yaml: sed\. Did you mean seed\?"),
        ("optm: {steps: 3}", r"optm\.steps\. Did you mean optim\.steps\?"),
        ("rows: {token_buget: 128}", r"rows\.token_buget\. Did you mean rows\.token_budget\?"),
        ("lr: 3", r"run\.yaml: lr\. Did you mean optim\.lr\?"),
        ("evaluation: {xx: 3}", r"evaluation\.xx\. There are evaluation\.every, "),
        ("evaluaton: {every: 3}", r"evaluaton\.every\. Did you mean evaluation\.every\?"),
        ("chekpoint: {every: 3}", r"chekpoint\.every\. Did you mean checkpoint\.every\?"),
        ("evaluation: {lr: 3}", r"evaluation\.lr\. Did you mean optim\.lr\?"),
        ("rows: {zzzz: 3}", r"rows\.zzzz\. There are rows\.token_budget, "),
        ("zzzz: 3", r"Unknown setting in .*run\.yaml: zzzz. There are .*seed, .*deadlines"),
    ],
)
def test_an_unknown_key_of_a_file_gets_the_nearest_name_at_any_level(tmp_path: Path, line: str, words: str):
    (tmp_path / "run.yaml").write_text(RUN + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        parse_run([str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--sed=1", r"Unknown option: --sed\. Did you mean --seed\?"),
        ("--optim.zz=1", r"--optim\.zz\. There are --optim\.lr, "),
        ("--optim.seed=1", r"--optim\.seed\. Did you mean --seed\?"),
        ("--optim.stps=1", r"Did you mean --optim\.steps\?"),
        ("--zzzz=1", r"Unknown option: --zzzz. There are .*--seed"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_name_or_all_there_are(flag: str, words: str):
    with pytest.raises(ConfigError, match=words):
        parse_run([*NEEDED, flag])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["export", "run", "out", "--targt", "x"], "Unknown option: --targt. Did you mean --target?"),
        (["export", "run", "out", "--zzzz", "x"], "Unknown option: --zzzz. There are --target"),
    ],
)
def test_every_command_names_what_is_near_an_unknown_flag(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code == 2
    assert answer in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optim.lr"], r"^--optim\.lr has no value; write --optim\.lr VALUE, or leave it out$"),
        (["--optim.lr", "--seed=3"], r"^--optim\.lr has no value"),
        (["extra", "words"], r"^'extra words' is more than a run takes; leave it out, or put .* in quotes$"),
        (["--placement.targets"], r"^--placement\.targets has no value"),
        (["--optim.betas", "0.9"], r"^--optim\.betas takes 2 values and has 1 \(0\.9\)"),
        (["--seed=1", "--seed=2"], r"^--seed is given more than once, as 1 and 2; leave all but one out$"),
        (
            ["--seed", "1", "--seed", "2"],
            r"^--seed is given more than once, as 1 and 2; leave all but one out$",
        ),
        (["--output", "b"], r"^--output is given more than once, as o and b;"),
        (
            ["--optim.betas", "0.9", "0.95", "--optim.betas", "0.8", "0.9"],
            r"^--optim\.betas is given more than once, as 0\.9 0\.95 and 0\.8 0\.9;",
        ),
        (["--target.trust-remote-code"] * 2, r"^--target\.trust-remote-code is given more than once; leave"),
    ],
)
def test_a_flag_without_its_value_or_given_twice_is_shown_as_it_was_written(flags: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        parse_run([*NEEDED, *flags])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["export", "run", "out", "--target"], "--target has no value; write --target VALUE"),
        (
            ["export", "run", "out", "--target", "x", "--target=y"],
            "--target is given more than once, as x and y;",
        ),
        (
            ["export", "run", "out", "--json", "p", "--json"],
            "--json is given more than once; leave all but one out",
        ),
        (
            ["evaluate", "run", "p"],
            "evaluate needs --target; draftline evaluate --help shows how it is written",
        ),
        (["evaluate"], "evaluate needs DRAFTER; draftline evaluate --help"),
        (
            ["prepare", "a", "b", "--target=x", "--template-variables={bad"],
            "--template-variables='{bad' is not valid JSON: Expecting property name enclosed in double quotes: line 1 "
            'column 2 (char 1); write an object such as \'{"name": "value"}\'\n',
        ),
        (["evaluate", "run", "p", "--target"], "--target has no value; write --target VALUE\n"),
        (
            ["generate", "run", "Why", "is", "the", "sky", "blue?", "--target=x"],
            "'is the sky blue?' is more than generate takes; leave it out, or put a value of several words in quotes",
        ),
    ],
)
def test_every_command_says_what_is_wrong_with_its_words(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("--data", r"data is missing; set data\.path in the run\.yaml, or give --data\.path$"),
        (
            "--optim",
            r"optim is missing; set optim\.steps or optim\.epochs in the run\.yaml, or give --optim\.steps or",
        ),
        ("--output", r"output is missing; set output in the run\.yaml, or give --output$"),
    ],
)
def test_a_setting_that_is_not_given_is_named_with_what_of_it_is_needed(left_out: str, words: str):
    with pytest.raises(ConfigError, match=words):
        parse_run([flag for flag in NEEDED if not flag.startswith(left_out)])


def test_a_value_where_settings_belong_is_said_to_be_one(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("target: builtin:tiny\n")
    with pytest.raises(
        ConfigError, match=r"target='builtin:tiny' is a group of settings, not a value; .*optim\.st"
    ):
        parse_run([str(tmp_path / "run.yaml")])


def test_an_output_without_a_name_is_refused_instead_of_filling_the_present_folder():
    others = [flag for flag in NEEDED if not flag.startswith("--output")]
    with pytest.raises(ConfigError, match="output='' would be the present folder"):
        parse_run([*others, "--output="])
    assert parse_run([*others, "--output=."]).output == Path()


@pytest.mark.parametrize(
    "flags",
    [
        ['--placement.targets=["cpu", "cpu"]'],
        ["--placement.targets", "[cpu, cpu]"],
        ["--placement.targets", "cpu", "--placement.targets", "cpu"],
    ],
)
def test_a_list_can_be_a_list_or_a_flag_for_each_value(flags: list[str]):
    assert parse_run([*NEEDED, *flags]).placement.targets == ("cpu", "cpu")


def test_a_list_of_numbers_is_one():
    assert parse_run([*NEEDED, "--drafter.target-layer-ids=[1, -2]"]).drafter.target_layer_ids == (1, -2)


def test_what_begins_like_a_list_and_is_none_is_refused():
    with pytest.raises(ConfigError, match="begins like a list"):
        parse_run([*NEEDED, "--placement.targets=[cpu"])


@given(st.lists(st.sampled_from(["--a", "--b=1", "x", "-3", "--c=[]x"]).filter(lambda t: "[" not in t)))
def test_words_without_a_list_pass_as_they_are(tokens: list[str]):
    assert list(spread_lists(tokens)) == tokens


@pytest.mark.parametrize("flag", ["--optim.lr=inf", "--optim.lr=nan", "--deadlines.stall-timeout-s=inf"])
def test_a_number_that_is_none_is_refused(flag: str):
    with pytest.raises(ConfigError, match="finite number"):
        parse_run([*NEEDED, flag])


@pytest.mark.parametrize("flags", [("--devices", "0"), ("--tflops", "nan"), ("--memory-gib", "-1")])
def test_a_plan_for_nothing_is_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        app(["plan", "builtin:tiny", *flags])
    assert ended.value.code == 2
    assert "Input should be" in capsys.readouterr().err


def test_the_usage_of_train_says_what_stands_where(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        app("train --help")
    assert "Usage: draftline train [RUN.YAML] [--SETTING VALUE]... [--json]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("no", "no"),
        ("On", "On"),
        ("1:30", "1:30"),
        ("012", "012"),
        ("2026-12-01", "2026-12-01"),
        ("1:30.5", "1:30.5"),
        ("true", True),
        ("False", False),
        ("-12", -12),
        ("1_000", 1000),
        ("0", 0),
        ("1.5", 1.5),
        ("1e-4", 1e-4),
        ("-2.5E3", -2500.0),
        ("null", None),
        ("~", None),
        ("'12'", "12"),
    ],
)
def test_a_word_of_a_file_is_what_it_looks_like(tmp_path: Path, written: str, read: object):
    (tmp_path / "run.yaml").write_text(f"seed: {written}\n", encoding="utf-8")
    value = read_yaml(tmp_path / "run.yaml")["seed"]
    assert (value, type(value)) == (read, type(read))


def test_more_steps_than_any_run_takes_are_refused():
    with pytest.raises(ConfigError, match=r"optim\.steps=.*less than or equal to 1000000000"):
        parse_run([*(flag for flag in NEEDED if "steps" not in flag), "--optim.steps=99999999999999999999"])
