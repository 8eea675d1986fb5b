"""What a step trains on depends on seed and step alone, and bad samples are named."""

from __future__ import annotations

import re

import pytest
import torch

from resilient.data.reader import Cell
from resilient.data.sampler import StepSampler
from resilient.errors import SampleError
from resilient.runtime.batches import Batches
from tests.resilient.small import Tokens, make_job


def test_microbatches_are_the_steps_samples_in_order() -> None:
    job = make_job()
    indices = StepSampler(num_samples=24, global_batch=16, seed=3).indices(5)
    tokens = torch.cat([Batches(job).batch(5, Cell.of_chain(position, 2))["tokens"] for position in range(8)])
    assert torch.equal(tokens, torch.stack([job.dataset[int(index)]["tokens"] for index in indices]))


def test_a_microbatch_is_the_same_whenever_it_is_read() -> None:
    batches = Batches(make_job())
    first = batches.batch(5, Cell.of_chain(2, 2))
    batches.batch(6, Cell.of_chain(0, 2))
    assert all(torch.equal(value, first[key]) for key, value in batches.batch(5, Cell.of_chain(2, 2)).items())


def test_targets_are_counted_over_the_global_batch() -> None:
    assert Batches(make_job()).num_targets(1) == 16 * 5


def test_step_without_targets_is_refused() -> None:
    class Untargeted(Tokens):
        def num_targets(self, index: int) -> int:
            return 0

    message = "num_targets of step 1 must be > 0, got 0; check the data set's num_targets()"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Batches(make_job(dataset=Untargeted())).num_targets(1)


def test_bad_sample_is_named() -> None:
    batches = Batches(make_job(dataset=Tokens(bad=7)))
    order = StepSampler(num_samples=24, global_batch=16, seed=3)
    moments = [(step, place) for step in (1, 2) for place, index in enumerate(order.indices(step)) if index == 7]
    step, place = moments[0]
    message = "sample 7 of Tokens: tokens must be < 11, got "
    with pytest.raises(SampleError, match=f"^{re.escape(message)}"):
        batches.batch(step, Cell.of_chain(place // 2, 2))


def test_samples_that_cannot_be_joined_are_named() -> None:
    class Ragged(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = super().__getitem__(index)
            return {**sample, "late": torch.ones(1)} if index == first else sample

    first, second = StepSampler(num_samples=24, global_batch=16, seed=3).indices(1)[:2].tolist()
    message = (
        f"samples [{first}, {second}] of Ragged: entry 'late' must be in all samples, got one of ['labels', 'tokens']; "
        "add it"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        Batches(make_job(dataset=Ragged())).batch(1, Cell.of_chain(0, 2))


def test_sample_that_is_no_mapping_is_named() -> None:
    class Bare(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return (super().__getitem__(index)["tokens"],)  # pyright: ignore[reportReturnType]

    first = int(StepSampler(num_samples=24, global_batch=16, seed=3).indices(1)[0])
    fix = "return a dict such as {'input': ..., 'target': ...}"
    message = f"sample {first} of Bare: must map names to tensors, got a tuple; {fix}"
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        Batches(make_job(dataset=Bare())).batch(1, Cell.of_chain(0, 2))


def test_floats_take_the_jobs_type_and_integers_keep_theirs() -> None:
    class Scaled(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {**super().__getitem__(index), "scale": torch.ones(2)}

    batch = Batches(make_job(dataset=Scaled())).batch(1, Cell.of_chain(0, 2))
    assert (batch["scale"].dtype, batch["tokens"].dtype) == (torch.float64, torch.int64)
