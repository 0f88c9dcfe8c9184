"""What the commands do, apart from parsing and printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftline.config import DrafterSpec, TargetConfig
from draftline.console import Output, Screen
from draftline.data.fingerprint import hash_file
from draftline.decoding.decode import decode_events
from draftline.decoding.evaluate import (
    WARM_TOKENS,
    Prompt,
    Reference,
    reference_answers,
    refuse_beyond_context,
)
from draftline.decoding.greedy import Limit, greedy
from draftline.decoding.measure import Measurement, measure
from draftline.decoding.prompt_sets import SETS
from draftline.decoding.prompts import chat_prompt, load_prompts
from draftline.decoding.render import print_answer
from draftline.decoding.sampling import Choice, Greedy, Sampled
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError
from draftline.options import GenerateOptions, MeasureOptions
from draftline.paths import EXPORT
from draftline.pipeline.plan import available_devices
from draftline.resilience.folder import CHECKPOINTS
from draftline.serving.base_model import base_model_in, find_base_model
from draftline.serving.card import (
    NO_TARGET,
    Format,
    measured_in,
    measured_section,
    model_card,
    serve_lines,
)
from draftline.serving.export import (
    Card,
    export_drafter,
    export_speculators,
    refuse_occupied,
    require_writable,
)
from draftline.serving.export_proof import Proof, prove_on_target
from draftline.serving.importing import MODEL, find_drafter, load_drafter, refuse_misfit
from draftline.serving.measured import (
    CARD,
    EarlierFigures,
    account,
    drafter_hash,
    earlier_figures,
    figures_to_show,
    same_drafter,
)
from draftline.serving.speculators import Verifier, refuse_inexpressible
from draftline.target.inspect import stop_token_ids
from draftline.target.load import (
    Target,
    load_target,
    resolve_path,
    sketch_target,
    text_config,
)

PROOF_TOKENS = 48
"""Tokens of the target's answer that an export is proved on when no prompts are given."""


def load_pair(drafter: Path, target: TargetConfig) -> tuple[Target, Drafter]:
    """Target and drafter on the first device, in the target's dtype, checked to belong together before the target's
    weights are read.

    Raises:
        ConfigError, CheckpointError: a folder is not what it should be, or the two do not fit.
    """
    return _load_with(_read_fitting(drafter, sketch_target(target)), target, Screen(quiet=True))


def _read_fitting(drafter: Path, sketch: Target) -> Drafter:
    """A drafter on the CPU in the dtype of its file, checked to belong to a target by that one's sketch."""
    spec, module = load_drafter(find_drafter(drafter), text_config(sketch.model.config).num_hidden_layers)
    refuse_misfit(spec, sketch)
    return module


def _load_with(module: Drafter, target: TargetConfig, screen: Screen) -> tuple[Target, Drafter]:
    screen.say(f"loading {target.path}")
    loaded = load_target(target, available_devices()[0])
    return loaded, module.to(device=loaded.device, dtype=loaded.embedding.dtype).eval()


def answer_limit(target: Target, max_new_tokens: int) -> Limit:
    """Where the target's answers end."""
    generation = target.model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    return Limit(max_new_tokens, frozenset(stop_token_ids(eos, target.tokenizer)))


def evaluate_drafter(
    drafter: Path, prompts: Sequence[str], target: TargetConfig, options: MeasureOptions, screen: Screen
) -> Measurement:
    """Acceptance by replay on every set, then real decoding with and without the drafter.

    Raises:
        ConfigError: no prompts are named, or target and drafter cannot be used together.
        DataError: the prompts cannot be read, or one is too long for the target.
    """
    if not prompts:
        raise ConfigError(
            "evaluate needs prompts: name a file of chat records (.jsonl), builtin:demo, or a set: "
            f"{', '.join(SETS)}"
        )
    sketch = sketch_target(target)
    asked = _asked(sketch, prompts, options)
    loaded, module = _load_with(_read_fitting(drafter, sketch), target, screen)
    return _measure(loaded, module, _answers(loaded, asked, options, screen), options, screen)


def _asked(sketch: Target, prompts: Sequence[str], options: MeasureOptions) -> list[Prompt]:
    """The prompts of some sources, all of which the target can read with their answers."""
    asked = load_prompts(prompts, sketch.tokenizer, options.num_prompts, options.thinking)
    refuse_beyond_context(sketch, asked, Limit(options.max_new_tokens))
    return asked


