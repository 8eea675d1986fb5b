"""How a job begins: the first worker's job becomes the job, and all nodes are waited for. Part of the machine."""

from __future__ import annotations

from resilient.agent.agreement import Agreement, uncovered
from resilient.agent.changes import Changes
from resilient.agent.forming import problem_of
from resilient.agent.state import EXIT_DONE, EXIT_FAILED
from resilient.messages import JobSpec


class Starting(Changes):
    """Starts the job."""

    def _accept_job(self, job: JobSpec) -> bool:
        """Take the first worker's job as the job; False if it fits no plan or not the checkpoint."""
        settings = self.settings
        try:
            self._problem = problem_of(job, settings.workers_per_node)
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
            reason = f"num_steps must be at least the {self._version} steps of the checkpoint, got {job.num_steps}"
            self._stop(EXIT_FAILED, f"{reason}; train for more steps", None)
            return False
        lacking = uncovered(job.profile, settings.resume[1].states) if settings.resume else ()
        if settings.resume and lacking:
            reason = f"the checkpoint must hold every state of the model, {settings.resume[0]} lacks {lacking[0]!r}"
            self._stop(EXIT_FAILED, f"{reason}; resume with the script that wrote it", None)
        return not lacking

    def _begin_when_complete(self) -> None:
        """Publish the first generation once all expected nodes can be given a place, or stop if they never can."""
        live = list(self.members.values())
        done = [member.node for member in live if member.is_done]
        if not live and self._expected <= 0:
            self._stop(EXIT_FAILED, "all nodes went away before the job began; see their logs", None)
        elif done and any(member.ready for member in live):
            self._fail(done[0], "the script ended without training, while it trains on other nodes; see its log")
        elif len(live) >= self._expected and len(done) == len(live):
            self._stop(EXIT_DONE, "the script ended without training; its output is in the logs", None)
        elif self.job is not None and len(live) >= self._expected and all(member.is_ready for member in live):
            self._publish_next(Agreement(version=self._version, outcome=None, roll_forward=None, held={}))
