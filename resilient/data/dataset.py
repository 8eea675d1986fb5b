"""What a data set is, and the defaults for what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from resilient.common.arguments import whole_number
from resilient.data.sample_types import check_collated
from resilient.errors import SampleError

Sample = Mapping[str, Tensor]


class Dataset(Protocol):
    """A map from index to sample; the same on every worker.

    ``__getitem__`` must be a function of the index alone (seed augmentations from it): a sample may be read twice,
    by different workers, when a step is redone. Two more methods are optional: ``num_targets(i) -> int``, how many
    targets sample i has in the loss, known without loading it (see :func:`num_targets`), and
    ``collate(samples) -> dict[str, Tensor]`` (see :func:`collate`).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def num_targets(dataset: Dataset, index: int) -> int:
    """Return how many targets sample ``index`` adds to the loss: what the data set says, or 1."""
    count = getattr(dataset, "num_targets", None)
    if count is None:
        return 1
    fix = "return how many targets the sample adds to the loss"
    return whole_number(f"num_targets({index}) of {type(dataset).__name__}", count(index), 0, fix)


def collate(dataset: Dataset, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Join samples to one microbatch: the data set's way, or by stacking every entry.

    Raises:
        SampleError: If samples of different entries or shapes are to be stacked, or its own way gives no tensors.
    """
    own = getattr(dataset, "collate", None)
    if own is None:
        return stack(samples)
    batch = own(samples)
    check_collated(batch, "collate")
    return batch


def stack(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack every entry of the samples along a new first dimension."""
    batch: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        for sample in samples:
            if key not in sample:
                raise SampleError(f"entry {key!r} must be in all samples, got one of {sorted(sample)}; add it")
        values = [torch.as_tensor(sample[key]) for sample in samples]
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise SampleError(
                f"entry {key!r} must have one shape in all samples of a microbatch, got {sorted(shapes)}; "
                "give the data set a collate(samples) that pads"
            )
        batch[key] = torch.stack(values)
    return batch