def _answers(
    target: Target, asked: Sequence[Prompt], options: MeasureOptions, screen: Screen
) -> list[Reference]:
    # later turns of a prompt depend on the answers to earlier ones, so their number is not known
    total = None if any(prompt.next_turn for prompt in asked) else len(asked)
    with screen.counting("answers of the target", total) as progress:
        return reference_answers(target, asked, answer_limit(target, options.max_new_tokens), progress)


def _measure(
    target: Target, drafter: Drafter, answers: Sequence[Reference], options: MeasureOptions, screen: Screen
) -> Measurement:
    limit = answer_limit(target, options.max_new_tokens)
    return measure(target, drafter, answers, limit, options.compare, options.caches, screen)


def export_run(
    run: Path,
    out: Path,
    prompts: Sequence[str],
    target: TargetConfig | None,
    form: Format,
    name: str | None,
    options: MeasureOptions,
    screen: Screen,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Export a drafter from wherever it lies; with a target, measure it and prove what the folder computes on it.

    Args:
        prompts: what acceptance is measured on for the model card; none leaves it out.
        name: of the drafter in the serve lines; None takes the folder.
        overwrite: replace another drafter in `out`.

    Raises:
        ConfigError: prompts or the speculators format without a target, a drafter that this format cannot express,
            another drafter in `out`, or `out` cannot be written.
        CheckpointError: the drafter does not fit the target, or the folder is not what went in.
        DataError: the prompts cannot be read, or one is too long for the target.
    """
    source, name = find_drafter(run), name or str(out)
    if target is not None:
        return _export_on_target(
            source, out, prompts, target, form, name, options, screen, overwrite=overwrite
        )
    if prompts or form == "speculators":
        what = "measuring acceptance" if prompts else "the speculators format, which names the target,"
        raise ConfigError(f"{what} needs --target")
    spec, module = load_drafter(source)
    earlier = earlier_figures(_cards(out, source))
    card = _card_writer(spec, _base_model_finder(None, out, source), name, "z-lab", None, earlier)
    export_drafter(spec, module.state_dict(), out, card, overwrite=overwrite)
    outcome = _exported(source, out, module, serve_lines(spec, base_model_in(out) or NO_TARGET, name))
    return _with_account(outcome, spec, earlier, None, out, screen)


def _export_on_target(
    source: Path,
    out: Path,
    prompts: Sequence[str],
    target: TargetConfig,
    form: Format,
    name: str,
    options: MeasureOptions,
    screen: Screen,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    sketch = sketch_target(target)
    asked = _asked(sketch, prompts, options) if prompts else _greeting(sketch)
    module = _read_fitting(source, sketch)
    if form == "speculators":
        refuse_inexpressible(module.spec)
    refuse_occupied(module.spec, module.state_dict(), out, overwrite=overwrite)
    require_writable(out)
    earlier = earlier_figures(_cards(out, source))
    loaded, module = _load_with(module, target, screen)
    if prompts:
        answers = _answers(loaded, asked, options, screen)
        measured = _measure(loaded, module, answers, options, screen)
    else:
        answers, measured = reference_answers(loaded, asked, Limit(PROOF_TOKENS)), None
    called, proofs = resolve_path(target), list[Proof]()

    def prove(folder: Path) -> None:
        evaluation = measured.evaluation if measured else None
        with screen.counting("replayed with the exported folder", len(answers)) as progress:
            proofs.append(prove_on_target(loaded, module, folder, answers, evaluation, progress))

    spec, weights = module.spec, module.state_dict()
    card = _card_writer(spec, _base_model_finder(called, out, source), name, form, measured, earlier)
    if form == "speculators":
        verifier = Verifier(called, tuple(loaded.model.config.architectures or ()))
        export_speculators(spec, weights, out, verifier, card, prove, overwrite=overwrite)
    else:
        export_drafter(spec, weights, out, card, prove, overwrite=overwrite)
    outcome = _exported(source, out, module, serve_lines(spec, called, name, form))
    return _with_account(outcome, spec, earlier, measured, out, screen) | {"proof": asdict(proofs[0])}


def _cards(out: Path, source: Path) -> list[Path]:
    """Folders whose cards may have figures of these weights: what is replaced, what is read, what its run exported."""
    of_its_run = [source.parent.parent / EXPORT] if source.parent.name == CHECKPOINTS else []
    return [out, source, *of_its_run]


def _base_model_finder(target: str | None, out: Path, source: Path) -> Callable[[str], str | None]:
    """Finds the target's hub name for a drafter whose `model.safetensors` has a SHA-256, before it replaces `out`."""

    def find(sha256: str) -> str | None:
        lying = out / MODEL
        same = lying.is_file() and hash_file(lying) == sha256  # another one's target may be another
        return find_base_model(target, _cards(out, source)[0 if same else 1 :])

    return find


def _card_writer(
    spec: DrafterSpec,
    base_model: Callable[[str], str | None],
    name: str,
    form: Format,
    measured: Measurement | None,
    earlier: Sequence[EarlierFigures],
) -> Card:
    fresh = None
    if measured is not None:
        conditions = measured_in(measured.target, measured.dtype, measured.device, measured.max_new_tokens)
        fresh = measured_section(measured.evaluation, conditions, measured.decoding, measured.predictions)

    def write(sha256: str) -> str:
        figures = figures_to_show(fresh, earlier, drafter_hash(sha256, spec))
        return model_card(spec, base_model(sha256), name, form, figures)

    return write


def _with_account(
    outcome: dict[str, Any],
    spec: DrafterSpec,
    earlier: Sequence[EarlierFigures],
    measured: Measurement | None,
    out: Path,
    screen: Screen,
) -> dict[str, Any]:
    """The outcome with what the card names and where its figures come from; says what it lacks."""
    drafter = drafter_hash(hash_file(out / MODEL), spec)
    kept = same_drafter(earlier, drafter)
    if measured is None:
        screen.say(account(earlier, drafter, out))
    base_model = base_model_in(out)
    if base_model is None:
        screen.say(
            "the model card names no base_model: no hub name of the target is known. To name it, give --target "
            f"OWNER/NAME, or put the line base_model: OWNER/NAME into the front matter of {out / CARD}, which later "
            "exports of this drafter keep"
        )
    figures = "measured" if measured else f"kept from {kept.card}" if kept else "not measured"
    return {**outcome, "sha256": drafter.weights, "base_model": base_model, "figures": figures}


def _greeting(sketch: Target) -> list[Prompt]:
    """What the target answers for a proof without prompts."""
    asked = [chat_prompt(sketch.tokenizer, "Hello!")]
    refuse_beyond_context(sketch, asked, Limit(PROOF_TOKENS))
    return asked


def _exported(source: Path, folder: Path, drafter: Drafter, lines: Mapping[str, str]) -> dict[str, Any]:
    return {
        "from": str(source),
        "drafter": str(folder),
        "tensors": len(drafter.state_dict()),
        "block_size": drafter.spec.block_size,
        "serve": dict(lines),
    }


def _choice(options: GenerateOptions, device: torch.device) -> Choice:
    if options.temperature == 0:
        return Greedy()
    return Sampled(options.seed, device, options.temperature, options.top_p, options.top_k)


def generate_text(
    drafter: Path, prompt: str, target: TargetConfig, options: GenerateOptions, *, show: bool
) -> dict[str, Any]:
    """Answer one prompt; with `show` the text streams to standard output in colour.

    Raises:
        DataError: the prompt is too long for the target.
        ConfigError: only a shorter answer would fit it; or, as CheckpointError, see `load_pair`.
    """
    sketch = sketch_target(target)
    asked = chat_prompt(sketch.tokenizer, prompt, think=options.thinking)
    refuse_beyond_context(sketch, [asked], Limit(options.max_new_tokens))
    loaded, module = _load_with(_read_fitting(drafter, sketch), target, Screen(quiet=True))
    choice = _choice(options, loaded.device)
    limit = answer_limit(loaded, options.max_new_tokens)
    # first calls load kernels, which takes time and may say something in the middle of the text
    greedy(loaded, asked.input_ids[:WARM_TOKENS], Limit(2))
    events = decode_events(loaded, module, asked.input_ids, limit, choice)
    decoded = print_answer(events, loaded.tokenizer, Output(quiet=not show))
    return {
        "text": loaded.tokenizer.decode(list(decoded.tokens), skip_special_tokens=True),
        "tau": decoded.tau,
        "produced": decoded.produced,
        "accepted": decoded.accepted,
        "tokens_per_s": decoded.tokens_per_s,
    }
