"""All templates of small problems, one by one and in plain words: what the planner is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product

from resilient.templates.common.durations import nanoseconds
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate, StageSpec

Ns = int


def all_templates(problem: PlanningProblem, num_nodes: int, *, with_sync: bool) -> Iterator[PipelineTemplate]:
    """Yield every template for a number of nodes that fits in memory."""
    layers = problem.profile.layers
    devices = problem.cluster.devices_per_node

    @cache
    def stage(first: int, end: int, degree: int, device: int, in_flight: int) -> StageSpec | None:
        return make_stage(problem, first, end, degree, device, in_flight)

    for nodes in product(list(_splits(devices, problem.profile.tp_degrees)), repeat=num_nodes):
        degrees = [degree for node in nodes for degree in node]
        for cuts in combinations(range(1, len(layers)), len(degrees) - 1):
            bounds = [0, *cuts, len(layers)]
            stages: list[StageSpec] = []
            for k, degree in enumerate(degrees):
                count = in_flight(problem, len(degrees), k)
                made = stage(bounds[k], bounds[k + 1], degree, sum(degrees[:k]), count)
                if made is None:
                    break
                stages.append(made)
            else:
                sync_ms = gradient_sum_ms(problem, stages[0]) if with_sync else 0.0
                yield PipelineTemplate(num_nodes=num_nodes, stages=tuple(stages), sync_ms=sync_ms)


def _splits(devices: int, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if devices == 0:
        yield ()
    for degree in degrees:
        if degree <= devices:
            for others in _splits(devices - degree, degrees):
                yield (degree, *others)


def in_flight(problem: PlanningProblem, num_stages: int, stage: int) -> int:
    """Return how many microbatches a stage must hold."""
    most = problem.num_microbatches - problem.max_failures
    return {
        ScheduleKind.ONE_F_ONE_B: num_stages - stage,
        ScheduleKind.EAGER: num_stages - stage,
        ScheduleKind.GPIPE: most,
        ScheduleKind.ZB_H1: min(num_stages, most),
        ScheduleKind.ZB_H2: min(2 * num_stages - 1, most),
    }[problem.schedule]


def make_stage(
    problem: PlanningProblem, first: int, end: int, degree: int, device: int, in_flight: int
) -> StageSpec | None:
    """Return the stage of layers ``first .. end - 1``, or None where a device cannot hold it."""
    cluster, profile = problem.cluster, problem.profile
    q = profile.tp_degrees.index(degree)
    layers = profile.layers[first:end]
    names = {layer.name for layer in layers} | {owner for layer in layers for owner in layer.shares}
    held = sum(layer.state_bytes + layer.gradient_bytes for layer in profile.layers if layer.name in names)
    activations = [layer.costs[q].activation_bytes for layer in layers]
    plain = -(-held // degree) + in_flight * sum(activations)
    again = -(-held // degree) + in_flight * sum(layer.input_bytes for layer in layers) + max(activations)
    limit = plain if cluster.memory_bytes is None else cluster.memory_bytes
    checkpointing = plain > limit
    if checkpointing and (not problem.activation_checkpointing or again > limit):
        return None
    forward = sum(nanoseconds(layer.costs[q].forward_ms) for layer in layers)
    backward = sum(nanoseconds(layer.backward_ms(q)) for layer in layers)
    usable = range(sum(other <= cluster.devices_per_node for other in profile.tp_degrees))
    if not any(
        nanoseconds(x.costs[k].forward_ms) or nanoseconds(x.backward_ms(k)) for x in profile.layers for k in usable
    ):
        forward = len(layers)
    if checkpointing and any(layer.trainable or layer.input_gradient for layer in layers):
        backward += forward
    per_microbatch = sum(layer.input_bytes for layer in layers) if checkpointing else sum(activations)
    send = 0
    if first > 0:
        link = cluster.inter_node if device % cluster.devices_per_node == 0 else cluster.intra_node
        send = _message(link, layers[0].input_bytes) * (2 if layers[0].input_gradient else 1)
    return StageSpec(
        first_layer=first,
        end_layer=end,
        node_index=device // cluster.devices_per_node,
        first_device=device % cluster.devices_per_node,
        num_devices=degree,
        checkpointing=checkpointing,
        forward_ms=forward / 1e6,
        backward_ms=backward / 1e6,
        send_ms=send / 1e6,
        memory_bytes=again if checkpointing else plain,
        max_in_flight=_most_that_fit(problem, again if checkpointing else plain, per_microbatch, in_flight),
    )


def _most_that_fit(problem: PlanningProblem, planned: int, per_microbatch: int, in_flight: int) -> int | None:
    if problem.schedule is not ScheduleKind.EAGER or problem.cluster.memory_bytes is None:
        return None
    if per_microbatch == 0:
        return problem.num_microbatches
    return (problem.cluster.memory_bytes - (planned - in_flight * per_microbatch)) // per_microbatch


def gradient_sum_ms(problem: PlanningProblem, stage: StageSpec) -> float:
    """Return how long the gradients of a stage's layers take to be summed over the pipelines."""
    gradients = sum(layer.gradient_bytes for layer in problem.profile.layers[stage.first_layer : stage.end_layer])
    each = 2 * gradients / stage.num_devices
    return _message(problem.cluster.inter_node, each) / 1e6 if gradients else 0.0


def _message(link: Link, num_bytes: float) -> Ns:
    return nanoseconds(link.transfer_ms(num_bytes))
