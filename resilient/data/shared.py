"""Microbatches in memory that two processes share: written by one, mapped by the other, gone when neither has it."""

from __future__ import annotations

import mmap
import os
import pickle
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from resilient.data.checksums import bytes_of
from resilient.data.reader import Microbatch, Reading

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int | None  # None: without values


@dataclass(frozen=True)
class Raised:
    """What reading a microbatch raised instead, and where."""

    error: Exception
    traceback: str
    place: str


@dataclass(frozen=True)
class _Described:
    reading: Reading
    places: dict[str, _Place]


def write(read: Microbatch | Raised) -> tuple[int, int]:
    """Write a microbatch to new memory.

    Returns:
        The memory's file descriptor, and where the description after the tensors begins.
    """
    places: dict[str, _Place] = {}
    end = 0
    for entry, tensor in read.batch.items() if isinstance(read, Microbatch) else ():
        offset = None if tensor.is_meta else end
        places[entry] = _Place(tensor.dtype, tuple(tensor.shape), offset)
        if offset is not None:
            end = offset + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    described = _Described(read.reading, places) if isinstance(read, Microbatch) else read
    description = pickle.dumps(described)
    memory = os.memfd_create("microbatch")
    try:
        os.ftruncate(memory, end + len(description))
        with mmap.mmap(memory, end + len(description)) as mapped:
            for entry, place in places.items():
                if place.offset is not None and isinstance(read, Microbatch):
                    content = bytes_of(read.batch[entry])
                    mapped[place.offset : place.offset + len(content)] = content
            mapped[end:] = description
    except BaseException:
        os.close(memory)
        raise
    return memory, end


def mapped(memory: int, end: int) -> Microbatch | Raised:
    """Return what was written, its tensors in place; closes the descriptor.

    Args:
        memory: The descriptor.
        end: Where the description begins.
    """
    try:
        content = mmap.mmap(memory, 0)
    finally:
        os.close(memory)
    described: _Described | Raised = pickle.loads(content[end:])
    if isinstance(described, Raised):
        return described
    batch = {entry: _tensor(content, place) for entry, place in described.places.items()}
    return Microbatch(batch=batch, reading=described.reading)


def _tensor(content: mmap.mmap, place: _Place) -> Tensor:
    count = prod(place.shape)
    if place.offset is None or not count:
        return torch.empty(place.shape, dtype=place.dtype, device="meta" if place.offset is None else "cpu")
    return torch.frombuffer(content, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)
