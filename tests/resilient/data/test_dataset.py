"""What the runtime asks of a data set, and the defaults for what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from resilient.data import Sample, collate_of, num_targets
from resilient.errors import SampleError


class Plain:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        return {"input": torch.full((2,), float(index)), "target": torch.tensor(index)}


class Rich(Plain):
    def num_targets(self, index: int) -> int:
        return 10 * index

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        return {"input": torch.cat([sample["input"] for sample in samples])}


def test_defaults_stack_entries_and_weigh_each_sample_once() -> None:
    dataset = Plain()
    batch = collate_of(dataset)([dataset[i] for i in (2, 0)])
    assert num_targets(dataset, 2) == 1
    assert batch["input"].tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert batch["target"].tolist() == [2, 0]


def test_the_data_sets_own_methods_are_used() -> None:
    dataset = Rich()
    assert num_targets(dataset, 2) == 20
    assert collate_of(dataset)([dataset[1], dataset[2]])["input"].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_entry_that_a_sample_lacks_is_named() -> None:
    message = r"^entry 'target' must be in all samples, got one of \['input'\]; add it$"
    with pytest.raises(SampleError, match=message):
        collate_of(Plain())([Plain()[0], {"input": torch.zeros(2)}])


def test_samples_of_different_shape_need_a_collate() -> None:
    message = (
        r"^entry 'input' must have one shape in all samples of a microbatch, got \[\(1,\), \(2,\)\]; give the data set "
        r"a collate\(samples\) that pads$"
    )
    with pytest.raises(SampleError, match=message):
        collate_of(Plain())([{"input": torch.zeros(1)}, {"input": torch.zeros(2)}])
