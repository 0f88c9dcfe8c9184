"""From a configuration to a job: everything that can be refused is refused here, before anything long starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from draftline.checkpoint import Identity
from draftline.config import DataConfig, DrafterSpec, RunConfig
from draftline.console import Screen
from draftline.data.fingerprint import hash_tokenizer
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.report import print_report
from draftline.data.rows import RowSource
from draftline.data.store import TokenStore, open_store, read_manifest
from draftline.parity import prove_start
from draftline.paths import STORE, builtin_conversations
from draftline.pipeline.job import Job, max_documents, row_shape
from draftline.pipeline.plan import make_plan
from draftline.pipeline.planning import refuse_what_cannot_fit, resolve_placement
from draftline.pipeline.schedule import Schedule
from draftline.serving.warm_start import WarmStart, load_warm_start
from draftline.target.inspect import resolve_spec, stop_token_ids
from draftline.target.load import load_target, load_tokenizer, read_target_config, text_config
from draftline.target.selftest import choose_form


@dataclass(frozen=True)
class Prepared:
    """A job, and what its checkpoints must agree with."""

    job: Job
    identity: Identity
    stop_token_ids: frozenset[int]


def check_target(config: RunConfig) -> DrafterSpec:
    """The drafter's architecture from the target's configuration and tokenizer alone; reads no weights.

    Raises:
        ConfigError: target, taps, mask token or shapes cannot work.
    """
    target_config = read_target_config(config.target)
    rows = int(text_config(target_config).vocab_size)
    return resolve_spec(config.drafter, target_config, load_tokenizer(config.target), rows, scale=1.0)


def prepare_job(config: RunConfig, screen: Screen) -> Prepared:
    """Resolve everything, load the target, and test it on itself.

    Raises:
        ConfigError, DataError, CheckpointError: what cannot work, with the fix.
    """
    target_config = read_target_config(config.target)
    expected = check_target(config)
    plan = make_plan(resolve_placement(config, expected, target_config))
    refuse_what_cannot_fit(config, expected, target_config, plan)
    torch.set_num_threads(plan.cpu_threads)  # before any thread starts: compiled code guards on it
    tokenizer = load_tokenizer(config.target)
    stops = stop_token_ids(text_config(target_config).eos_token_id, tokenizer)
    store = open_or_prepare(config.data, config.output / STORE, tokenizer, stops, screen)
    target = load_target(config.target, plan.targets[0])
    spec = resolve_spec(
        config.drafter, target_config, tokenizer, target.head.shape[0], target.embedding_scale
    )
    form = choose_form(target.model, spec.target_layer_ids)
    shape = row_shape(config, spec, plan.backend)
    source = RowSource(store, shape, config.seed)
    schedule = Schedule(
        num_steps=_num_steps(config, source),
        rows_per_step=config.optim.rows_per_step,
        num_targets=len(plan.targets),
        num_drafters=len(plan.drafters),
    )
    for line in (*plan.describe(), f"target      {form.form} rows: {form.reason}"):
        screen.say(line)
    start = load_warm_start(config.drafter, spec, config.output)
    if start is not None:
        screen.say(f"warm start  from {start.source}, weights {start.sha256[:12]}")
    boundaries = {config.checkpoint.every, config.evaluation.every or config.checkpoint.every}
    job = Job(
        spec=spec,
        plan=plan,
        schedule=schedule,
        shape=shape,
        source=source,
        target=target,
        form=form.form,
        max_documents=max_documents(torch.from_numpy(store.lengths), shape.token_budget),
        optim=config.optim,
        loss=config.loss,
        deadlines=config.deadlines,
        boundaries=frozenset(boundaries),
        seed=config.seed,
        initial=start and start.weights,
    )
    screen.say(prove_start(job).describe())
    return Prepared(job, _identity(config, spec, schedule, store, start), frozenset(stops))


def open_or_prepare(
    config: DataConfig,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    stops: tuple[int, ...],
    screen: Screen,
) -> TokenStore:
    """Open the token store at `config.path`, or prepare that file into `out` (free when nothing changed)."""
    path = Path(builtin_conversations(config.path))
    if path.is_dir() and read_manifest(path) is not None:
        return open_store(path, hash_tokenizer(tokenizer))
    options = PrepareOptions(max_length=config.max_length, stop_token_ids=stops)
    # The run's own store follows its settings; checkpoints made from others are refused by their identity.
    print_report(prepare(path, tokenizer, out, options, overwrite=True), screen.console)
    return open_store(out, hash_tokenizer(tokenizer))


def _num_steps(config: RunConfig, source: RowSource) -> int:
    if config.optim.steps is not None:
        return config.optim.steps
    assert config.optim.epochs is not None
    return math.ceil(source.rows_in(config.optim.epochs) / config.optim.rows_per_step)


def _identity(
    config: RunConfig, spec: DrafterSpec, schedule: Schedule, store: TokenStore, start: WarmStart | None
) -> Identity:
    """What a checkpoint must share with a run that resumes it: all that shapes the result."""
    shared = config.model_dump(mode="json", include={"target", "seed", "rows", "loss", "optim"})
    return Identity(
        config={
            **shared,
            "drafter": spec.model_dump(mode="json"),
            "num_steps": schedule.num_steps,
            "initial_weights": start and start.sha256,  # by content: the folder may move
        },
        data={"key": store.manifest["key"], "documents": len(store)},
    )
