"""What a data set is, and the defaults for what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from resilient.common.arguments import whole_number
from resilient.data.sample_types import check_collated
from resilient.errors import SampleError

Sample = Mapping[str, Any]
"""Entries by name: tensors, :class:`resilient.data.Lazy` ones, or whatever the data set's own ``collate`` takes."""

Collate = Callable[[Sequence[Sample]], dict[str, Tensor]]
"""Joins samples to one microbatch."""


class Dataset(Protocol):
    """A map from index to sample; the same on every worker.

    Stages of a pipeline read the same samples, each for itself, and again when a step is redone. So ``__getitem__``
    must be a function of the index and of what it draws from the global generators of Python (``random``), numpy
    (``np.random``) and torch. They are seeded for each sample, by the job's seed, the epoch and the index:
    augmentation with them changes from epoch to epoch and is the same on every worker, in every process, after every
    failure. It must not depend on generators of its own, the time, or the order of a set, nor keep what it drew for
    another time: where that shows, the job ends and names the sample. ``__getitem__`` may be called more than once for
    a sample of a step, and may run in processes forked from the worker when training begins; an entry that takes long
    to load may be :class:`resilient.data.Lazy`.

    Three more methods are optional: ``num_targets(i) -> int``, how many targets sample i has in the loss, known without
    loading it (see :func:`num_targets`); ``collate(samples) -> dict[str, Tensor]`` (see :func:`collate_of`), which must
    keep all samples, each once, and draw no random numbers; and, for models that pack samples, ``lengths(i)``, how many
    tokens each sequence of sample i has, by unit: ``{"vision": [256, 64], "llm": [700]}`` (see
    :class:`resilient.data.lengths.SampleLengths`).
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


def collate_of(dataset: Dataset, model: object = None) -> Collate:
    """Return how samples are joined: in the data set's own way, else in the model's, else by :func:`stack`.

    The first two raise ``SampleError`` if they give no tensors or leave samples out.
    """
    own: Collate | None = getattr(dataset, "collate", None) or getattr(model, "collate", None)
    return stack if own is None else partial(_collate, own)


def _collate(own: Collate, samples: Sequence[Sample]) -> dict[str, Tensor]:
    batch = own(samples)
    check_collated(batch, samples, "collate")
    return batch


def stack(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack every entry of the samples along a new first dimension.

    Raises:
        SampleError: They have different entries or shapes.
    """
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
