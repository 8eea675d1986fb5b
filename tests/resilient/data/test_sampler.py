"""The order of samples: pure, and every epoch exactly once."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.data import StepSampler

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)


@given(num_samples=sizes, global_batch=sizes, seed=seeds, num_steps=st.integers(1, 12))
def test_each_epoch_holds_every_sample_once_across_step_borders(
    num_samples: int, global_batch: int, seed: int, num_steps: int
) -> None:
    sampler = StepSampler(num_samples=num_samples, global_batch=global_batch, seed=seed)
    stream = np.concatenate([sampler.indices(step) for step in range(1, num_steps + 1)])
    assert len(stream) == num_steps * global_batch
    for begin in range(0, len(stream), num_samples):
        epoch = stream[begin : begin + num_samples]
        assert len(set(epoch)) == len(epoch)
        assert epoch.min() >= 0
        assert epoch.max() < num_samples


@given(num_samples=sizes, global_batch=sizes, seed=seeds, steps=st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_a_step_is_a_function_of_seed_and_step_in_any_order_of_asking(
    num_samples: int, global_batch: int, seed: int, steps: list[int]
) -> None:
    sampler = StepSampler(num_samples=num_samples, global_batch=global_batch, seed=seed)
    asked = {step: sampler.indices(step) for step in steps}
    for step in sorted(steps):
        again = StepSampler(num_samples=num_samples, global_batch=global_batch, seed=seed).indices(step)
        assert np.array_equal(again, asked[step])


def test_order_is_the_same_on_every_machine_and_version() -> None:
    sampler = StepSampler(num_samples=10, global_batch=4, seed=0)
    assert [sampler.indices(step).tolist() for step in (1, 2, 3)] == [[8, 0, 3, 7], [6, 4, 1, 5], [2, 9, 1, 5]]


def test_seeds_and_epochs_differ() -> None:
    one = StepSampler(num_samples=100, global_batch=100, seed=0)
    other = StepSampler(num_samples=100, global_batch=100, seed=1)
    assert not np.array_equal(one.indices(1), other.indices(1))
    assert not np.array_equal(one.indices(1), one.indices(2))


def test_the_caller_cannot_change_the_order() -> None:
    sampler = StepSampler(num_samples=8, global_batch=8, seed=0)
    before = sampler.indices(1).copy()
    sampler.indices(1)[:] = 0
    assert np.array_equal(sampler.indices(1), before)


@pytest.mark.parametrize(
    ("argument", "value", "least"), [("num_samples", 0, 1), ("global_batch", 0, 1), ("seed", -1, 0)]
)
def test_impossible_sampler_is_refused(argument: str, value: int, least: int) -> None:
    message = f"{argument} must be >= {least}, got {value}; pass a larger one"
    arguments = {"num_samples": 4, "global_batch": 2, "seed": 0, argument: value}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        StepSampler(**arguments)


def test_step_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^step must be >= 1, got 0; the first step of a job is step 1$"):
        StepSampler(num_samples=4, global_batch=2, seed=0).indices(0)
