"""Compares the copies of layer states: where two differ, a memory, a device or a script has damaged one.

In the first step of a generation, in every n-th step, and before a checkpoint is written. In a step after the gradients
and before the prepare barrier: what was damaged by then is found before anything is committed on it. In an exchange of
its own and not in the barrier's: a checkpoint has no barrier, and this one says at once whose copy is the odd one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import xxhash
from torch import Tensor

from resilient.comm import Communicator
from resilient.errors import ReplicaError
from resilient.state.fingerprint import fingerprint
from resilient.state.layer_state import LayerState
from resilient.state.sketch import NUM_SLICES, is_close, sketch
from resilient.state.witnesses import SEVERAL, Difference, find_differences, why_undecided, witness
from resilient.templates.common.byte_intervals import Piece
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
                self.odd[holder] = tuple(dict.fromkeys((*self.odd.get(holder, ()), difference.state)))
        self.own = self.odd.get(own, ())


class Replicas:
    """The copies of states that the ranks of a generation hold.

    Args:
        comm: The generation's groups.
        plan: Its plan.
        pieces: Of each state: their holders have copies of each other.
        states: This rank's, by name.
        device_name: What kind of device trains them here.
        every: Steps from one comparison to the next; 0 for the first step alone.
    """

    def __init__(
        self,
        *,
        comm: Communicator,
        plan: Plan,
        pieces: Mapping[str, Sequence[Piece]],
        states: Mapping[str, LayerState],
        device_name: str,
        every: int,
    ) -> None:
        self._comm = comm
        self._witnesses = [witness(slot.node, slot.local_rank) for slot in plan.slots]
        self._own = self._witnesses[comm.rank]
        self._shared = [(name, piece) for name, of in pieces.items() for piece in of if len(piece.holders) > 1]
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
        for name, piece in self._shared:
            if self._has(piece):
                self._states[name].origin = self._own  # equal to all others that stay: from here on it is its holder's
        if found:
            raise OddCopiesError(found, self._own)

    def _compare(self, *, exactly: bool) -> list[Difference]:
        """Find the differences, in the last bits between devices of different kinds only if ``exactly``."""
        own = [self._own_copy(name, piece) for name, piece in self._shared]
        tables = self._exchange(torch.tensor([(self._kind, 0), *own]))
        kinds = {number: int(table[0, 0]) for number, table in tables.items()}
        told = {number: table[1:].tolist() for number, table in tables.items()}
        copies = [
            {number: told[number][index][1] for number in (self._witnesses[rank] for rank in piece.holders)}
            for index, (_, piece) in enumerate(self._shared)
        ]
        unequal = [index for index, held in enumerate(copies) if len({told[each][index][0] for each in held}) > 1]

        def is_equal(index: int, name: str, one: int, other: int) -> bool:
            return told[one][index][0] == told[other][index][0]

        is_alike = is_equal
        if not exactly and any(len({kinds[number] for number in copies[index]}) > 1 for index in unequal):
            none = torch.zeros(2, NUM_SLICES, dtype=torch.float64)
            shared = [self._shared[index] for index in unequal]
            values = [
                self._states[name].values(piece.intervals) if self._has(piece) else None for name, piece in shared
            ]
            sketches = self._exchange(torch.stack([none if each is None else sketch(each) for each in values]))
            dtype = next(iter(self._states.values())).buffer.dtype

            def is_alike(index: int, name: str, one: int, other: int) -> bool:
                if kinds[one] == kinds[other]:
                    return is_equal(index, name, one, other)
                row = unequal.index(index)
                return is_close(sketches[one][row], sketches[other][row], dtype)

        return [
            difference
            for index in unequal
            for difference in find_differences({self._shared[index][0]: copies[index]}, partial(is_alike, index))
        ]

    def _has(self, piece: Piece) -> bool:
        return self._comm.rank in piece.holders

    def _sketch(self, name: str, piece: Piece) -> Tensor:
        """Return a sketch of this rank's copy of a piece; zeros where it has none."""
        if not self._has(piece):
            return torch.zeros(2, NUM_SLICES, dtype=torch.float64)
        return sketch(self._states[name].values(piece.intervals))

    def _own_copy(self, name: str, piece: Piece) -> tuple[int, int]:
        """Return fingerprint and origin of this rank's copy of a piece."""
        if not self._has(piece):
            return 0, SEVERAL
        data = self._states[name].held_bytes(piece.intervals)
        if not self._comm.on_devices:
            data = data.cpu()  # some ranks may have no GPU, and all must find the same fingerprint
        return fingerprint(data), self._states[name].origin

    def _exchange(self, own: Tensor) -> dict[int, Tensor]:
        """Return what every rank brings, by its number as a witness."""
        table = torch.zeros(self._comm.size, *own.shape, dtype=own.dtype)
        table[self._comm.rank] = own
        self._comm.all_reduce(table, tuple(range(self._comm.size))).wait()
        return dict(zip(self._witnesses, table, strict=True))
