"""Checks the kinds of what a data set returns: samples as it reads them, and microbatches as it collates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resilient.common.arguments import described, kind_of
from resilient.data.lazy import Lazy
from resilient.errors import SampleError

_LOADED = (Tensor, Lazy)


def check_types(sample: Any, name: str, *, is_stacked: bool) -> None:
    """Check that a sample maps names to what can be joined to a microbatch.

    Args:
        sample: Before it is collated.
        name: What to call it in the message.
        is_stacked: Samples are stacked as they are: only a ``collate`` of its own makes tensors of anything.

    Raises:
        SampleError: It does not.
    """
    if not isinstance(sample, Mapping):
        fix = "return a dict such as {'input': ..., 'target': ...}"
        raise SampleError(f"{name}: must map names to tensors, got {described(sample)}; {fix}")
    if not is_stacked:
        return
    for entry, value in sample.items():
        if not isinstance(value, _LOADED) and not _is_numeric(value):
            raise SampleError(
                f"{name}: {entry!r} must be a tensor or numbers, got {described(value)}; convert it, leave it out, or "
                "give the data set a collate(samples) that makes tensors of it"
            )


def _is_numeric(value: Any) -> bool:
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def check_tensor(value: Any, what: str, form: str) -> None:
    """Check that something in a sample is a tensor.

    Args:
        value: What there is.
        what: What to call it in the message.
        form: Its shape, ``[seq]``.

    Raises:
        SampleError: It is none.
    """
    if isinstance(value, Tensor):
        return
    fix = "return torch.as_tensor(...) of it" if _is_numeric(value) else "convert it, or leave the sample out"
    raise SampleError(f"{what} must be a tensor {form}, got {described(value)}; {fix}")


def check_collated(batch: Any, samples: Sequence[Mapping[str, Any]], name: str) -> None:
    """Check what a data set's own ``collate`` made of samples.

    Args:
        batch: What it returned.
        samples: What it was given.
        name: What to call it in the message.

    Raises:
        SampleError: It is no dict of tensors, or some samples are missing in it.
    """
    if not isinstance(batch, Mapping):
        fix = "return a dict such as {'input': ..., 'target': ...}"
        raise SampleError(f"{name} must return tensors by name, got {kind_of(batch)}; {fix}")
    for entry, value in batch.items():
        if not isinstance(value, Tensor):
            fix = "stack or pad it, or leave it out"
            raise SampleError(f"{name} must return tensors, got {described(value)} as {entry!r}; {fix}")
    # what is padded or packed says nothing of their number, what is stacked does
    rows = [
        len(value)
        for entry, value in batch.items()
        if value.ndim and all(_shape(sample.get(entry)) == value.shape[1:] for sample in samples)
    ]
    if rows and max(rows) < len(samples):
        fix = "leave samples out in __len__ and __getitem__"
        raise SampleError(f"{name} must keep all {len(samples)} samples, got {max(rows)}; {fix}")


def _shape(value: Any) -> tuple[int, ...] | None:
    return () if isinstance(value, int | float) else getattr(value, "shape", None)


class NamedEntries(dict[str, Tensor]):
    """A microbatch that says what it holds where something is asked for that it does not.

    Args:
        entries: Its tensors.
        name: What to call it in the message.
    """

    def __init__(self, entries: Mapping[str, Tensor], name: str) -> None:
        super().__init__(entries)
        self._name = name

    def __missing__(self, entry: str) -> Tensor:
        fix = "rename what the data set returns"
        raise MissingEntryError(f"{self._name} must hold {entry!r}, which the model reads, got {sorted(self)}; {fix}")


class MissingEntryError(SampleError, KeyError):
    """A layer or the loss asked for what the microbatch does not hold; one that can do without may catch a KeyError."""
