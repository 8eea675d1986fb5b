"""Finds out when a generation gets nowhere: no worker advances for too long, or the same members regroup in vain.

The script's own code can hang on all workers at once, each of which is alive and says nothing; no peer is left to give
it up.
"""

from __future__ import annotations

from resilient.agent.membership.parts.change import Change
from resilient.agent.membership.parts.context import Context
from resilient.protocol.messages import Finished, Installed, NotSaved, Saved, StepDone
from resilient.templates.plan import Plan

ADVANCES = (Installed, StepDone, Saved, NotSaved, Finished)
"""What workers say as the job advances."""

_PATIENCE = 15
"""Times what one wait of a worker for another may last, of which a step has several, or what a step is planned to."""


class Stalls:
    """Remembers when the job last advanced, and how often its members were regrouped since."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._advanced_at = 0.0
        self._suspicions = 0

    @property
    def advanced_at(self) -> float:
        """When a worker last said that it got on, or was told what with."""
        return self._advanced_at

    @property
    def suspicions(self) -> int:
        """Regroups of the same members since the last step."""
        return self._suspicions

    @property
    def is_in_vain(self) -> bool:
        """Whether the same members have been regrouped so often that once more will not help."""
        return self._suspicions > self._context.settings.max_suspicions

    def advance(self) -> None:
        """Take in that the job gets on."""
        self._advanced_at = self._context.now

    def note_step(self) -> None:
        """Take in that a step was done: whatever was suspected before is over."""
        self._suspicions = 0

    def note_failure(self, change: Change) -> None:
        """Count a change that was not wanted, unless it was for a node that was lost."""
        self._suspicions = 0 if change.lost_nodes else self._suspicions + 1

    def stalled_s(self, plan: Plan, comm_timeout_s: float) -> float:
        """Return for how long no worker has advanced, if that is too long for a step; 0 otherwise."""
        stalled_s = self._context.now - self._advanced_at
        if stalled_s < _PATIENCE * comm_timeout_s:
            return 0.0
        planned_ms = max(pipeline.template.iteration_ms(pipeline.num_microbatches) for pipeline in plan.pipelines)
        return stalled_s if 1e3 * stalled_s >= _PATIENCE * planned_ms else 0.0


def why_in_vain(change: Change | None) -> str:
    """Return why the same members are regrouped again and again."""
    if change is not None and change.damaged:
        nodes = ", ".join(str(node) for node in sorted({node for node, _ in change.damaged}))
        return f"copies of states keep getting damaged (nodes {nodes}); check the memory of these, and leave them out"
    if change is None or not change.stalled_s:
        return "communication keeps failing between live nodes; check the network"
    return (
        f"no step is done within {change.stalled_s:.0f} s, and yet all workers answer; raise the Trainer's "
        "comm_timeout_s if steps may take that long"
    )
