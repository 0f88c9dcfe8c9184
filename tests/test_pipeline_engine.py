"""The threaded pipeline as a whole: any number of workers computes the same training."""

import pytest
import torch

from draftline.config import OptimConfig
from tests.pipeline_fixtures import colocated, make_job, run_job


def test_loss_falls_on_a_learnable_pattern():
    losses = run_job(make_job(steps=30, rows_per_step=2, optim=OptimConfig(steps=30, lr=1e-2))).losses
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 2), (2, 1), (2, 3), (5, 3)])
def test_losses_do_not_depend_on_the_number_of_workers(targets: int, drafters: int):
    alone = run_job(make_job())
    split = run_job(make_job(targets, drafters))
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, weight in split.states[-1].weights().items():
        torch.testing.assert_close(weight, alone.states[-1].weights()[name], rtol=1e-3, atol=1e-5)


def test_colocated_workers_train_exactly_like_split_ones():
    assert run_job(colocated(make_job(), 2)).losses == run_job(make_job(2, 2)).losses


def test_the_same_run_twice_is_the_same_run_to_the_last_bit():
    first, second = run_job(make_job(2, 2)), run_job(make_job(2, 2))
    assert first.losses == second.losses
    for name, weight in first.states[-1].weights().items():
        assert torch.equal(weight, second.states[-1].weights()[name])


def test_the_split_into_rows_per_drafter_does_not_change_the_loss():
    together = run_job(make_job(1, 1, steps=2, rows_per_step=6))
    spread = run_job(make_job(1, 6, steps=2, rows_per_step=6))
    assert spread.losses == pytest.approx(together.losses, rel=1e-5)
