"""A device of a stage whose peers are not there: what it computes has the sizes it has among them, not the values.

What it receives is noted, for those who know how long that takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from resilient.comm.interface import DONE, Group, Pending
from resilient.comm.parts_exchange import PartsExchange


class LastOfSeveral:
    """The exchanges of the last of several devices, in the memory that they take; the others' parts are zero.

    Args:
        size: How many devices there are; of what they divide unevenly the last one has the most.

    Attributes:
        received: Bytes of each message that came, in their order.
    """

    def __init__(self, size: int) -> None:
        self.rank = size - 1
        self.received: list[int] = []

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        """Send to nobody."""
        return DONE

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Receive zeros."""
        tensor.zero_()
        self.received.append(tensor.numel() * tensor.element_size())
        return DONE

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        """Fill in zeros for what others have."""
        return PartsExchange(self, parts, group, tag=0).all_gather()

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        """Keep what this device has of the sum."""
        return PartsExchange(self, parts, group, tag=0).reduce_scatter()
