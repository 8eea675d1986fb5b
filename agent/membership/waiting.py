"""What is waited for no longer: a step, reports, the last checkpoint. Part of the membership machine.

The script's own code can hang on all workers at once, each of which is alive and says nothing; no peer is left to give
it up. What a worker hangs in, it shows in its log, at the agent's request, before it is given up.
"""

from __future__ import annotations

from resilient.agent.membership.events import Tell
from resilient.agent.membership.members import log_path
from resilient.agent.membership.starting import Starting
from resilient.agent.membership.state import Change, Phase
from resilient.protocol.messages import Finished, Installed, NotSaved, Saved, ShowStacks, StepDone

ADVANCES = (Installed, StepDone, Saved, NotSaved, Finished)
"""What workers say as the job advances."""

_PATIENCE = 15
"""Times what one wait of a worker for another may last, of which a step has several, or what a step is planned to."""


class Waiting(Starting):
    """Gives up what has taken too long."""

    def _notice_stall(self) -> None:
        """Have all workers report when none has advanced for too long: who hangs does not."""
        for_step = self._change.at_boundary if self._change else self.phase in (Phase.INSTALLING, Phase.RUNNING)
        if not for_step:
            return
        assert self.job is not None
        assert self.plan is not None
        stalled_s = self._now - self._advanced_at
        if stalled_s < _PATIENCE * self.job.comm_timeout_s:
            return
        planned_ms = max(pipeline.template.iteration_ms(pipeline.num_microbatches) for pipeline in self.plan.pipelines)
        if 1e3 * stalled_s >= _PATIENCE * planned_ms:
            self._begin_failure([], f"no step done for {stalled_s:.0f} s")
            assert self._change is not None
            self._change.stalled_s = stalled_s
            self._change.deadline = min(self._change.deadline, self._now + self.job.comm_timeout_s)

    def _silent(self, change: Change) -> dict[int, str]:
        """Return the nodes whose reports are waited for no longer, and why; halfway there they show their stacks.

        Never both at one tick: the stacks must be written before the node goes.
        """
        silent = sorted(self.awaiting)
        if not change.stacks_shown:
            if self._now >= (change.began + change.deadline) / 2:
                change.stacks_shown = True
                self._out += [Tell(node=node, message=ShowStacks(local_rank=rank)) for node, rank in silent]
            return {}
        if self._now < change.deadline:
            return {}
        stalled = f"no step done for {change.stalled_s:.0f} s, " if change.stalled_s else ""
        cause = f"{stalled}no report within {self._now - change.began:.0f} s; where it hangs is at the end of"
        logs = {worker: log_path(self.settings.run_directory, worker) for worker in silent}
        return {
            node: f"{cause} {' and '.join(str(log) for worker, log in logs.items() if worker[0] == node)}"
            for node in dict.fromkeys(node for node, _ in silent)
        }
