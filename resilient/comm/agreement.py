"""Finds out whether all who hold a copy of something hold the same, in a sum over all ranks that is made anyway."""

from __future__ import annotations

from resilient.comm.interface import Group

_MODULUS = 1 << 32
"""Of the shares: float64 adds up those of a million ranks exactly."""


class Shares:
    """What one rank adds to a sum over all ranks, so that equal copies cancel out, of any number of things.

    A difference goes unnoticed with the probability that two random numbers of 32 bits are equal.

    Args:
        rank: The rank.

    Attributes:
        total: The number to add, 0 .. 2^32 - 1.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.total = 0

    def add(self, checksum: int, holders: Group) -> None:
        """Take in this rank's copy of one thing.

        Args:
            checksum: Of the copy; what differs must differ in random bits.
            holders: The ranks that have a copy, this one among them.
        """
        weight = 1 - len(holders) if self._rank == holders[0] else 1
        self.total = (self.total + weight * checksum) % _MODULUS


def all_equal(summed: float) -> bool:
    """Return whether all copies of all things were equal, from the sum over all ranks."""
    return int(summed) % _MODULUS == 0
