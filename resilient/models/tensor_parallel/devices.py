"""The devices that share each microbatch of a stage, as one of them sees them.

Owns who has which part: of anything that is cut device i of d has elements ``n i / d .. n (i + 1) / d - 1`` of n. Knows
of tensors only; what is differentiated is :mod:`resilient.models.tensor_parallel.exchanges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from torch import Tensor

TokenPieces = list[slice]
"""Some of the tokens of each device."""


class Exchange(Protocol):
    """An exchange under way."""

    def wait(self) -> None: ...


class Exchanges(Protocol):
    """What the devices exchange parts by; see :class:`resilient.comm.Communicator`."""

    rank: int

    def all_gather(self, parts: Sequence[Tensor], group: tuple[int, ...]) -> Exchange: ...

    def reduce_scatter(self, parts: Sequence[Tensor], group: tuple[int, ...]) -> Exchange: ...


def part_bounds(size: int, degree: int) -> list[int]:
    """Return where the part of each device of something begins, and where the last one ends."""
    return [size * index // degree for index in range(degree + 1)]


class TensorDevices:
    """The devices of a stage; all of them call all that exchanges something in the same order.

    Args:
        comm: The generation's groups.
        group: The devices' ranks.
        num_chunks: In how many chunks tokens are exchanged, while the matrix products are computed that they feed or
            follow; in one, they are before or after that.
        on_exchange: Called before each exchange.

    Attributes:
        index: This device's place among them.
        degree: How many there are.
        num_chunks: As given.
    """

    def __init__(
        self,
        comm: Exchanges,
        group: tuple[int, ...],
        num_chunks: int = 1,
        on_exchange: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm = comm
        self._group = group
        self.index = group.index(comm.rank)
        self.degree = len(group)
        self.num_chunks = num_chunks
        self._on_exchange = on_exchange

    def own(self, size: int) -> slice:
        """Return this device's part of something."""
        first, end = part_bounds(size, self.degree)[self.index : self.index + 2]
        return slice(first, end)

    def own_size(self, size: int) -> int:
        """Return how large it is."""
        own = self.own(size)
        return own.stop - own.start

    def chunks(self, num_tokens: int) -> list[TokenPieces]:
        """Return which of its tokens each device exchanges together; of few tokens chunks may have none."""
        parts = pairwise(part_bounds(num_tokens, self.degree))
        cuts = [
            [slice(first + start, first + stop) for start, stop in pairwise(part_bounds(end - first, self.num_chunks))]
            for first, end in parts
        ]
        return [list(pieces) for pieces in zip(*cuts, strict=True)]

    def start_gather(self, whole: Tensor, pieces: TokenPieces) -> Exchange:
        """Start to fill in a contiguous tensor ``[tokens, ...]`` those pieces that are not this device's."""
        self._on_exchange()
        return self._comm.all_gather([whole[piece] for piece in pieces], self._group)

    def start_sum(self, total: Tensor, pieces: TokenPieces) -> Exchange:
        """Start to sum, in a contiguous tensor ``[tokens, ...]``, that piece which is this device's over all devices.

        The others stay as they are, and are to be until that is done.
        """
        self._on_exchange()
        return self._comm.reduce_scatter([total[piece] for piece in pieces], self._group)

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
        self.start_gather(whole, self._parts(num_tokens)).wait()
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
        self.start_sum(total, self._parts(len(total))).wait()
        return total[self.own(len(total))].transpose(0, 1)

    def stack(self, own: Tensor) -> Tensor:
        """Return what each device has, ``[degree, ...]``.

        Args:
            own: Of this one; of the same shape on all.

        Raises:
            CommunicationError: A peer is gone.
        """
        each = own.new_empty((self.degree, *own.shape))
        each[self.index] = own
        self.start_gather(each, self._parts(self.degree)).wait()
        return each

    def _parts(self, size: int) -> TokenPieces:
        """Return the part of each device of something."""
        return [slice(first, end) for first, end in pairwise(part_bounds(size, self.degree))]
