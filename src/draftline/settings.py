"""From words to settings: a run.yaml and flags, read strictly, into the frozen `RunConfig`."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import yaml
from cyclopts import App, Parameter
from pydantic import ValidationError

from draftline.config import RunConfig, explain, missing
from draftline.errors import ConfigError


def sentence(error: cyclopts.CycloptsError) -> str:
    """What is wrong with a command line, as one sentence."""
    if isinstance(error, cyclopts.UnknownOptionError):
        return _unknown(error)
    if isinstance(error, cyclopts.MissingArgumentError):
        return _lacking(error)
    if isinstance(error, cyclopts.RepeatArgumentError):
        return _repeated(error)
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return _superfluous(error)
    if isinstance(error, cyclopts.CoercionError) and isinstance(error.__cause__, json.JSONDecodeError):
        return _not_json(error, error.__cause__)
    cause = error.__cause__
    return explain(cause) if isinstance(cause, ValidationError) else str(error)


def _not_json(error: cyclopts.CoercionError, cause: json.JSONDecodeError) -> str:
    assert error.token is not None  # what could not be read
    flag, example = error.token.keyword, """'{"name": "value"}'"""
    return f"{flag}={error.token.value!r} is not valid JSON: {cause}; write an object such as {example}"


def _lacking(error: cyclopts.MissingArgumentError) -> str:
    """What has to be written that is not there: a flag's value, or what a command or a run must be told."""
    assert error.argument is not None  # the parser names what it misses
    name, flag, given = error.argument.name, error.keyword, error.tokens_so_far
    if flag is None:
        chain = " ".join(error.command_chain or ())
        return (
            f"{chain} needs {name}; draftline {chain} --help shows how it is written"
            if chain
            else missing(name.lstrip("-"))
        )
    if given:
        takes = error.argument.token_count()[0]
        return f"{flag} takes {takes} values and has {len(given)} ({' '.join(given)}); write all of them"
    return f"{flag} has no value; write {flag} VALUE{'' if error.argument.required else ', or leave it out'}"


def _superfluous(error: cyclopts.UnusedCliTokensError) -> str:
    chain, words = " ".join(error.command_chain or ()), " ".join(error.unused_tokens or ())
    return f"{words!r} is more than {chain or 'a run'} takes; leave it out, or put a value of several words in quotes"


def _repeated(error: cyclopts.RepeatArgumentError) -> str:
    flag, words = error.token.keyword or error.token.value, error.root_input_tokens or []
    values = [value for value in _values_of(flag, words) if value] if error.token.value else []
    given = f", as {' and '.join(values)}" if values else ""
    return f"{flag} is given more than once{given}; leave all but one out"


def _values_of(flag: str, words: Sequence[str]) -> Iterator[str]:
    """The value of a flag each time that it stands in a command line."""
    for index, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name == flag:
            after = itertools.takewhile(lambda one: not one.startswith("--"), words[index + 1 :])
            yield value if has_value else " ".join(after)


def _unknown(error: cyclopts.UnknownOptionError) -> str:
    """The nearest setting to one that does not exist, or all beside it where none is near."""
    written, source = error.token.keyword or error.token.value, error.token.source
    flags = [argument.name for argument in error.argument_collection if argument.name.startswith("--")]
    if source == "cli":
        what, name, known = "Unknown option", written.partition("=")[0], flags
    else:
        # the parser spells the key b of a mapping a as [a][b]
        what, name = f"Unknown setting in {source}", ".".join(re.findall(r"\[(.*?)\]", written)) or written
        known = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    if near := _nearest(name, known):
        return f"{what}: {name}. Did you mean {near}?"
    return f"{what}: {name}. There are {', '.join(_beside(name, known))}"


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """A known name like this one: the same of another section, where it was put by mistake, or one beside it."""
    if misplaced := [one for one in known if _last(one) == _last(name)]:
        return difflib.get_close_matches(name, misplaced, n=1, cutoff=0.0)[0]
    if beside := _of_section(name, known):  # which all begin alike
        parts = {_last(one): one for one in beside}
        return next((parts[one] for one in _like(_last(name), parts)), None)
    return next(iter(_like(name, known)), None)


def _like(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.7)


def _last(name: str) -> str:
    """`lr` of `--optim.lr`."""
    return name.rpartition(".")[2].lstrip("-")


def _of_section(name: str, known: Sequence[str]) -> list[str]:
    section = name.rpartition(".")[0]
    return [one for one in known if one.rpartition(".")[0] == section]


def _beside(name: str, known: Sequence[str]) -> list[str]:
    """The names of the section that a name is in; all of them where there is no such section."""
    return _of_section(name, known) or list(known)


