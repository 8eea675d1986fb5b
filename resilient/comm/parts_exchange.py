"""All-gather and reduce-scatter of unequal parts, by messages between each two ranks of a group.

Gloo's own want equal parts. Few ranks divide a stage, all in one node, so each sends its part to each: no more bytes
than in a ring, in one hop instead of many, and a dead rank ends the wait of all others, who name it. Sums are taken in
the order of the ranks: they come out the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from resilient.comm.interface import Group, Pending


class Messages(Protocol):
    """What carries the messages."""

    rank: int

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending: ...

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending: ...


class PartsExchange:
    """One exchange, as one rank sees it.

    Args:
        messages: Carries them, also those of tensors that are not in host memory.
        parts: Contiguous, one of each rank of the group.
        group: Who has them.
        tag: Of its messages: between two ranks no other exchange that is under way has it.
    """

    def __init__(self, messages: Messages, parts: Sequence[Tensor], group: Group, tag: int) -> None:
        self._messages = messages
        self._parts = parts
        self._group = group
        self._own = group.index(messages.rank)
        self._tag = tag

    def all_gather(self) -> Pending:
        """Start to fill in the others' parts."""
        own = self._parts[self._own]
        works: list[Pending] = []
        for source, target in self._turns():
            if self._parts[source].numel():
                works.append(self._messages.recv(self._parts[source], self._group[source], self._tag))
            if own.numel():
                works.append(self._messages.send(own, self._group[target], self._tag))
        return _Gathering(works)

    def reduce_scatter(self) -> Pending:
        """Start to sum this rank's part."""
        own = self._parts[self._own]
        addends = {self._own: own}
        works: list[Pending] = []
        for source, target in self._turns():
            if own.numel():
                addends[source] = torch.empty_like(own)
                works.append(self._messages.recv(addends[source], self._group[source], self._tag))
            if self._parts[target].numel():
                works.append(self._messages.send(self._parts[target], self._group[target], self._tag))
        return _Summing(works, [addends[number] for number in sorted(addends)], own)

    def _turns(self) -> list[tuple[int, int]]:
        """Return from whom to receive and to whom to send, turn by turn: in each, everybody sends to another."""
        size = len(self._group)
        return [((self._own - turn) % size, (self._own + turn) % size) for turn in range(1, size)]


class _Gathering:
    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Summing:
    def __init__(self, works: Sequence[Pending], addends: Sequence[Tensor], into: Tensor) -> None:
        self._works = works
        self._addends = addends
        self._into = into

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        total = self._addends[0]
        for addend in self._addends[1:]:
            total = total + addend  # into memory of its own: one of them is where the sum goes
        self._into.copy_(total)
