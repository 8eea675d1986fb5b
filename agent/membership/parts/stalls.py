"""Finds out when a generation gets nowhere: no worker advances for too long.

The script's own code can hang on all workers at once, each of which is alive and says nothing; no peer is left to give
it up.
"""

from __future__ import annotations

from resilient.agent.membership.parts.context import Context
from resilient.protocol.messages import Finished, Installed, NotSaved, Saved, StepDone
from resilient.templates.plan import Plan

ADVANCES = (Installed, StepDone, Saved, NotSaved, Finished)
"""What workers say as the job advances."""

_PATIENCE = 15
"""Times what one wait of a worker for another may last, of which a step has several, or what a step is planned to."""


class Stalls:
    """Remembers when the job last advanced."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._advanced_at = 0.0

    @property
    def advanced_at(self) -> float:
        """When a worker last said that it got on, or was told what with."""
        return self._advanced_at

    def advance(self) -> None:
        """Take in that the job gets on."""
        self._advanced_at = self._context.now

    def stalled_s(self, plan: Plan, comm_timeout_s: float) -> float:
        """Return for how long no worker has advanced, if that is too long for a step; 0 otherwise."""
        stalled_s = self._context.now - self._advanced_at
        if stalled_s < _PATIENCE * comm_timeout_s:
            return 0.0
        return stalled_s if 1e3 * stalled_s >= _PATIENCE * max(plan.finish_ms) else 0.0
