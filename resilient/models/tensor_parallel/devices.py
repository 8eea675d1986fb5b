"""The devices that share each microbatch of a stage, as one of them sees them.

Owns who has which part: of anything that is cut device i of d has elements ``n i / d .. n (i + 1) / d - 1`` of n. Knows
of tensors only; what is differentiated is :mod:`resilient.models.tensor_parallel.exchanges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """An exchange under way."""

    def wait(self) -> None: ...


class Exchanges(Protocol):
    """What the devices exchange parts by; see :class:`resilient.comm.Communicator`."""

    rank: int

    def all_gather(self, tensor: Tensor, bounds: Sequence[int], group: tuple[int, ...]) -> Exchange: ...

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], group: tuple[int, ...]) -> Exchange: ...


def part_bounds(size: int, degree: int) -> list[int]:
    """Return where the part of each device of something begins, and where the last one ends."""
    return [size * index // degree for index in range(degree + 1)]


class TensorDevices:
    """The devices of a stage; all of them call all that exchanges something in the same order.

    Args:
        comm: The generation's groups.
        group: The devices' ranks.
    """

    def __init__(self, comm: Exchanges, group: tuple[int, ...]) -> None:
        self._comm = comm
        self._group = group
        self._index = group.index(comm.rank)
        self.degree = len(group)

    def own(self, size: int) -> slice:
        """Return this device's part of something."""
        first, end = part_bounds(size, self.degree)[self._index : self._index + 2]
        return slice(first, end)

    def own_size(self, size: int) -> int:
        """Return how large it is."""
        own = self.own(size)
        return own.stop - own.start

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        """Return the tokens of all devices.

        Args:
            part: Those of this one, ``[microbatch, own tokens, ...]``.
            num_tokens: Of all.

        Raises:
            CommunicationError: A peer is gone.
        """
        whole = part.new_empty((num_tokens, part.shape[0], *part.shape[2:]))
        whole[self.own(num_tokens)] = part.transpose(0, 1)
        self._comm.all_gather(whole.view(-1), self._bounds(whole), self._group).wait()
        return whole.transpose(0, 1)

    def sum(self, addend: Tensor) -> Tensor:
        """Return this device's tokens of the sum over all devices.

        Args:
            addend: Of this one, ``[microbatch, tokens, ...]``.

        Raises:
            CommunicationError: A peer is gone.
        """
        total = addend.transpose(0, 1).contiguous()
        if total.data_ptr() == addend.data_ptr():  # of one sample: what is given stays as it is
            total = total.clone()
        self._comm.reduce_scatter(total.view(-1), self._bounds(total), self._group).wait()
        return total[self.own(len(total))].transpose(0, 1)

    def stack(self, own: Tensor) -> Tensor:
        """Return what each device has, ``[degree, ...]``.

        Args:
            own: Of this one; of the same shape on all.

        Raises:
            CommunicationError: A peer is gone.
        """
        each = own.new_empty((self.degree, *own.shape))
        each[self._index] = own
        bounds = [index * own.numel() for index in range(self.degree + 1)]
        self._comm.all_gather(each.view(-1), bounds, self._group).wait()
        return each

    def _bounds(self, whole: Tensor) -> list[int]:
        """Return where the parts begin of something that is cut in its first dimension, in elements."""
        each = whole[:1].numel()
        return [bound * each for bound in part_bounds(len(whole), self.degree)]
