"""The last checkpoint, which a stop waits for. Its copies were not compared since their holders left the generation.

So all who hold states, not only who writes them, tell the fingerprints of theirs, which are compared here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from resilient.agent.membership.next_generation.agreement import HeldStates
from resilient.agent.membership.next_generation.members import WorkerId
from resilient.agent.membership.parts.checkpoints import Parts
from resilient.protocol.messages import Save, Saved
from resilient.state.witnesses import (
    Difference,
    HeldCopy,
    find_differences,
    piece_name,
    state_of,
    witness,
    worker_of,
)
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals


class LastCheckpoint:
    """Collects the parts of the checkpoint that the job waits for before it stops, and the copies' fingerprints.

    Args:
        save: What workers are told, but for the states that each is to write.
        reason: Why the job stops after it.
        deadline: When it is waited for no longer.
    """

    def __init__(self, *, save: Save, reason: str, deadline: float) -> None:
        self.save = save
        self.step = save.version
        self.reason = reason
        self.deadline = deadline
        self.parts = Parts()
        self._awaiting: set[WorkerId] = set()
        self._writers: dict[str, set[WorkerId]] = {}
        self._copies: dict[str, dict[int, HeldCopy]] = {}
        self._pieces = {
            piece_name(state, part): (state, part) for state, parts in save.compared.items() for part in parts
        }

    @property
    def awaiting(self) -> frozenset[WorkerId]:
        """Workers whose answer is still to come."""
        return frozenset(self._awaiting)

    def ask(self, shares: Mapping[WorkerId, HeldStates]) -> dict[WorkerId, Save]:
        """Wait for these workers to write these states, and to tell what they hold; return what each is to be told."""
        self._awaiting |= shares.keys()
        told: dict[WorkerId, Save] = {}
        for worker, share in shares.items():
            for name in share:
                self._writers.setdefault(name, set()).add(worker)
            parts = {name: part for name, part in share.items() if part is not None}
            told[worker] = msgspec.structs.replace(self.save, states=tuple(share), parts=parts)
        return told

    def hear(self, message: Saved, worker: WorkerId) -> None:
        """Take in a worker's answer."""
        self._awaiting.discard(worker)
        self.parts.add(message, worker[0])
        for name, copy in message.held.items():
            self._copies.setdefault(name, {})[witness(*worker)] = copy

    def differences(self) -> list[Difference]:
        """Compare the copies of each state, except on devices of different kinds, which round differently."""
        copies = {
            name: {holder: copy.origin for holder, copy in held.items()}
            for name, held in self._copies.items()
            if len({copy.device for copy in held.values()}) == 1
        }

        def is_equal(name: str, one: int, other: int) -> bool:
            return self._copies[name][one].fingerprint == self._copies[name][other].fingerprint

        return find_differences(copies, is_equal)

    def drop(self, differences: Sequence[Difference]) -> dict[WorkerId, list[str]]:
        """Do without the odd copies, and without what was written of them; return which they are, by holder."""
        dropped: dict[WorkerId, list[str]] = {}
        for difference in differences:
            for worker in map(worker_of, difference.odd):
                state = state_of(difference.state)
                states = dropped.setdefault(worker, [])
                states += [] if state in states else [state]
                del self._copies[difference.state][witness(*worker)]
                if worker in self._writers[state]:
                    self.parts.take_back(self.step, state)
        return dropped

    def holders(self, names: Collection[str], live: Collection[WorkerId]) -> dict[WorkerId, HeldStates]:
        """Return what the live workers hold of these states, as far as they have told and nothing was dropped."""
        held: dict[WorkerId, dict[str, ByteIntervals | None]] = {worker: {} for worker in live}
        for name, copies in self._copies.items():
            state, part = self._pieces.get(name, (name, None))
            for worker in live if state in names else ():
                if witness(*worker) in copies:
                    states = held[worker]
                    states[state] = part if part is None else part | (states.get(state) or NO_BYTES)
        return {worker: states for worker, states in held.items() if states}
