"""The evaluation beside training: its own thread, whose trouble the main thread hears of and which it can end."""

from __future__ import annotations

import threading
import time

import pytest

from draftline.decoding.evaluate import Prompt
from draftline.decoding.evaluator import Evaluator
from draftline.decoding.greedy import Limit
from draftline.drafter.model import Drafter
from draftline.errors import Blame, StallError, blame_of
from draftline.resilience.faults import Fault, InjectedFaultError, armed
from tests.pipeline_fixtures import SPEC, tiny_target

WEIGHTS = Drafter(SPEC).state_dict()


def evaluator(num_prompts: int = 3) -> Evaluator:
    prompts = [Prompt((5 + i % 50, 60 + i % 40, 11)) for i in range(num_prompts)]
    return Evaluator(tiny_target(), SPEC, prompts, Limit(12))


def test_an_evaluation_is_reported_with_its_step() -> None:
    evaluation = evaluator()
    assert evaluation.start(WEIGHTS, 40)
    evaluation.wait(60)
    (measured,) = evaluation.finished()
    assert measured.step == 40
    assert measured.evaluation.overall.tau >= 1
    assert evaluation.finished() == []


def test_the_error_of_an_evaluation_is_raised_in_the_main_thread_and_named() -> None:
    evaluation = evaluator()
    with armed(Fault(worker="evaluator", where="measure", at=40, kind="raise")):
        evaluation.start(WEIGHTS, 40)
        evaluation.wait(60)
    with pytest.raises(InjectedFaultError) as caught:
        evaluation.finished()
    assert blame_of(caught.value) == Blame("evaluator")


def test_one_that_does_not_end_is_a_stall() -> None:
    evaluation = evaluator()
    with armed(Fault(worker="evaluator", where="measure", at=40, kind="sleep", seconds=2)):
        evaluation.start(WEIGHTS, 40)
        with pytest.raises(StallError, match=r"not ended within 0\.2 s") as caught:
            evaluation.wait(0.2)
    assert blame_of(caught.value) == Blame("evaluator")
    evaluation.leave(20)


def test_one_that_nobody_wants_any_more_ends_before_its_next_prompt_without_a_report() -> None:
    evaluation = evaluator(num_prompts=300)
    before = set(threading.enumerate())
    evaluation.start(WEIGHTS, 40)
    time.sleep(0.1)
    begin = time.monotonic()
    evaluation.leave(60)
    assert set(threading.enumerate()) == before
    assert time.monotonic() - begin < 30
    assert evaluation.finished() == []
