"""Compares the copies of layer states: where two differ, a memory, a device or a script has damaged one.

In the first step of a generation, in every n-th step, and before a checkpoint is written. In a step after the gradients
and before the prepare barrier: what was damaged by then is found before anything is committed on it. In an exchange of
its own and not in the barrier's: a checkpoint has no barrier, and this one says at once whose copy is the odd one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import xxhash
from torch import Tensor

from resilient.comm import Communicator, Group
from resilient.errors import ReplicaError
from resilient.state.fingerprint import fingerprint
from resilient.state.layer_state import LayerState
from resilient.state.sketch import NUM_SLICES, is_close, sketch
from resilient.templates.common.words import counted
from resilient.templates.plan import Plan

_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A state of which not all copies are equal.

    Args:
        state: Its name.
        holders: The ranks that hold it.
        odd: Those whose copy is not that of most holders; none where no copy is.
    """

    state: str
    holders: Group
    odd: Group


class OddCopiesError(Exception):
    """Some copies are not those of most holders: they are to be dropped and made anew, in another generation.

    Args:
        differences: Which, the same on all ranks.
    """

    def __init__(self, differences: Sequence[Difference]) -> None:
        super().__init__()
        self._differences = differences

    def odd_of(self, rank: int) -> tuple[str, ...]:
        """Return the states whose copy a rank has to drop."""
        return tuple(difference.state for difference in self._differences if rank in difference.odd)


class Replicas:
    """The copies of states that the ranks of a generation hold.

    Args:
        comm: The generation's groups.
        plan: Its plan.
        holders: Per state, the ranks that hold it.
        states: This rank's, by name.
        device_name: What kind of device trains them here.
        every: Steps from one comparison to the next; 0 for the first step alone.
    """

    def __init__(
        self,
        *,
        comm: Communicator,
        plan: Plan,
        holders: Mapping[str, Group],
        states: Mapping[str, LayerState],
        device_name: str,
        every: int,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self._states = states
        self._kind = xxhash.xxh3_64_intdigest(device_name.encode()) >> 1
        self._every = every
        self._is_first = True

    def check_in_step(self, step: int) -> None:
        """Compare all copies, if they are to be in this step; all ranks call this before they commit it.

        Raises:
            OddCopiesError: Some differ, from most; all ranks raise the same.
            ReplicaError: Some differ, and nobody can tell which is right; likewise.
            CommunicationError: A peer is gone.
        """
        if self._is_first or (self._every and step % self._every == 0):
            self.check(step - 1)
        self._is_first = False

    def check(self, version: int) -> None:
        """Compare all copies of the states at a version; all ranks call this.

        Raises:
            OddCopiesError: As for :meth:`check_in_step`.
            ReplicaError: As for :meth:`check_in_step`.
            CommunicationError: As for :meth:`check_in_step`.
        """
        found = self._compare(exactly=version == 0) if self._shared else []
        undecided = [difference for difference in found if not difference.odd]
        if undecided:
            raise ReplicaError(self._told(undecided, version))
        if found:
            raise OddCopiesError(found)

    def _compare(self, *, exactly: bool) -> list[Difference]:
        """Find the differences, in the last bits between devices of different kinds only if ``exactly``."""
        held = [fingerprint(self._bytes(name)) if name in self._states else 0 for name in self._shared]
        kinds, *columns = self._exchange(torch.tensor([self._kind, *held])).T.tolist()
        prints = dict(zip(self._shared, columns, strict=True))
        unequal = {
            name: ranks for name, ranks in self._shared.items() if len({prints[name][rank] for rank in ranks}) > 1
        }

        def is_equal(name: str, one: int, other: int) -> bool:
            return prints[name][one] == prints[name][other]

        if exactly or all(len({kinds[rank] for rank in ranks}) == 1 for ranks in unequal.values()):
            return find_differences(unequal, is_equal)
        none = torch.zeros(2, NUM_SLICES, dtype=torch.float64)
        drawn = [sketch(self._states[name].buffer) if name in self._states else none for name in unequal]
        sketches = dict(zip(unequal, self._exchange(torch.stack(drawn)).unbind(1), strict=True))
        dtype = next(iter(self._states.values())).buffer.dtype

        def is_alike(name: str, one: int, other: int) -> bool:
            if kinds[one] == kinds[other]:
                return is_equal(name, one, other)
            return is_close(sketches[name][one], sketches[name][other], dtype)

        return find_differences(unequal, is_alike)

    def _bytes(self, name: str) -> Tensor:
        data = self._states[name].bytes
        return data if self._comm.on_devices else data.cpu()  # peers that have no GPU find another fingerprint there

    def _exchange(self, own: Tensor) -> Tensor:
        """Return what every rank brings, by rank."""
        table = torch.zeros(self._comm.size, *own.shape, dtype=own.dtype)
        table[self._comm.rank] = own
        self._comm.all_reduce(table, tuple(range(self._comm.size))).wait()
        return table

    def _told(self, undecided: Sequence[Difference], version: int) -> str:
        slots = self._plan.slots
        places = [
            f"{difference.state} on nodes {', '.join(str(slots[rank].node) for rank in difference.holders)}"
            for difference in undecided[:_MOST_NAMED]
        ]
        more = len(undecided) - len(places)
        named = "; ".join([*places, *([counted(more, "more layer")] if more else [])])
        return (
            f"all copies of a layer's state must be equal, got different ones after step {version} ({named}) and no "
            "majority to tell which is right; check the memory of these nodes, and keep three copies (max_failures=2) "
            "for most to decide"
        )


def find_differences(holders: Mapping[str, Group], is_equal: Callable[[str, int, int], bool]) -> list[Difference]:
    """Return the states of which not all copies are equal.

    Args:
        holders: Per state, the ranks that hold it.
        is_equal: Whether two ranks' copies of a state are equal.
    """
    found: list[Difference] = []
    for state, ranks in holders.items():
        largest, *others = sorted(_groups(ranks, partial(is_equal, state)), key=len, reverse=True)
        if len(largest) == len(ranks):
            continue
        is_most = 2 * len(largest) > len(ranks) and all(len(group) < len(largest) for group in others)
        odd = tuple(rank for rank in ranks if rank not in largest) if is_most else ()
        found.append(Difference(state=state, holders=ranks, odd=odd))
    return found


def _groups(ranks: Group, is_equal: Callable[[int, int], bool]) -> set[Group]:
    """Return sets of ranks all equal to each other; a rank is in two of them if it is close to ranks that are not."""
    groups: set[Group] = set()
    for one in ranks:
        group = [one]
        for other in ranks:
            if other != one and all(is_equal(other, member) for member in group):
                group.append(other)
        groups.add(tuple(sorted(group)))
    return groups
