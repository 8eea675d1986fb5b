"""The job that all workers build, and for how many nodes plans of it are prepared."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resilient.agent.membership.next_generation.forming import problem_of
from resilient.agent.membership.next_generation.members import Member
from resilient.agent.membership.parts.context import Context
from resilient.agent.membership.parts.events import PreparePlans
from resilient.errors import ArgumentError
from resilient.protocol.job_config import AUTO_SCHEDULE
from resilient.protocol.messages import JobSpec, Ready
from resilient.state.manifest import check_recipe
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.schedule_choice import ScheduleChoice


class PlannedJob:
    """Takes the first worker's job as the job, and has plans of it prepared."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._spec: JobSpec | None = None
        self._states: Mapping[str, ByteIntervals] = {}
        self._problem: PlanningProblem | None = None
        self._most_chunks = 0  # of a schedule that is to be chosen; 0 where none is, or no longer
        self._planned_for = 0
        self._asked_for = 0
        self._num_unanswered = 0

    @property
    def is_known(self) -> bool:
        """Whether a worker has said what the job is."""
        return self._spec is not None

    @property
    def spec(self) -> JobSpec:
        """What the script asks for; to be read only once it is known."""
        assert self._spec is not None
        return self._spec

    @property
    def states(self) -> Mapping[str, ByteIntervals]:
        """All bytes of each layer's state, by its name."""
        return self._states

    @property
    def problem(self) -> PlanningProblem:
        """What is planned; to be read only once the job is known."""
        assert self._problem is not None
        return self._problem

    @property
    def planned_for(self) -> int:
        """Plans for up to so many nodes are prepared, or were found to be impossible."""
        return self._planned_for

    @property
    def asked_for(self) -> int:
        """Plans for up to so many nodes have been asked for."""
        return self._asked_for

    def accept(self, job: JobSpec) -> None:
        """Take the first worker's job as the job.

        Raises:
            ValueError: It fits no plan, or has fewer steps than the checkpoint to resume from.
            CheckpointError: The checkpoint to resume from is another job's.
        """
        settings = self._context.settings
        self._problem = problem_of(
            job,
            settings.workers_per_node,
            settings.network,
            settings.failure_interval_s,
            settings.sharding,
            settings.tp_degree,
        )
        self._spec = job
        self._states = {layer.name: layer.whole for layer in job.profile.layers}
        self._most_chunks = job.num_chunks if job.schedule == AUTO_SCHEDULE else 0
        self._context.record(
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
        if settings.resume is None:
            return
        saved_step = settings.resume[1].step
        if saved_step > job.num_steps:
            constraint = f"be at least {saved_step}, the checkpoint's"
            raise ArgumentError("num_steps", constraint, job.num_steps, "train for more steps")
        check_recipe(*settings.resume, job.recipe)

    def shared(self, message: Ready) -> Ready:
        """Return what a worker has said, such that equal jobs of a thousand workers are kept once."""
        if message.job is self.spec or message.job != self.spec:
            return message
        return msgspec.structs.replace(message, job=self.spec)

    def why_too_small(self, job: JobSpec) -> str:
        """Return why a worker's device cannot train what is planned for the first's; "" if it can."""
        needed, own = self.spec.memory_bytes, job.memory_bytes
        if needed is not None and own is not None and own < needed:
            return (
                f"devices must have at least {needed} bytes of memory, those of the first worker, got {own}; "
                f"start with a node of the least memory, or use equal nodes"
            )
        return ""

    def hold_back(self, member: Member, num_expected: int) -> None:
        """Keep a node from being planned with, as long as a plan for one node more would have to be computed first.

        Templates for a number of nodes never reached before can take seconds, for which neither a recovery nor the
        heartbeats may wait.

        Args:
            member: It has just come up.
            num_expected: Nodes that are planned with at least, whether they are there or not.
        """
        members = self._context.members.values()
        num_nodes = num_expected
        if len(members) > max(num_expected, self._planned_for):
            num_nodes = max(num_expected, sum(other.is_up and not other.leaving for other in members))
        member.lacks_plans = num_nodes > self._planned_for
        if num_nodes > self._asked_for and not self._num_unanswered:  # else once that is answered, for all who came
            self.ask(num_nodes)

    def ask(self, num_nodes: int) -> None:
        """Have plans prepared for up to so many nodes."""
        self._asked_for = max(self._asked_for, num_nodes)
        self._num_unanswered += 1
        wanted = PreparePlans(problem=self.problem, num_nodes=num_nodes, most_chunks=self._most_chunks)
        self._context.do(wanted)

    def take(self, num_nodes: int, choice: ScheduleChoice | None = None) -> None:
        """Plan with as many of the nodes that were held back as the plans that are now ready allow.

        Args:
            num_nodes: That plans are ready for.
            choice: The schedule that they are of, where it was to be chosen.
        """
        if choice is not None and self._most_chunks:
            self._problem, self._most_chunks = choice.of(self.problem), 0
            self._context.record("schedule", num_nodes=num_nodes, **msgspec.to_builtins(choice))
        self._planned_for = max(self._planned_for, num_nodes)
        self._num_unanswered = max(0, self._num_unanswered - 1)
        held_back = [each for each in self._context.members.values() if each.lacks_plans and not each.leaving]
        num_room = max(0, self._planned_for - len(self._context.available()))
        for member in held_back[:num_room]:
            member.lacks_plans = False
        num_nodes = self._planned_for + len(held_back) - num_room
        if num_nodes > self._asked_for and not self._num_unanswered:
            self.ask(num_nodes)
