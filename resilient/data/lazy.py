"""Entries of a sample that are loaded only where a layer reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lazy:
    """An entry of a sample whose shape is known without loading it: a picture, whose labels other workers need.

    Workers none of whose layers read the entry get a tensor of that shape without values (on torch's ``meta`` device),
    which ``collate`` may pad and stack as any other.

    Args:
        load: Return the tensor. What it draws from the global generators is a function of (seed, epoch, index, entry).
        shape: Of the tensor.
        dtype: Likewise.
    """

    load: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return a tensor without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")
