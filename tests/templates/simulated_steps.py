"""Templates under the simulation of 1F1B: one step, and plans against the best of all on small random jobs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from resilient.templates.common.durations import nanoseconds
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import schedule_alone
from tests.templates.search.exhaustive import all_templates

KINDS = ("equal layers", "embedding and head", "5 % noise", "uneven layers")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and the pipeline of it that is looked at."""

    problem: PlanningProblem
    num_nodes: int
    num_microbatches: int


def random_case(kind: str, seed: int) -> Case:
    """Make a job of 3 to 8 layers on 1 to 4 nodes of 1, 2 or 4 devices; larger degrees lose up to half.

    Half of the jobs have fast links, half slow ones; half of them sum gradients with a second pipeline; a third have
    so little memory that most stages must checkpoint.
    """
    draw = random.Random(f"{kind} {seed}")
    devices = draw.choice([1, 2, 4])
    degrees = tuple(degree for degree in (1, 2, 4) if degree <= devices)
    num_nodes = draw.randint(1, 4 if devices < 4 else 3)
    num_layers = draw.randint(max(3, num_nodes), 8)
    losses = {1: 1.0, 2: draw.uniform(1.02, 1.2), 4: draw.uniform(1.1, 1.5)}
    ratio = draw.uniform(0.8, 1.2)
    factors = [_factor(draw, kind, i, num_layers) for i in range(num_layers)]
    layers = tuple(
        LayerProfile(
            name=f"l{i}",
            costs=tuple(
                LayerCost(
                    forward_ms=factor * losses[degree] / degree,
                    backward_input_ms=ratio * factor * losses[degree] / degree,
                    backward_weight_ms=0.9 * factor * losses[degree] / degree,
                    activation_bytes=8000 // degree,
                )
                for degree in degrees
            ),
            parameter_bytes=1000,
            gradient_bytes=1000,
            input_bytes=1000,
            input_gradient=i > 0,
        )
        for i, factor in enumerate(factors)
    )
    second, slow = draw.random() < 0.5, draw.random() < 0.5
    num_microbatches = draw.choice([4, 8, 16, 32])
    problem = PlanningProblem(
        profile=ModelProfile(layers=layers, tp_degrees=degrees),
        num_microbatches=(1 + second) * num_microbatches,
        cluster=Cluster(
            devices_per_node=devices,
            memory_bytes=22_000 if draw.random() < 1 / 3 else None,
            intra_node=Link(latency_ms=0.03 if slow else 0.002),
            inter_node=Link(latency_ms=0.02, bytes_per_s=1e7 if slow else 1e8),
        ),
        max_failures=int(second),
        min_pipeline_nodes=num_nodes,
    )
    return Case(problem=problem, num_nodes=num_nodes, num_microbatches=num_microbatches)


def _factor(draw: random.Random, kind: str, index: int, num_layers: int) -> float:
    if kind == "5 % noise":
        return draw.uniform(0.95, 1.05)
    if kind == "uneven layers":
        return draw.uniform(0.3, 2.0)
    if kind == "embedding and head" and index in (0, num_layers - 1):
        return draw.uniform(0.3, 1.5) if index else 0.1
    return 1.0


def ratio_to_best(case: Case) -> float | None:
    """Return the simulated step of the plan in terms of the shortest of all templates'; None if there is none."""
    alone = case.problem.max_failures == 0
    every = list(all_templates(case.problem, case.num_nodes))
    if not every:
        return None
    templates = plan_templates(case.problem, case.num_nodes * (2 - alone))
    planned = templates.best(case.num_nodes, case.num_microbatches, alone=alone)
    if alone:
        planned, *every = (replace(template, sync_ms=0.0) for template in (planned, *every))
    return _simulated_ns(planned, case.num_microbatches) / shortest_ns(every, case.num_microbatches)


def shortest_ns(templates: Iterable[PipelineTemplate], num_microbatches: int) -> int:
    """Return the shortest simulated step; templates that cannot reach it are not simulated."""
    shortest = 1 << 62
    bounds = [(_at_least_ns(template, num_microbatches), template) for template in templates]
    for bound, template in sorted(bounds, key=lambda pair: pair[0]):
        if bound >= shortest:
            break
        shortest = min(shortest, _simulated_ns(template, num_microbatches))
    return shortest


def _at_least_ns(template: PipelineTemplate, num_microbatches: int) -> int:
    """The slowest stage computes everything, and the first microbatch gets there and the last one back."""
    before = longest = 0.0
    for stage in template.stages:
        before += stage.send_ms
        computes = stage.forward_ms + stage.backward_ms
        longest = max(longest, before + num_microbatches * computes)
        before += computes
    return nanoseconds(longest + template.sync_ms)


def _simulated_ns(template: PipelineTemplate, num_microbatches: int) -> int:
    return simulate_template(template, num_microbatches).iteration_ns


def simulate_template(template: PipelineTemplate, num_microbatches: int) -> Timeline:
    """Run 1F1B on a template, interleaved where devices have several stages.

    Half of ``send_ms`` goes each way, and ``sync_ms`` comes after the first stage's last backward.
    """
    stages = template.stages
    states = [[0], *([] for _ in stages[1:])]
    costs = ActionCosts(
        forward_ms=[stage.forward_ms for stage in stages],
        backward_input_ms=[stage.backward_ms for stage in stages],
        transfer_ms=[stage.send_ms / 2 for stage in stages[1:]],
        reduce_ms={0: template.sync_ms},
    )
    return simulate(schedule_alone(ScheduleKind.INTERLEAVED, template, num_microbatches, states), costs)
