"""The generation in force: who has a place in it and how far each is with it, and what is committed."""

from __future__ import annotations

import math
from typing import Any

from resilient.agent.membership.next_generation.forming import NextGeneration
from resilient.agent.membership.next_generation.members import Outstanding, WorkerId
from resilient.agent.membership.parts.context import Context
from resilient.protocol.messages import StepOutcome
from resilient.state.manifest import Manifest
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.plan import Plan


class Participants:
    """Knows the plan of the generation in force, and which of its workers have installed and finished it.

    Workers without a place can take part as well, only to send states while the generation is installed.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plan: Plan | None = None
        self._installed: set[WorkerId] = set()
        self._finished: set[WorkerId] = set()
        self._senders: set[WorkerId] = set()
        self._workers: dict[int, WorkerId] = {}
        self._placed: frozenset[WorkerId] = frozenset()
        self._placed_nodes: frozenset[int] = frozenset()
        self._installing = Outstanding()
        self._main: WorkerId | None = None
        self._installed_at = float("-inf")

    @property
    def installed_at(self) -> float:
        """When a worker was last heard to have installed a generation."""
        return self._installed_at

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first generation."""
        return self._plan

    @property
    def installed(self) -> frozenset[WorkerId]:
        """Workers that have installed the generation."""
        return frozenset(self._installed)

    @property
    def finished(self) -> frozenset[WorkerId]:
        """Workers that have done the last step."""
        return frozenset(self._finished)

    @property
    def senders(self) -> frozenset[WorkerId]:
        """Workers without a place that still have states to send."""
        return frozenset(self._senders)

    @property
    def is_installed(self) -> bool:
        """Whether all who take part have installed the generation."""

        def awaited() -> set[WorkerId]:
            return (self.placed() | self._senders) - self._installed

        return not self._installing.has_any(self._is_installing, awaited)

    @property
    def is_finished(self) -> bool:
        """Whether all who have a place have done the last step."""
        return self._finished >= self.placed()

    def placed(self) -> set[WorkerId]:
        """Return the live workers that have a place."""
        return {worker for worker in self._placed if worker[0] in self._context.members}

    def has_place(self, worker: WorkerId) -> bool:
        """Return whether a worker, dead or alive, has a place."""
        return worker in self._placed

    def takes_part(self, worker: WorkerId) -> bool:
        """Return whether a worker, dead or alive, has a place, or still has states to send."""
        return worker in self._placed or worker in self._senders

    def has_rank(self, rank: int) -> bool:
        """Return whether a worker, dead or alive, has a global rank."""
        return rank in self._workers

    def is_placed(self, node: int) -> bool:
        """Return whether a node, dead or alive, has a place."""
        return node in self._placed_nodes

    def sends(self, node: int) -> bool:
        """Return whether a node without a place still has states to send."""
        return node in {sender for sender, _ in self._senders}

    def worker_at(self, rank: int) -> WorkerId:
        """Return the worker, dead or alive, of a global rank."""
        return self._workers[rank]

    @property
    def main(self) -> WorkerId:
        """The worker that speaks for the job after its last step; to be read only then."""
        assert self._main is not None
        return self._main

    def is_main(self, worker: WorkerId) -> bool:
        """Return whether a worker speaks for the job after its last step; nobody does before."""
        return worker == self._main

    def choose_main(self) -> None:
        """Have a live worker speak for the job: the first of the plan, as it did in training, if it is one."""
        assert self._plan is not None
        placed = self.placed()
        in_order = [(slot.node, slot.local_rank) for slot in self._plan.slots]
        standing_by = [worker for worker in self._context.ready_workers() if self._context.members[worker[0]].admitted]
        self._main = next(worker for worker in (*in_order, *standing_by) if worker in placed or worker in standing_by)

    def enter(self, formed: NextGeneration) -> None:
        """Go over to the next generation, that nobody has installed yet."""
        self._plan, self._senders = formed.plan, set(formed.senders)
        self._workers = {rank: worker for worker, rank in formed.ranks.items()}
        self._placed = frozenset((slot.node, slot.local_rank) for slot in formed.plan.slots)
        self._placed_nodes = frozenset(formed.plan.nodes)
        self._installed, self._finished = set(), set()

    def leave(self) -> None:
        """Note that the generation is no longer installed: its states are about to be saved for the last time."""
        self._installed = set()

    def stop_sending(self) -> None:
        """Count on no copies any more: all have arrived, or the generation is given up."""
        self._senders = set()

    def _is_installing(self, worker: WorkerId) -> bool:
        is_alive_at_its_place = worker in self._placed and worker[0] in self._context.members
        return (is_alive_at_its_place or worker in self._senders) and worker not in self._installed

    def note_installed(self, worker: WorkerId) -> None:
        """Take in that a worker has installed the generation."""
        self._installed.add(worker)
        self._installed_at = self._context.now

    def note_finished(self, worker: WorkerId) -> None:
        """Take in that a worker has done the last step."""
        self._finished.add(worker)


def step_fields(outcome: StepOutcome) -> dict[str, Any]:
    """Return what the event log says of a step's outcome; what is no finite number is null, as JSON has none."""
    losses = {unit: _or_null(loss) for unit, loss in outcome.losses.items()}
    return {
        "step": outcome.step,
        "loss": _or_null(outcome.loss),
        **({"losses": losses} if losses else {}),
        "grad_norm": _or_null(outcome.grad_norm),
        "skipped": not outcome.is_finite,
    }


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Progress:
    """Counts the committed steps, the skipped ones among them, and tells work done again from work done first."""

    def __init__(self, resumed: Manifest | None) -> None:
        self._version = resumed.step if resumed else 0
        self._skipped = resumed.skipped if resumed else NONE_SKIPPED
        self._outcome: StepOutcome | None = None
        self._redoing = False

    @property
    def version(self) -> int:
        """The step that the generation in force began from."""
        return self._version

    @property
    def outcome(self) -> StepOutcome | None:
        """Of the last committed step; None when none was seen to be."""
        return self._outcome

    @property
    def step(self) -> int:
        """The last committed step known."""
        return self._outcome.step if self._outcome else self._version

    @property
    def skipped(self) -> SkippedSteps:
        """Steps that were skipped up to the last committed one."""
        return self._outcome.skipped if self._outcome else self._skipped

    @property
    def redoing(self) -> bool:
        """Whether a step was begun, dropped and not committed since."""
        return self._redoing

    def commit(self, outcome: StepOutcome) -> None:
        """Take in that a step was committed."""
        self._outcome, self._redoing = outcome, False

    def enter(self, formed: NextGeneration, *, begun: bool) -> None:
        """Go on from where the next generation begins; ``begun``: somebody has begun the step after it before."""
        self._redoing = begun or (self._redoing and formed.version <= self._version)
        self._version, self._skipped = formed.version, formed.skipped
        if formed.lost:
            self._outcome = None  # the job goes back behind what was seen
        elif formed.roll_forward is not None:
            self._outcome = formed.roll_forward

    def settle(self, version: int, roll_forward: StepOutcome | None) -> None:
        """Stay at this step: it is what the last checkpoint is written of."""
        self._version, self._outcome = version, roll_forward or self._outcome
