"""Sketches of tensors: sums by which two tensors are compared whose last bits may differ."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SLICES = 256

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3}
"""By element type, relative to the sum of a slice's magnitudes."""


def sketch(values: Tensor) -> Tensor:
    """Return the sums of a tensor's slices and of their magnitudes, ``[2, NUM_SLICES]``, float64, on the CPU.

    Slices are consecutive values, which mostly belong to one parameter or one optimizer slot: what is small there is
    not lost beside what is large elsewhere.

    Args:
        values: Floating-point numbers ``[num_values]``.
    """
    length = max(1, -(-values.numel() // NUM_SLICES))
    num_whole = values.numel() // length
    slices = [values[: num_whole * length].view(num_whole, length), values[num_whole * length :].view(1, -1)]
    sums = torch.cat([part.sum(1, dtype=torch.float64) for part in slices])
    magnitudes = torch.cat([torch.linalg.vector_norm(part, 1, dim=1, dtype=torch.float64) for part in slices])
    both = torch.zeros(2, NUM_SLICES + 1, dtype=torch.float64)
    both[0, : sums.numel()], both[1, : sums.numel()] = sums.cpu(), magnitudes.cpu()
    return both[:, :NUM_SLICES]


def is_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two sketches may be of the same values, computed on different kinds of devices.

    Args:
        one: From :func:`sketch`.
        other: Likewise.
        dtype: Of the values.
    """
    denormal = 2.0**32 * torch.finfo(dtype).tiny  # of that many values, which some devices take for zero
    bound = TOLERANCES[dtype] * torch.maximum(one[1], other[1]) + denormal
    return bool((((one - other).abs() <= bound) & bound.isfinite()).all())
