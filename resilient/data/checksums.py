"""Checksums of what was read: equal values have equal ones, others differ in random bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's values as bytes, ``[num_bytes]`` on its device, without a copy where they lie together."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not values.numel():  # numpy's empty arrays have strides that no view takes
        return values.new_empty(0, dtype=torch.uint8)
    return values.reshape(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes in host memory."""
    return tensor_bytes(tensor).cpu().numpy().data


def entry_checksum(value: object) -> int:
    """Return a checksum, 64 bits, of an entry of a sample: a tensor, or what a data set's own ``collate`` makes one of.

    Of objects that are neither numbers, text, arrays nor made of such, only the type counts.
    """
    hashed = xxhash.xxh3_64()
    _take_in(hashed, value)
    return hashed.intdigest()


def _take_in(hashed: xxhash.xxh3_64, value: object) -> None:
    text, content, parts = "", memoryview(b""), list[object]()
    if isinstance(value, Tensor):
        text, content = f"{value.dtype}{tuple(value.shape)}", bytes_of(value)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
        text, parts = f"objects{value.shape}", value.ravel().tolist()
    elif isinstance(value, np.ndarray | np.generic):
        text, content = f"{value.dtype}{value.shape}", memoryview(value.tobytes())
    elif isinstance(value, Mapping):
        text, parts = f"{len(value)} entries", [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple):
        text, parts = f"{len(value)} values", list(value)
    elif isinstance(value, int | float | complex | str | bytes | None):
        text = repr(value)
    else:
        text = type(value).__qualname__
    hashed.update(text.encode())
    hashed.update(content)
    for part in parts:
        _take_in(hashed, part)
