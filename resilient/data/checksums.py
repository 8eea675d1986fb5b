"""Checksums of what was read: equal values have equal ones, others differ in random bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

_PLAIN = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8})
"""Types that numpy knows, none of them complex."""


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's values as bytes, ``[num_bytes]`` on its device, without a copy where they lie together."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not values.numel():  # numpy's empty arrays have strides that no view takes
        return values.new_empty(0, dtype=torch.uint8)
    values = values.reshape(-1)
    if values.stride(0) != 1:  # a single one may have any
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes in host memory."""
    return _values_of(tensor).data.cast("B")


def _values_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values in host memory, where they lie together."""
    if _is_plain(tensor):
        return (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return tensor_bytes(tensor).cpu().numpy()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's values lie together in host memory, as numpy knows them."""
    return (
        tensor.is_cpu
        and tensor.dtype in _PLAIN
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


@lru_cache(maxsize=1 << 12)
def _checksum_of_kind(dtype: torch.dtype, shape: torch.Size) -> int:
    return xxhash.xxh3_64_intdigest(f"{dtype}{tuple(shape)}".encode())


def entry_checksum(value: object) -> int:
    """Return a checksum, 64 bits, of an entry of a sample: a tensor, or what a data set's own ``collate`` makes one of.

    Of objects that are neither numbers, text, arrays nor made of such, only the type counts.
    """
    if isinstance(value, Tensor):  # first of all, and without the rest: samples have little else
        return xxhash.xxh3_64_intdigest(_values_of(value).data, _checksum_of_kind(value.dtype, value.shape))
    hashed = xxhash.xxh3_64()
    _take_in(hashed, value)
    return hashed.intdigest()


def row_checksums(stacked: Tensor, values: Sequence[object]) -> list[int]:
    """Return :func:`entry_checksum` of each value, sooner where they are the rows of a tensor in host memory.

    Args:
        stacked: What was made by stacking them, ``[len(values), ...]``, or is on ``meta``.
        values: Tensors, or what a data set's own ``collate`` makes them of.
    """
    kind, shape = stacked.dtype, stacked.shape[1:]
    if not _is_plain(stacked) or not all(isinstance(value, Tensor) and value.dtype is kind for value in values):
        return list(map(entry_checksum, values))
    content, row = bytes_of(stacked), stacked.nbytes // len(values)
    seed = _checksum_of_kind(kind, shape)
    return [xxhash.xxh3_64_intdigest(content[at : at + row], seed) for at in range(0, stacked.nbytes, row)]


def _take_in(hashed: xxhash.xxh3_64, value: object) -> None:
    text, content, parts = "", memoryview(b""), list[object]()
    if isinstance(value, Tensor):
        text = f"tensor {entry_checksum(value)}"
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
