"""The change of membership under way: who has reported, who is waited for no longer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from resilient.agent.membership.next_generation.members import WorkerId, log_path
from resilient.agent.membership.parts.context import Context
from resilient.protocol.messages import Report, ShowStacks, StepDone, WorkerProgress


class Change:
    """Collects the workers' reports for the generation being formed, and names those that miss the deadline.

    What a worker hangs in, it shows in its log, at the agent's request, before its node is given up.

    Args:
        context: Shared by all parts.
        at_boundary: The step under way is done first; otherwise it is left at once.
        cause: As the event log has it.
        deadline: When who has not reported is given up.
        before: The change that this one hurries; its reports count.
    """

    def __init__(
        self, context: Context, *, at_boundary: bool, cause: str, deadline: float, before: Change | None
    ) -> None:
        self._context = context
        self.generation = context.generation + 1
        self.at_boundary = at_boundary
        self.cause = cause
        self._began = context.now
        self._deadline = deadline
        self._reports = dict(before._reports) if before is not None else {}
        self._steps = dict(before._steps) if before is not None else {}
        self._lost_nodes = False
        self._damaged = dict(before.damaged) if before is not None else {}
        self._stalled_s = 0.0
        self._stacks_shown = False
        self._waits_until = before._waits_until if before is not None else None

    @property
    def reports(self) -> Mapping[WorkerId, WorkerProgress]:
        """What was reported by whom, but for damaged copies."""
        if not self._damaged:
            return self._reports
        return {worker: _without(self._damaged.get(worker, ()), said) for worker, said in self._reports.items()}

    def has_heard(self, worker: WorkerId) -> bool:
        """Return whether a worker has reported."""
        return worker in self._reports

    @property
    def lost_nodes(self) -> bool:
        """Whether a node was lost, in the beginning or since."""
        return self._lost_nodes

    @property
    def damaged(self) -> Mapping[WorkerId, Collection[str]]:
        """The states whose copies workers have to drop."""
        return self._damaged

    @property
    def stalled_s(self) -> float:
        """How long no step had been done when it began, if it began for that."""
        return self._stalled_s

    @property
    def waits_for_nodes(self) -> bool:
        """Whether everybody has reported, and are too few: others may come."""
        return self._waits_until is not None

    @property
    def has_waited(self) -> bool:
        """Whether no time is left for others to come."""
        return self._waits_until is not None and self._context.now >= self._waits_until

    def wait_for_nodes(self, until: float) -> None:
        """Give others until then to come; a further loss does not prolong it."""
        self._waits_until = until

    def hear(self, worker: WorkerId, report: Report) -> None:
        """Take in a report."""
        self._reports[worker] = report.progress
        self._steps.update({done.outcome.step: done for done in report.steps})

    def done(self, step: int) -> StepDone | None:
        """Return what was reported of a step that was committed."""
        return self._steps.get(step)

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """Drop what the workers of a node that is gone have reported."""
        for worker in workers:
            self._reports.pop(worker, None)

    def note_losses(self, nodes: Collection[int]) -> None:
        """Take in that nodes were lost, if any."""
        self._lost_nodes |= bool(nodes)

    def note_damage(self, damaged: Mapping[WorkerId, Collection[str]]) -> None:
        """Take in that it is for copies that these workers have to drop."""
        self._damaged.update(damaged)

    def note_stall(self, stalled_s: float, deadline: float) -> None:
        """Take in that it is for a stall: who hangs will not report."""
        self._stalled_s = stalled_s
        self.hurry(deadline)

    def hurry(self, deadline: float) -> None:
        """Wait no longer than this."""
        self._deadline = min(self._deadline, deadline)

    def silent(self, awaiting: Collection[WorkerId]) -> dict[int, str]:
        """Return the nodes whose reports are waited for no longer, and why; halfway there they show their stacks.

        Never both at one tick: the stacks must be written before the node goes.

        Args:
            awaiting: Workers that have not reported.
        """
        now, waiting = self._context.now, sorted(awaiting)
        if not self._stacks_shown:
            if now >= (self._began + self._deadline) / 2:
                self._stacks_shown = True
                for node, local_rank in waiting:
                    self._context.tell(node, ShowStacks(local_rank=local_rank))
            return {}
        if now < self._deadline:
            return {}
        stalled = f"no step done for {self._stalled_s:.0f} s, " if self._stalled_s else ""
        cause = f"{stalled}no report within {now - self._began:.0f} s; where it hangs is at the end of"
        logs = {worker: log_path(self._context.settings.run_directory, worker) for worker in waiting}
        return {
            node: f"{cause} {' and '.join(str(log) for worker, log in logs.items() if worker[0] == node)}"
            for node in dict.fromkeys(node for node, _ in waiting)
        }


def _without(names: Collection[str], progress: WorkerProgress) -> WorkerProgress:
    """Return a report that does not tell of these states."""
    if not names:
        return progress
    current, retained = (tuple(n for n in held if n not in names) for held in (progress.current, progress.retained))
    return msgspec.structs.replace(progress, current=current, retained=retained)
