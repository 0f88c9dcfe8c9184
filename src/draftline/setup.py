"""From a configuration to a job: everything that can be refused is refused here, before anything long starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from draftline.checkpoint import Checkpointer, Identity, Loaded, refuse_other_run
from draftline.config import DataConfig, DrafterSpec, RunConfig
from draftline.console import Screen
from draftline.data.fingerprint import hash_tokenizer
from draftline.data.integrity import find_damage
from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.report import print_report
from draftline.data.rows import RowShape, RowSource
from draftline.data.store import TokenStore, open_store, read_manifest
from draftline.data.template import refuse_other_template
from draftline.decoding.evaluate import Prompt, refuse_beyond_context
from draftline.decoding.greedy import Limit
from draftline.decoding.prompts import load_prompts
from draftline.drafter.float8 import refuse_float8
from draftline.drafter.model import empty_drafter
from draftline.errors import ConfigError, DataError, OccupiedError
from draftline.flash import refuse_flash, unused_flash
from draftline.parity import prove_start
from draftline.paths import STORE, builtin_conversations
from draftline.pipeline.costs import head_dim
from draftline.pipeline.job import Job, max_documents, row_shape
from draftline.pipeline.plan import Plan, make_plan
from draftline.pipeline.planning import refuse_what_cannot_fit, resolve_placement
from draftline.pipeline.schedule import Schedule
from draftline.resilience.folder import CHECKPOINTS
from draftline.resilience.result import RESULT
from draftline.serving.warm_start import WarmStart, load_warm_start
from draftline.target.inspect import context_limit, resolve_spec, stop_token_ids
from draftline.target.load import (
    Target,
    load_target,
    read_target_config,
    require_weights,
    sketch_target,
    text_config,
)
from draftline.target.selftest import choose_form


@dataclass(frozen=True)
class Accepted:
    """What a run is made of besides its target's weights."""

    spec: DrafterSpec
    plan: Plan
    shape: RowShape
    source: RowSource
    schedule: Schedule
    store: TokenStore
    start: WarmStart | None
    stop_token_ids: frozenset[int]
    prompts: list[Prompt]
    """Held out; empty without `data.eval_path`."""
    identity: Identity
    checkpointer: Checkpointer
    loaded: Loaded | None
    """The checkpoint that the run goes on from."""


@dataclass(frozen=True)
class Prepared:
    """A job, and what was accepted for it."""

    job: Job
    accepted: Accepted

    @property
    def identity(self) -> Identity:
        """What its checkpoints must agree with."""
        return self.accepted.identity


def check_target(config: RunConfig) -> DrafterSpec:
    """The drafter's architecture from the target's configuration and tokenizer alone; reads no weights.

    Raises:
        ConfigError: target, taps, mask token or shapes cannot work.
    """
    return _resolve(config, sketch_target(config.target))


def _resolve(config: RunConfig, sketch: Target) -> DrafterSpec:
    rows, scale = sketch.head.shape[0], sketch.embedding_scale
    return resolve_spec(config.drafter, sketch.model.config, sketch.tokenizer, rows, scale)


