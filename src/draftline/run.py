"""A training run from a configuration to a measured, exported drafter. Read this first.

prepare_job    refuse what cannot work, then load the target and test it on itself (setup.py)
Session        the main thread: reports of the workers, metrics, checkpoints, evaluation, export (session.py)
Engine         threads: target workers -> channels -> drafter workers (pipeline/engine.py)
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from draftline.config import RunConfig
from draftline.console import Screen
from draftline.data.store import read_manifest
from draftline.errors import ConfigError, OccupiedError
from draftline.resilience import faults
from draftline.resilience.ending import explained, failed
from draftline.resilience.folder import RunFolder
from draftline.resilience.result import RunResult, write_result
from draftline.resilience.signals import StopOnSignal, ended_by_sigterm
from draftline.session import Session
from draftline.setup import prepare_job
from draftline.trained import Trained


def train(config: RunConfig, screen: Screen, command: Sequence[str] = ()) -> Trained:
    """Train, measure and export; resumes when `config.output` holds a checkpoint of the same run.

    Raises:
        DraftlineError: see errors.py; `result.json` in the output folder names the cause.
        OccupiedError: the folder holds another run, of which nothing was changed.
    """
    refuse_store(config.output)
    with RunFolder(config.output, uuid.uuid4().hex[:8]):
        session = None
        try:
            with ended_by_sigterm():
                prepared = prepare_job(config, screen)
                faults.point("main", "prepared", 0)
            with StopOnSignal() as stop:
                session = Session(config, prepared, screen, stop)
                trained = session.run()
        except BaseException as error:  # noqa: BLE001 - raised again, as what its user should meet
            known = explained(error)
            if not isinstance(known, OccupiedError):  # the folder, and its result, are another run's
                write_result(config.output, _failed(known, command, session))
            raise known from known.__cause__
        write_result(config.output, _finished(trained, command))
        return trained


def refuse_store(output: Path) -> None:
    """Files of a run inside a token store would go with it when it is made anew."""
    if output.is_dir() and read_manifest(output) is not None:
        raise ConfigError(f"output={output} is a token store; choose another folder for the run")


def _failed(error: BaseException, command: Sequence[str], session: Session | None) -> RunResult:
    if session is None:
        return failed(error, command)
    return failed(
        error,
        command,
        session.steps_done,
        session.newest_checkpoint,
        session.num_skipped_checkpoints,
        session.num_skipped_documents,
    )


def _finished(trained: Trained, command: Sequence[str]) -> RunResult:
    return RunResult(
        exit_code=0,
        cause=f"finished {trained.steps} steps",
        step=trained.steps,
        command=tuple(command),
        skipped_checkpoints=trained.skipped_checkpoints,
        skipped_documents=trained.skipped_documents,
    )
