"""The last checkpoint, which a stop waits for. Its copies were not compared since their holders left the generation.

So all who hold states, not only who writes them, tell the fingerprints of theirs, which are compared here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from resilient.agent.membership.next_generation.members import WorkerId
from resilient.agent.membership.parts.checkpoints import Parts
from resilient.protocol.messages import Save, Saved
from resilient.state.witnesses import Difference, HeldCopy, find_differences, witness, worker_of


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
        self._writers: dict[str, WorkerId] = {}
        self._copies: dict[str, dict[int, HeldCopy]] = {}

    @property
    def awaiting(self) -> frozenset[WorkerId]:
        """Workers whose answer is still to come."""
        return frozenset(self._awaiting)

    def ask(self, shares: Mapping[WorkerId, tuple[str, ...]]) -> dict[WorkerId, Save]:
        """Wait for these workers to write these states, and to tell what they hold; return what each is to be told."""
        self._awaiting |= shares.keys()
        self._writers |= {name: worker for worker, names in shares.items() for name in names}
        return {worker: msgspec.structs.replace(self.save, states=names) for worker, names in shares.items()}

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
                dropped.setdefault(worker, []).append(difference.state)
                del self._copies[difference.state][witness(*worker)]
                if self._writers[difference.state] == worker:
                    self.parts.take_back(self.step, difference.state)
        return dropped

    def holders(self, names: Collection[str], live: Collection[WorkerId]) -> dict[WorkerId, tuple[str, ...]]:
        """Return which of these states the live workers hold, as far as they have told and nothing was dropped."""
        held = {worker: tuple(n for n in names if witness(*worker) in self._copies.get(n, {})) for worker in live}
        return {worker: states for worker, states in held.items() if states}
