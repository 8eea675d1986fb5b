"""The parameters of a state that several devices divide: whole while a layer that uses them runs, and gone otherwise.

Owns what is gathered of whom, and where: the parameters of the canonical buffer without the slots between them. All
devices of a stage begin and end with a state in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from resilient.comm import Communicator, Group, Pending
from resilient.state.gathered.freeable_buffer import FreeableBuffer
from resilient.state.layer_state import LayerState
from resilient.state.layout import ParameterEntry
from resilient.templates.common.byte_intervals import ByteIntervals


class GatheredState:
    """The parameters of one state on one of its devices.

    Args:
        comm: The generation's groups.
        group: The devices' ranks.
        held: What each of them holds of the state, in the same order: of every segment one interval after the other.
        state: What this one does.

    Attributes:
        parameters: By name, for the layers' modules; their values are here between :meth:`wait` and :meth:`release`.
        dtype: The job's type.
    """

    def __init__(self, comm: Communicator, group: Group, held: Sequence[ByteIntervals], state: LayerState) -> None:
        self._comm = comm
        self._group = group
        self._state = state
        self._num_users = 0
        self._pending: list[Pending] = []
        self.dtype = state.dtype
        starts = list(accumulate((segment.size for segment in state.segments), initial=0))
        self._segments = [
            _Segment(segment, start, _bounds(segment, held))
            for segment, start in zip(state.segments, starts, strict=False)
            if segment
        ]
        self._buffer = FreeableBuffer(starts[-1], state.bytes.device)
        self._trained_bounds = [
            bound // self.dtype.itemsize for bound in _bounds(ByteIntervals.of(0, state.segments[0].size), held)
        ]
        self.parameters = {entry.name: self._parameter(entry, starts[2]) for entry in state.layout.entries}
        self._buffer.free()

    def _parameter(self, entry: ParameterEntry, own_start: int) -> nn.Parameter:
        dtype = entry.dtype or self.dtype
        start = entry.offset * self.dtype.itemsize if entry.dtype is None else own_start + entry.offset
        elements = self._buffer.view(start, start + entry.numel * dtype.itemsize, dtype)
        return nn.Parameter(entry.shaped(elements), requires_grad=entry.trainable)

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return self._buffer.num_bytes

    def acquire(self) -> None:
        """Start to gather, unless that was done for another layer which is not done with it."""
        self._num_users += 1
        if self._num_users > 1:
            return
        self._buffer.allocate()
        everything = self._buffer.bytes
        for segment in self._segments:
            there = everything[segment.start : segment.start + segment.intervals.size]
            own = self._group.index(self._comm.rank)
            first, end = segment.bounds[own], segment.bounds[own + 1]
            (offset, _), *_ = segment.intervals
            there[first:end].copy_(self._state.window(offset + first, offset + end))
            self._pending.append(self._comm.all_gather(_parts(there, segment.bounds), self._group))

    def wait(self) -> None:
        """Wait for what was started.

        Raises:
            CommunicationError: A peer is gone.
        """
        while self._pending:
            self._pending.pop().wait()

    def release(self) -> None:
        """Be done with it; the last of its users frees the memory."""
        self._num_users -= 1
        if not self._num_users:
            self._buffer.free()

    def catch_gradients(self) -> Callable[[], SummedGradients]:
        """Have the next backward leave the whole gradient in memory of its own; to be called when that is done.

        Returns:
            What starts to sum it over the devices, each its part.
        """
        whole = torch.zeros(self._state.layout.num_trainable, dtype=self.dtype, device=self._state.bytes.device)
        for entry in self._state.layout.entries:
            if entry.trainable:
                part = whole[entry.offset : entry.offset + entry.numel]
                self.parameters[entry.name].grad = entry.shaped(part)

        def sum_up() -> SummedGradients:
            for parameter in self.parameters.values():
                parameter.grad = None
            return SummedGradients(self._comm, self._group, whole, self._trained_bounds, self._state)

        return sum_up


class SummedGradients:
    """A whole gradient on its way into the parts of those that divide the state.

    Args:
        comm: The generation's groups.
        group: The devices' ranks.
        whole: What a backward here left.
        bounds: Of the parts.
        state: What this device holds.
    """

    def __init__(
        self, comm: Communicator, group: Group, whole: Tensor, bounds: Sequence[int], state: LayerState
    ) -> None:
        parts = _parts(whole, bounds)
        self._part = parts[group.index(comm.rank)]
        self._state = state
        self._pending = comm.reduce_scatter(parts, group)

    def add(self) -> None:
        """Wait for the sum, and add it to the state's gradient.

        Raises:
            CommunicationError: A peer is gone.
        """
        self._pending.wait()
        self._state.grad += self._part


class _Segment:
    """Parameters that lie together.

    Args:
        intervals: Where, in the canonical buffer.
        start: Where in what is gathered.
        bounds: Of the devices' parts in it.
    """

    def __init__(self, intervals: ByteIntervals, start: int, bounds: Sequence[int]) -> None:
        self.intervals = intervals
        self.start = start
        self.bounds = bounds


def _bounds(segment: ByteIntervals, held: Sequence[ByteIntervals]) -> list[int]:
    """Return where in a segment the part of each device begins, and where the last one ends."""
    sizes = [(segment & each).size for each in held]
    assert sum(sizes) == segment.size, "the devices of a stage divide its states"
    return list(accumulate(sizes, initial=0))


def _parts(whole: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Return the part of each device."""
    return [whole[first:end] for first, end in pairwise(bounds)]
