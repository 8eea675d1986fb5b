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
from itertools import chain, count

from torch import Tensor

from resilient.comm.interface import Group
from resilient.comm.parts_exchange import Messages, PartsExchange
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


@dataclass(frozen=True)
class Connections:
    """How one rank reaches others.

    Args:
        groups: Those in which all ranks are connected to each other from the start, in an order in which nobody waits
            in a circle.
        peers: Ranks that it is connected to once there is a message between the two; none where all are in one group.
    """

    groups: list[Group]
    peers: list[int]

    @property
    def ranks(self) -> list[int]:
        """All that it may be connected to."""
        return sorted({*self.peers, *chain.from_iterable(self.groups)})


def connections_of(rank: int, world: Group, groups: Iterable[Group], pairs: Iterable[tuple[int, int]]) -> Connections:
    """Return how a rank reaches others.

    Args:
        rank: The rank.
        world: All ranks.
        groups: Those that sum, in the same order on every rank.
        pairs: Ranks that may send each other tensors, at least this one's.
    """
    own = [group for group in dict.fromkeys([world, *groups]) if rank in group]
    small = [group for group in own if len(group) <= WIDEST]
    if world in small:
        return Connections(small, [])
    lines = [line.ranks for group in own if group not in small for line in grid_lines(group, rank, WIDEST)]
    return Connections(small, sorted({*chain(*lines, *(pair for pair in pairs if rank in pair))} - {rank}))


class GridSums:
    """The sums over one group, one after another in a thread of their own, as this rank sees them.

    A thread, because what a line is to sum is known only when the one before it is done, and the worker computes
    meanwhile.

    Args:
        lines: Of this rank, in their order.
        messages: Between it and others, which end when the generation is aborted.
        first_tag: From here on, 2^30 are of these sums alone.
    """

    def __init__(self, lines: Sequence[GridLine], messages: Messages, first_tag: int) -> None:
        self._started: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._lines = lines
        self._messages = messages
        self._first_tag = first_tag
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
        tag = self._first_tag + 2 * self._num_started % _NUM_TAGS
        self._num_started += 1
        done: Future[None] = Future()
        lines, messages, flat = self._lines, self._messages, values.view(-1)
        self._started.put((done, lambda: _sum_along(lines, messages, flat, tag)))
        return done


def _sum_along(lines: Sequence[GridLine], messages: Messages, values: Tensor, tag: int) -> None:
    if not lines:
        return
    line, *others = lines
    place = line.ranks.index(messages.rank)
    parts = [*values.tensor_split(line.num_parts), *[values[:0]] * (len(line.ranks) - line.num_parts)]
    PartsExchange(messages, parts, line.ranks, tag).reduce_scatter().wait()
    _sum_along(others, messages, parts[place], tag)
    PartsExchange(messages, parts, line.ranks, tag + 1).all_gather().wait()


def _serve(started: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    failure = ""
    peer: int | None = None
    while (each := started.get()) is not None:
        done, run = each
        try:
            if failure:  # the others of the line are a sum further, or behind
                raise CommunicationError(failure, peer=peer)
            run()
        except (CommunicationError, RuntimeError) as error:
            failure, peer = str(error), error.peer if isinstance(error, CommunicationError) else None
            error.__cause__ = error.__context__ = None  # by their tracebacks they would keep tensors and groups
            done.set_exception(error.with_traceback(None))
        else:
            done.set_result(None)
        del each, done, run  # the tensor is the caller's to keep
