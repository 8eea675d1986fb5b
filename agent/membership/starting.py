"""How a job begins: the first worker's job becomes the job, and all nodes are waited for. Part of the machine."""

from __future__ import annotations

from resilient.agent.membership.agreement import Agreement
from resilient.agent.membership.changes import Changes
from resilient.agent.membership.forming import problem_of
from resilient.agent.membership.members import log_path
from resilient.agent.membership.state import EXIT_DONE, EXIT_FAILED
from resilient.errors import CheckpointError
from resilient.protocol.messages import JobSpec
from resilient.state.manifest import check_recipe


class Starting(Changes):
    """Starts the job."""

    def _accept_job(self, job: JobSpec) -> bool:
        """Take the first worker's job as the job; False if it fits no plan or not the checkpoint."""
        settings = self.settings
        try:
            self._problem = problem_of(job, settings.workers_per_node, settings.network, settings.failure_interval_s)
        except ValueError as error:
            self._stop(EXIT_FAILED, str(error), None)
            return False
        self.job = job
        self._record(
            "job",
            script=settings.script,
            arguments=list(settings.arguments),
            num_nodes=settings.num_nodes,
            workers_per_node=settings.workers_per_node,
            max_failures=job.max_failures,
            min_pipeline_nodes=job.min_pipeline_nodes,
            global_batch=job.global_batch,
            microbatch=job.microbatch,
            num_steps=job.num_steps,
            num_layers=len(job.profile.layers),
            layers=[layer.name for layer in job.profile.layers],
        )
        if self._version > job.num_steps:
            reason = f"num_steps must be at least {self._version}, the checkpoint's, got {job.num_steps}"
            self._stop(EXIT_FAILED, f"{reason}; train for more steps", None)
            return False
        if settings.resume is None:
            return True
        try:
            check_recipe(*settings.resume, job.recipe)
        except CheckpointError as error:
            self._stop(EXIT_FAILED, str(error), None)
            return False
        return True

    def _too_late(self) -> list[int]:
        """Return the nodes that are waited for no longer; say now and then, ever more rarely, who is waited for."""
        self._waiting_since = self._now if self._waiting_since is None else self._waiting_since
        waited_s = self._now - self._waiting_since
        late = [member.node for member in self.members.values() if not member.is_up]
        if waited_s >= self.settings.start_timeout_s:
            self._expected = len(self.members)
            return late
        if waited_s >= self._notice_after_s:
            num_missing = max(0, self._expected - len(self.members))
            self._record("waiting", nodes=late, num_missing=num_missing, waited_s=round(waited_s))
            self._notice_after_s *= 2
        return []

    def _begin_when_complete(self) -> None:
        """Publish the first generation once all expected nodes can be given a place, or stop if they never can."""
        live = list(self.members.values())
        done = [member.node for member in live if member.is_done]
        log = log_path(self.settings.run_directory, (done[0], 0)) if done else None
        if not live and self._expected <= 0:
            logs = f"{self.settings.run_directory}/logs"
            self._stop(EXIT_FAILED, f"all nodes went away, or did not come, before the job began; see {logs}", None)
        elif done and any(member.ready for member in live):
            self._fail(done[0], f"the script ended without training, while it trains on other nodes; see {log}")
        elif len(live) >= self._expected and len(done) == len(live):
            self._stop(EXIT_DONE, f"the script ended without Trainer.fit, so nothing is trained; see {log}", None)
        elif self.job is not None and len(live) >= self._expected and all(member.is_ready for member in live):
            self._publish_next(Agreement(version=self._version, outcome=None, roll_forward=None, held={}))
