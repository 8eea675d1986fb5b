"""Compares the copies of layer states: where two differ, a memory, a device or a script has damaged one.

In the first step of a generation, in every n-th step, and before a checkpoint is written. In a step after the gradients
and before the prepare barrier: what was damaged by then is found before anything is committed on it. In an exchange of
its own and not in the barrier's: a checkpoint has no barrier, and this one says at once whose copy is the odd one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from resilient.comm import Communicator, Group
from resilient.errors import ReplicaError
from resilient.state.fingerprint import fingerprint
from resilient.state.layer_state import LayerState
from resilient.state.sketch import NUM_SLICES, is_close, sketch
from resilient.state.witnesses import SEVERAL, Difference, find_differences, why_undecided, witness
from resilient.templates.plan import Plan


class OddCopiesError(Exception):
    """Some copies are not those of most witnesses: they are to be dropped and made anew, in another generation.

    Args:
        differences: Which, the same on all ranks.
        own: This rank, as a witness.
    """

    def __init__(self, differences: Sequence[Difference], own: int) -> None:
        super().__init__()
        self.odd: dict[int, tuple[str, ...]] = {}
        for difference in differences:
            for holder in difference.odd:
                self.odd[holder] = (*self.odd.get(holder, ()), difference.state)
        self.own = self.odd.get(own, ())


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
        self._witnesses = [witness(slot.node, slot.local_rank) for slot in plan.slots]
        self._own = self._witnesses[comm.rank]
        self._shared = {
            name: [self._witnesses[rank] for rank in ranks] for name, ranks in holders.items() if len(ranks) > 1
        }
        self._states = states
        self._kind = xxhash.xxh3_64_intdigest(device_name.encode()) >> 1
        self._every = every
        self._is_first = True

    def check_in_step(self, step: int) -> None:
        """Compare all copies, if they are to be in this step; all ranks call this before they commit it.

        Raises:
            OddCopiesError: Some differ, from most; all ranks raise it.
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
            raise ReplicaError(why_undecided(undecided, version))
        for name in self._shared.keys() & self._states.keys():
            self._states[name].origin = self._own  # equal to all others that stay: from here on it is its holder's
        if found:
            raise OddCopiesError(found, self._own)

    def _compare(self, *, exactly: bool) -> list[Difference]:
        """Find the differences, in the last bits between devices of different kinds only if ``exactly``."""
        row_of = {name: row for row, name in enumerate(self._shared, start=1)}
        states = [self._states.get(name) for name in self._shared]
        held = [(fingerprint(self._bytes(state)), state.origin) if state else (0, SEVERAL) for state in states]
        tables = self._exchange(torch.tensor([(self._kind, 0), *held]))
        told = {number: table.tolist() for number, table in tables.items()}
        unequal = {
            name: {number: told[number][row_of[name]][1] for number in holders}
            for name, holders in self._shared.items()
            if len({told[number][row_of[name]][0] for number in holders}) > 1
        }

        def is_equal(name: str, one: int, other: int) -> bool:
            return told[one][row_of[name]][0] == told[other][row_of[name]][0]

        if exactly or all(len({told[number][0][0] for number in copies}) == 1 for copies in unequal.values()):
            return find_differences(unequal, is_equal)
        none = torch.zeros(2, NUM_SLICES, dtype=torch.float64)
        drawn = [sketch(self._states[name].buffer) if name in self._states else none for name in unequal]
        sketches = self._exchange(torch.stack(drawn))
        index_of = {name: index for index, name in enumerate(unequal)}
        dtype = next(iter(self._states.values())).buffer.dtype

        def is_alike(name: str, one: int, other: int) -> bool:
            if told[one][0] == told[other][0]:
                return is_equal(name, one, other)
            return is_close(sketches[one][index_of[name]], sketches[other][index_of[name]], dtype)

        return find_differences(unequal, is_alike)

    def _bytes(self, state: LayerState) -> Tensor:
        """Return a state's bytes where all ranks find the same fingerprint of them: some may have no GPU."""
        return state.bytes if self._comm.on_devices else state.bytes.cpu()

    def _exchange(self, own: Tensor) -> dict[int, Tensor]:
        """Return what every rank brings, by its number as a witness."""
        table = torch.zeros(self._comm.size, *own.shape, dtype=own.dtype)
        table[self._comm.rank] = own
        self._comm.all_reduce(table, tuple(range(self._comm.size))).wait()
        return dict(zip(self._witnesses, table, strict=True))