def accept(config: RunConfig, screen: Screen) -> Accepted:
    """Refuse whatever can be refused without the target's weights, the quickest to find out first.

    Raises:
        ConfigError, DataError, CheckpointError, DiskFullError: what cannot work, with the fix.
    """
    # target, taps, mask token and the drafter's shapes
    sketch = sketch_target(config.target)
    require_weights(config.target)
    spec = _resolve(config, sketch)
    # devices and their memory
    target_config = read_target_config(config.target)
    plan = make_plan(resolve_placement(config, spec, sketch))
    refuse_float8(plan.linears, spec, plan.drafters)
    if plan.backend == "flash":
        refuse_flash(spec, head_dim(target_config), plan.drafter_dtype, (*plan.targets, *plan.drafters))
    refuse_what_cannot_fit(config, spec, sketch, plan)
    torch.set_num_threads(plan.cpu_threads)  # before any thread starts: compiled code guards on it
    # held-out prompts, weights to start from, training data
    tokenizer = sketch.tokenizer
    stops = stop_token_ids(text_config(target_config).eos_token_id, tokenizer)
    prompts = _held_out_prompts(config, sketch, Limit(config.evaluation.max_new_tokens, frozenset(stops)))
    start = load_warm_start(config.drafter, spec, config.output)
    context = context_limit(text_config(target_config))
    keep = _refuse_other_settings(config, spec, start)
    store = open_or_prepare(config.data, config.output / STORE, tokenizer, stops, context, screen, keep=keep)
    shape = row_shape(config, spec, plan.backend)
    source = RowSource(store, shape, config.seed)
    schedule = Schedule(
        num_steps=_num_steps(config, source),
        rows_per_step=config.optim.rows_per_step,
        num_targets=len(plan.targets),
        num_drafters=len(plan.drafters),
    )
    # checkpoints that are damaged or of another run, and room for new ones
    identity = _identity(config, spec, schedule, store, start)
    refuse_other_run(config.output / CHECKPOINTS, identity)
    (config.output / RESULT).unlink(missing_ok=True)  # of this run's last start, as is now known
    checkpointer = _checkpointer(config, identity)
    loaded = checkpointer.load_latest()
    if config.checkpoint.on_disk_full == "stop" and (loaded is None or loaded.step < schedule.num_steps):
        checkpointer.require_room(checkpoint_bytes(spec))
    return Accepted(
        spec=spec,
        plan=plan,
        shape=shape,
        source=source,
        schedule=schedule,
        store=store,
        start=start,
        stop_token_ids=frozenset(stops),
        prompts=prompts,
        identity=identity,
        checkpointer=checkpointer,
        loaded=loaded,
    )


def prepare_job(config: RunConfig, screen: Screen) -> Prepared:
    """Accept the settings, then load the target and test it on itself: minutes for a large one.

    Raises:
        ConfigError, DataError, CheckpointError, DiskFullError: what cannot work, with the fix.
    """
    accepted = accept(config, screen)
    spec, plan, start = accepted.spec, accepted.plan, accepted.start
    target = load_target(config.target, plan.targets[0])
    form = choose_form(target.model, spec.target_layer_ids, flash=plan.backend == "flash")
    for line in (*plan.describe(), f"target      {form.form} rows: {form.reason}"):
        screen.say(line)
    hint = unused_flash(config.placement.attention, spec.head_dim, (*plan.targets, *plan.drafters))
    if hint is not None:
        screen.say(f"note        {hint}")
    if start is not None:
        screen.say(f"warm start  from {start.source}, weights {start.sha256[:12]}")
    boundaries = {config.checkpoint.every, config.evaluation.every or config.checkpoint.every}
    job = Job(
        spec=spec,
        plan=plan,
        schedule=accepted.schedule,
        shape=accepted.shape,
        source=accepted.source,
        target=target,
        form=form.form,
        max_documents=max_documents(torch.from_numpy(accepted.store.lengths), accepted.shape.token_budget),
        optim=config.optim,
        loss=config.loss,
        deadlines=config.deadlines,
        boundaries=frozenset(boundaries),
        seed=config.seed,
        initial=start and start.weights,
    )
    screen.say(prove_start(job).describe())
    return Prepared(job, accepted)


def open_or_prepare(
    config: DataConfig,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    stops: tuple[int, ...],
    context: int | None,
    screen: Screen,
    *,
    keep: bool = False,
) -> TokenStore:
    """Open the token store at `config.path`, or prepare that file into `out` (free when nothing changed).

    Args:
        context: most tokens that the target can read.
        keep: the checkpoints beside `out` were trained on the store there, which is refused rather than replaced by
            another one.

    Raises:
        OccupiedError: another store would replace one that is to be kept.
        ConfigError, DataError: see `prepare`; or the store was made with another tokenizer, with another chat template
            or for a longer context.
    """
    path = Path(builtin_conversations(config.path))
    if path.is_dir() and read_manifest(path) is not None:
        store = open_store(path, hash_tokenizer(tokenizer), on_corrupt=config.on_corrupt)
        for damage in store.damages:
            screen.say(f"SHARD LEFT OUT (data.on_corrupt=skip): {damage.describe()}")
        refuse_other_template(store.manifest, path, tokenizer)
        longest = int(store.lengths.max(initial=0))
        if context is not None and longest > context:
            raise DataError(
                f"{path} holds a document of {longest} tokens, the target's context is {context} tokens "
                "(max_position_embeddings); prepare the data again, which clips to it"
            )
        return store
    given = config.model_dump(include={"max_length"}, exclude_unset=True)
    options = PrepareOptions(stop_token_ids=stops, **given)
    damaged = _is_damaged(out, screen)
    # The run's own store follows its settings until there are checkpoints, which could not be resumed on another.
    try:
        report = prepare(path, tokenizer, out, options, overwrite=not keep, remake=damaged, context=context)
    except OccupiedError as error:
        if not keep:  # in the way of this run, in its own folder
            raise ConfigError(str(error)) from error
        raise OccupiedError(
            f"data.path={config.path}, or how it is read, has changed since {out} was made from it, and the "
            "checkpoints beside that store need it. Restore the data and their settings to resume, or choose a new "
            "output folder"
        ) from error
    print_report(report, screen.console)
    return open_store(out, hash_tokenizer(tokenizer), verify=False)  # just checked, or just written


