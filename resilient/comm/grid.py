"""Sums over many ranks along the lines of a grid, so that no rank is connected to more than a few others.

The ranks of a group stand in rows. Those of a row divide the values and sum a part each; those of a column sum that
part over the rows, in a grid of their own if they are many; then the row puts the parts together. A rank sends and
receives about what it does in a ring, in two hops for each line that it is in instead of two for each rank. A part
is summed by one rank, in the order of ranks, and copied: all have the same bytes, the same each time.

Who comes out of a sum knows that all have brought their values to it, as of any sum.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from resilient.comm.interface import Group, Pending, in_meeting_order
from resilient.comm.parts_exchange import PartsExchange
from resilient.errors import CommunicationError

WIDEST = 32
"""The most ranks that are all connected to each other."""
_NUM_TAGS = 1 << 30


@dataclass(frozen=True)
class GridLine:
    """Ranks of a group that are connected to each other.

    Args:
        ranks: They, ascending.
        num_parts: How many of them, the first ones, sum a part: rows may differ by one in length, columns do not.
    """

    ranks: Group
    num_parts: int


def grid_lines(group: Group, rank: int, widest: int) -> list[GridLine]:
    """Return the lines of a group's grid that one of its ranks is in, in the order in which it sums along them.

    Args:
        group: Who sums.
        rank: One of it.
        widest: The most ranks of a line.
    """
    size = len(group)
    if size == 1:
        return []
    dimensions = next(number for number in count(1) if widest**number >= size)
    width = next(number for number in count(2) if number**dimensions >= size)
    num_rows = 1 if dimensions == 1 else -(-size // width)
    rows = [group[size * row // num_rows : size * (row + 1) // num_rows] for row in range(num_rows)]
    own = next(row for row in rows if rank in row)
    num_parts, place = size // num_rows, own.index(rank)
    lines = [GridLine(own, num_parts)] if len(own) > 1 else []
    if place < num_parts:
        lines += grid_lines(tuple(row[place] for row in rows), rank, widest)
    return lines


Connected = tuple[Group, Group]
"""A group that sums, and those of it that are connected to each other; or ``()``, and two ranks that are."""


def parts_to_connect(
    rank: int, world: Group, groups: Iterable[Group], pairs: Iterable[tuple[int, int]] | None
) -> list[Connected]:
    """Return what a rank connects, in an order in which nobody waits in a circle.

    Args:
        rank: The rank.
        world: All ranks.
        groups: Those that sum, in the same order on every rank.
        pairs: Ranks that send each other tensors, at least this one's; None, on all ranks, if any two may.
    """
    is_mesh = len(world) <= WIDEST or pairs is None
    own = [group for group in dict.fromkeys(groups) if rank in group]
    found: list[Connected] = [(world, world)] if is_mesh else []
    found += [(group, group) for group in own if len(group) <= WIDEST and (group, group) not in found]
    found += [(group, line.ranks) for group in own if len(group) > WIDEST for line in grid_lines(group, rank, WIDEST)]
    if pairs is not None and not is_mesh:
        found += [((), pair) for pair in in_meeting_order(pairs) if rank in pair]
    return found


class _LineMessages:
    """Messages within a line, for a thread that may wait for one until the group's timeout."""

    def __init__(self, backend: Any, ranks: Group, rank: int) -> None:
        self.rank = rank
        self._backend = backend
        self._ranks = ranks

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        return _Message(target, lambda place: self._backend.send([tensor], place, tag), self._ranks)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        return _Message(source, lambda place: self._backend.recv([tensor], place, tag), self._ranks)


class _Message:
    def __init__(self, peer: int, start: Callable[[int], Any], ranks: Group) -> None:
        self._peer = peer
        try:
            self._work = start(ranks.index(peer))
        except RuntimeError as error:
            raise CommunicationError(str(error), peer=peer) from error

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommunicationError(str(error), peer=self._peer) from error


class GridSums:
    """The sums over one group, one after another in a thread of their own, as this rank sees them.

    A thread, because what a line is to sum is known only when the one before it is done, and the worker computes
    meanwhile. It may wait for a lost message until the group's timeout; nobody has to wait for it.

    Args:
        lines: Of this rank, in their order, each with a backend of its own.
        rank: This one.
    """

    def __init__(self, lines: Sequence[tuple[GridLine, Any]], rank: int) -> None:
        self._started: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._lines = [(line, _LineMessages(backend, line.ranks, rank)) for line, backend in lines]
        self._num_started = 0
        threading.Thread(target=_serve, args=(self._started,), name="gloo-sums", daemon=True).start()
        weakref.finalize(self, self._started.put, None).atexit = False

    def start(self, values: Tensor) -> Future[None]:
        """Start to sum in place; all ranks of the group call this in the same order.

        Args:
            values: Contiguous, in host memory.

        Returns:
            What ends with the sum, or with a ``CommunicationError`` that names the peer of a message that failed.
        """
        tag = 2 * self._num_started % _NUM_TAGS
        self._num_started += 1
        done: Future[None] = Future()
        lines, flat = self._lines, values.view(-1)
        self._started.put((done, lambda: _sum_along(lines, flat, tag)))
        return done


def _sum_along(lines: Sequence[tuple[GridLine, _LineMessages]], values: Tensor, tag: int) -> None:
    if not lines:
        return
    (line, messages), *others = lines
    place = line.ranks.index(messages.rank)
    parts = [*values.tensor_split(line.num_parts), *[values[:0]] * (len(line.ranks) - line.num_parts)]
    PartsExchange(messages, parts, line.ranks, tag).reduce_scatter().wait()
    _sum_along(others, parts[place], tag)
    PartsExchange(messages, parts, line.ranks, tag + 1).all_gather().wait()


def _serve(started: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    failure = ""
    peer: int | None = None
    while (each := started.get()) is not None:
        done, run = each
        try:
            if failure:  # each further one might wait for the timeout, and keep the groups meanwhile
                raise CommunicationError(failure, peer=peer)
            run()
        except (CommunicationError, RuntimeError) as error:
            failure, peer = str(error), error.peer if isinstance(error, CommunicationError) else None
            error.__cause__ = error.__context__ = None  # by their tracebacks they would keep tensors and groups
            done.set_exception(error.with_traceback(None))
        else:
            done.set_result(None)
        del each, done, run  # the tensor is the caller's to keep
