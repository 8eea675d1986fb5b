"""The schedule of a job that leaves it to be chosen: the one whose first plan takes the shortest step in simulation.

Plans are made with each, on the nodes and within the memory of the job. What they expect of a step is a formula of each
kind, made to choose among templates of this kind; so that kinds can be compared, a step of each plan is run by
:mod:`resilient.templates.schedules.simulator`, with what the profile says of layers and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Pipeline, Plan, PlanningProblem, Sharding
from resilient.templates.replan.replan import first_plan, prepare, templates_for
from resilient.templates.schedules.kind import INTERLEAVED_KINDS, ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.stage_times import stage_times

CHOOSABLE_KINDS = (
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.SPLIT,
    ScheduleKind.EAGER,
    ScheduleKind.ZB_H1,
    ScheduleKind.ZB_H2,
    ScheduleKind.ZB_V,
    *INTERLEAVED_KINDS[::-1],
)
"""Those that are simulated, plain ones first. gpipe is not: it takes as long as 1f1b, in more memory."""

_WORTH = 0.99
"""Of the time of plainer schedules another one takes at most so much: what the simulation leaves out is no less."""


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """A schedule, and how long a step of the first plan with it takes in simulation.

    Args:
        schedule: Its kind.
        num_chunks: Stages of each device.
        step_ms: The step, with the gradient sum.
    """

    schedule: ScheduleKind
    num_chunks: int
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """The schedule that was chosen, and what else could have been.

    Args:
        chosen: The schedule to plan with.
        others: That the job could run, the fastest first.
    """

    chosen: SimulatedSchedule
    others: tuple[SimulatedSchedule, ...]

    def of(self, problem: PlanningProblem) -> PlanningProblem:
        """Return a problem with this schedule."""
        return replace(problem, schedule=self.chosen.schedule, num_chunks=self.chosen.num_chunks)


def choose_schedule(problem: PlanningProblem, num_nodes: int, most_chunks: int) -> ScheduleChoice:
    """Choose the schedule of a job.

    A schedule that needs more nodes than 1f1b, for its memory or its stages, is none to choose: the job would have to
    stop sooner. One that is less than 1 % faster than a plainer one is not chosen either.

    Args:
        problem: The job, with whatever schedule.
        num_nodes: That it begins with.
        most_chunks: The most stages that a device may have.

    Raises:
        TooFewNodes: Not enough for f + 1 pipelines.
        ValueError: No number of nodes holds the model; the message says what to change.
    """
    plainest = replace(problem, schedule=ScheduleKind.ONE_F_ONE_B, num_chunks=1)
    fewest = templates_for(plainest, num_nodes).sizes.start
    found = [_simulated(plainest, num_nodes)]
    chosen = found[0]
    for candidate in _other_candidates(plainest, most_chunks):
        try:
            if templates_for(candidate, num_nodes).sizes.start > fewest:
                continue
            found.append(_simulated(candidate, num_nodes))
        except ValueError:  # too few layers, or too little memory
            continue
        if found[-1].step_ms <= _WORTH * chosen.step_ms:
            chosen = found[-1]
    others = sorted((each for each in found if each is not chosen), key=lambda each: each.step_ms)
    return ScheduleChoice(chosen=chosen, others=tuple(others))


def choose_and_prepare(problem: PlanningProblem, num_nodes: int, most_chunks: int) -> ScheduleChoice | None:
    """Choose a schedule, unless ``most_chunks`` is 0, and :func:`prepare` plans with it; with the errors of both."""
    choice = choose_schedule(problem, num_nodes, most_chunks) if most_chunks else None
    prepare(choice.of(problem) if choice else problem, num_nodes)
    return choice


def _other_candidates(problem: PlanningProblem, most_chunks: int) -> Iterator[PlanningProblem]:
    several = problem.profile.tp_degrees[0] == 1 and problem.sharding is Sharding.OFF
    for kind in CHOOSABLE_KINDS[1:]:
        if kind in INTERLEAVED_KINDS:
            chunks = range(2, most_chunks + 1)
        elif kind is ScheduleKind.ZB_V:
            chunks = range(2, min(2, most_chunks) + 1)
        else:
            yield replace(problem, schedule=kind)
            continue
        for num_chunks in chunks if several else ():
            yield replace(problem, schedule=kind, num_chunks=num_chunks)


def _simulated(problem: PlanningProblem, num_nodes: int) -> SimulatedSchedule:
    step_ms = simulated_step_ms(first_plan(problem, range(num_nodes)), problem.profile)
    return SimulatedSchedule(schedule=problem.schedule, num_chunks=problem.num_chunks, step_ms=step_ms)


def simulated_step_ms(plan: Plan, profile: ModelProfile) -> float:
    """Return how long a step of a plan takes in simulation, with the gradient sum that no backward hides.

    Args:
        plan: Of chains.
        profile: The model's.
    """
    alike: dict[tuple[int, int], int] = {}
    for index, pipeline in enumerate(plan.pipelines):  # equal templates of a plan are often one object
        alike.setdefault((id(pipeline.template), pipeline.num_microbatches), index)
    return max(_pipeline_ms(plan, index, plan.pipelines[index], profile) for index in alike.values())


def _pipeline_ms(plan: Plan, index: int, pipeline: Pipeline, profile: ModelProfile) -> float:
    stages = stage_times(pipeline.template, profile)
    costs = ActionCosts(
        forward_ms=[stage.forward_ms for stage in stages],
        backward_input_ms=[stage.backward_input_ms for stage in stages],
        backward_weight_ms=[stage.backward_weight_ms for stage in stages],
        transfer_ms=[stage.send_ms for stage in stages[1:]],
    )
    sync_ms = pipeline.template.lone_sync_ms if len(plan.pipelines) == 1 else pipeline.template.sync_ms
    return simulate(plan.schedule(index), costs).iteration_ms + sync_ms
