"""Norm weights start at exactly 1, where a bfloat16 master would hold them for ever."""

from __future__ import annotations

from tests.pipeline_fixtures import make_job, run_job


def test_after_twenty_steps_no_norm_weight_is_left_at_its_start():
    weights = run_job(make_job(steps=20)).states[-1].weights()
    norms = {name: tensor for name, tensor in weights.items() if tensor.dim() == 1}
    assert len(norms) == 2 + 4 * 2  # final and context norm; four in each of two layers
    assert [name for name, tensor in norms.items() if bool((tensor == 1.0).any())] == []