def _is_damaged(own: Path, screen: Screen) -> bool:
    """Whether a run's own store is not what was written, said aloud: it is then made again from its source."""
    try:
        manifest = read_manifest(own)
        damages = find_damage(own, manifest["shards"], verify=True) if manifest else []
        reasons = [damage.describe() for damage in damages]
    except DataError as error:
        reasons = [str(error)]
    if reasons:
        screen.say(f"the run's own store is made again: {'; '.join(reasons)}")
    return bool(reasons)


def checkpoint_bytes(spec: DrafterSpec) -> int:
    """Masters and two moments in float32, and the serving weights in bfloat16."""
    return sum(14 * parameter.numel() for parameter in empty_drafter(spec).parameters())


def _held_out_prompts(config: RunConfig, sketch: Target, limit: Limit) -> list[Prompt]:
    settings, names = config.evaluation, config.data.eval_path
    if not names:
        return []
    prompts = load_prompts(names, sketch.tokenizer, settings.num_prompts, settings.thinking)
    refuse_beyond_context(sketch, prompts, limit)
    return prompts


def _checkpointer(config: RunConfig, identity: Identity) -> Checkpointer:
    return Checkpointer(
        config.output / CHECKPOINTS,
        identity,
        keep=config.checkpoint.keep,
        write_timeout_s=config.deadlines.write_timeout_s,
    )


def _num_steps(config: RunConfig, source: RowSource) -> int:
    if config.optim.steps is not None:
        return config.optim.steps
    assert config.optim.epochs is not None
    return math.ceil(source.rows_in(config.optim.epochs) / config.optim.rows_per_step)


def _data_identity(store: TokenStore) -> dict[str, object]:
    identity: dict[str, object] = {"key": store.manifest["key"], "documents": len(store)}
    if store.damages:
        identity["left_out"] = [damage.path.name for damage in store.damages]
    return identity


def _refuse_other_settings(config: RunConfig, spec: DrafterSpec, start: WarmStart | None) -> bool:
    """Refuse a folder of another run by all that is known before its data are read, which writes into the folder.

    Returns:
        Whether the store in the folder is the one that its checkpoints were trained on.
    """
    known = Identity({**shared_settings(config), **_drafter_identity(spec, start)})
    if config.optim.steps is not None:
        known = Identity({**known.config, "num_steps": config.optim.steps})
    newest = refuse_other_run(config.output / CHECKPOINTS, known, partial=True)
    try:
        own = read_manifest(config.output / STORE)
    except DataError:  # it is damaged, and is made again
        return False
    return newest is not None and own is not None and own["key"] == newest.data.get("key")


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that a run which resumes it must share, as they are written."""
    return config.model_dump(mode="json", include={"target", "seed", "rows", "loss", "optim"})


def _drafter_identity(spec: DrafterSpec, start: WarmStart | None) -> dict[str, Any]:
    return {
        "drafter": spec.model_dump(mode="json"),
        "initial_weights": start and start.sha256,  # by content: the folder may move
    }


def _identity(
    config: RunConfig, spec: DrafterSpec, schedule: Schedule, store: TokenStore, start: WarmStart | None
) -> Identity:
    """What a checkpoint must share with a run that resumes it: all that shapes the result."""
    return Identity(
        config={
            **shared_settings(config),
            **_drafter_identity(spec, start),
            "num_steps": schedule.num_steps,
        },
        data=_data_identity(store),
    )
