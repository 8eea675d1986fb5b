"""What the runtime needs of a generation's process groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from resilient.errors import CommunicationError

Group = tuple[int, ...]
"""Ascending global ranks of a generation."""


def name_of(group: Group | tuple[Group, Group]) -> str:
    """Return what a group's keys in a store begin with: ranks ask for many of them, so it must not grow with the group.

    Args:
        group: The group; with it, where that is only connected in parts, the part.
    """
    return hashlib.sha256(str(group).encode()).hexdigest()[:16]


def in_meeting_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of ranks, each once, in the order in which all ranks meet theirs: none waits in a circle.

    Neighbours meet side by side.
    """
    distinct = {(min(pair), max(pair)) for pair in pairs}
    return sorted(distinct, key=lambda pair: (pair[0] % 2, pair))


class Pending(Protocol):
    """An operation under way; its tensors must stay untouched until ``wait`` has returned."""

    def wait(self) -> None:
        """Block until the operation is done.

        Raises:
            CommunicationError: A peer is gone or the generation was aborted; nothing more can be done in it.
        """
        ...


class Communicator(Protocol):
    """What the executor needs of a generation's groups. Only ``abort`` may be called from other threads.

    ``size`` counts the ranks that train. Those from ``size`` on only send states, through ``send`` and ``recv``.
    ``on_devices``: tensors go from GPU to GPU, which all ranks have, and not by way of the hosts.
    """

    rank: int
    size: int
    on_devices: bool

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        """Send a contiguous tensor; the target receives with the same tag and the same number of bytes."""
        ...

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Receive into a contiguous tensor."""
        ...

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        """Sum in place over ``group``; its members call this in the same order."""
        ...

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        """Fill in the contiguous ``parts`` of which the ranks of ``group`` have one each, in their order.

        A part may have no elements. All members call this and :meth:`reduce_scatter` in the same order, with parts of
        the same sizes.
        """
        ...

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        """Sum over ``group``, in place, that of the contiguous ``parts`` which is this rank's.

        The others stay as they are.
        """
        ...

    def check(self) -> None:
        """Raise ``CommunicationError`` if the generation was aborted: computing on would be for nothing."""
        ...

    def abort(self) -> None:
        """Make all operations, running and future, fail on this rank and, through broken connections, at its peers."""
        ...

    def close(self) -> None:
        """Drop the groups; the generation ended in good order."""
        ...


class Done:
    def wait(self) -> None:
        return None


DONE: Pending = Done()


class SingleProcessCommunicator:
    """The communicator of a job with one worker: there is nobody to talk to."""

    rank = 0
    size = 1
    on_devices = False
    _is_aborted = False

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        raise AssertionError("a single worker has no peer to send to")

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        raise AssertionError("a single worker has no peer to receive from")

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        self.check()
        return DONE

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        self.check()
        return DONE

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        self.check()
        return DONE

    def check(self) -> None:
        if self._is_aborted:
            raise CommunicationError("the generation was aborted")

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        return None