class _StrictLoader(yaml.SafeLoader):
    """YAML without what it does in silence: a key that stands twice, of which the last is kept, and words and numbers
    that YAML 1.1 takes for something else (`yes`, `on`, `1:30`, `012`, `2026-12-01`)."""

    # the guesses of YAML 1.1 by first character, less those that YAML 1.2 dropped
    yaml_implicit_resolvers = {  # noqa: RUF012 - the library's own table, of this class
        first: [(tag, pattern) for tag, pattern in guesses if tag.rpartition(":")[2] in ("null", "merge")]
        for first, guesses in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _refusal("settings cannot be merged with <<; write them out", key_node)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(f"the key {key!r} is no name of a setting", key_node)
            if key in keys:
                raise _refusal(f"the key {key!r} stands twice", key_node)
            keys.append(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|false)$", re.I), list("tTfF")
)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)(e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+|\.inf)$|^\.nan$", re.I),
    list("-+.0123456789"),
)


def _refusal(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


_KINDS = {
    type(None): "nothing",
    list: "a list",
    str: "text",
    bool: "a word",
    int: "a number",
    float: "a number",
}


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a run.yaml.

    Raises:
        ConfigError: no such file, not a file, not YAML (with the line), not settings, or a key that stands twice.
    """
    if not path.is_file():
        what = (
            "is a folder; name a run.yaml"
            if path.is_dir()
            else "is not there; name a run.yaml, or flags only"
        )
        raise ConfigError(f"configuration file {path} {what}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        kind = "" if isinstance(error, yaml.constructor.ConstructorError) else "not valid YAML: "
        raise ConfigError(f"{path}{line}: {kind}{error.problem}; correct it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}; correct it") from None
    if not isinstance(values, dict):
        kind = type(values)
        raise ConfigError(
            f"{path} holds {_KINDS.get(kind, kind.__name__)}, not settings such as "
            "`target: {path: ./my-target}`; the README shows a whole run.yaml"
        )
    return values


def spread_lists(tokens: Sequence[str]) -> Iterator[str]:
    """Flags whose value is a list in YAML, such as `--placement.targets '[cpu, cpu]'`, once for each of its values.

    Raises:
        ConfigError: a value begins like a list and is none.
    """
    name: str | None = None
    for token in tokens:
        flag, has_value, value = token.partition("=") if token.startswith("--") else (name or "", "", token)
        if not flag.startswith("--") or not value.startswith("["):
            yield token
            name = token if token.startswith("--") and not has_value else None
            continue
        try:
            values = yaml.load(value, _StrictLoader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError:
            raise ConfigError(f"{flag}={value} begins like a list and is none; write '[a, b]'") from None
        repeated = [f"{flag}={one}" for one in values]
        # the flag itself went out already when its value is a token of its own
        yield from [str(values[0]), *repeated[1:]] if not has_value and values else repeated
        name = None


def parse_run(tokens: Sequence[str]) -> RunConfig:
    """A run's settings from an optional YAML file followed by flags; flags win.

    Raises:
        ConfigError: no such file, an unknown key (the nearest is named), or a value that cannot work.
    """
    if not tokens:
        raise ConfigError(
            "a run needs settings: name a run.yaml (the README shows one), or give --target.path, --data.path, "
            "--output and --optim.steps or --optim.epochs"
        )
    files = [token for token in tokens[:1] if not token.startswith("-")]
    sources = [cyclopts.config.Dict(read_yaml(Path(file)), source=file) for file in files]
    parser = App(name="draftline train", config=sources, help_flags=())

    @parser.default
    def collect(*, config: Annotated[RunConfig, Parameter(name="*")]) -> RunConfig:
        return config

    flags = list(spread_lists(tokens[len(files) :]))
    try:
        _, bound, _ = parser.parse_args(flags, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        raise ConfigError(sentence(error)) from None
    config: RunConfig = bound.arguments["config"]
    return config


def parse_plan(run: str, tokens: Sequence[str]) -> RunConfig:
    """Settings for planning: those of a run.yaml, or of a target with stand-ins for what a run must name.

    Raises:
        ConfigError: see `parse_run`.
    """
    if Path(run).suffix in (".yaml", ".yml"):
        return parse_run([run, *tokens])
    stand_ins = {"--data.path": "unprepared", "--output": "unused", "--optim.epochs": "1"}
    given = {token.partition("=")[0] for token in tokens}
    if "--optim.steps" in given:
        del stand_ins["--optim.epochs"]
    missing = [part for pair in stand_ins.items() if pair[0] not in given for part in pair]
    return parse_run(["--target.path", run, *missing, *tokens])
