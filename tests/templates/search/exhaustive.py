"""All templates of small problems, one by one and in plain words: what the planner is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, product

from resilient.templates.common.durations import nanoseconds
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import PlanningProblem, Sharding
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import LATER_KINDS, SPLIT_KINDS, ScheduleKind
from resilient.templates.schedules.schedule import Action, Op
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.templates.search.stage_bytes import StageBytes, used

Ns = int


Devices = tuple[int, int]
"""Of a stage: its groups of devices, and the devices of each."""

InFlight = frozenset[tuple[int, int]]
"""At each moment the rounds that a stage holds before its backward, or the first part of it, is over, and those between
the parts; but while the second part runs."""


def all_templates(problem: PlanningProblem, num_nodes: int) -> Iterator[PipelineTemplate]:
    """Yield every template for a number of nodes that fits in memory."""
    per_node = problem.cluster.devices_per_node
    degrees = problem.profile.tp_degrees
    larger = [size for size in range(2, per_node + 1) if per_node % size == 0]
    if problem.sharding is not Sharding.ON or not larger:
        yield from templates_of_round(problem, num_nodes, 1, [(1, degree) for degree in degrees])
    for size in () if problem.sharding is Sharding.OFF else larger:
        yield from templates_of_round(problem, num_nodes, size, [(size, 1)])


def templates_of_round(
    problem: PlanningProblem, num_nodes: int, round_size: int, choices: list[Devices]
) -> Iterator[PipelineTemplate]:
    """Yield every template whose stages have one of these choices of devices."""
    layers = problem.profile.layers

    @cache
    def stage(first: int, end: int, chosen: Devices, device: int, in_flight: InFlight) -> StageSpec | None:
        return make_stage(problem, first, end, chosen, device, in_flight, round_size)

    for nodes in product(list(_splits(problem.cluster.devices_per_node, tuple(choices))), repeat=num_nodes):
        chosen = [each for node in nodes for each in node]
        devices = [groups * degree for groups, degree in chosen]
        for cuts in combinations(range(1, len(layers)), len(chosen) - 1):
            bounds = [0, *cuts, len(layers)]
            stages: list[StageSpec] = []
            for k, each in enumerate(chosen):
                count = in_flight(problem, len(chosen), k, round_size)
                made = stage(bounds[k], bounds[k + 1], each, sum(devices[:k]), count)
                if made is None:
                    break
                stages.append(made)
            else:
                sync_ms = gradient_sum_ms(problem, stages[0])
                yield PipelineTemplate(num_nodes=num_nodes, stages=tuple(stages), sync_ms=sync_ms)


def _splits(devices: int, choices: tuple[Devices, ...]) -> Iterator[tuple[Devices, ...]]:
    if devices == 0:
        yield ()
    for groups, degree in choices:
        if groups * degree <= devices:
            for others in _splits(devices - groups * degree, choices):
                yield ((groups, degree), *others)


def in_flight(problem: PlanningProblem, num_stages: int, stage: int, round_size: int) -> InFlight:
    """Return how many rounds of microbatches a stage must hold."""
    if problem.schedule in LATER_KINDS:  # whatever there are
        return frozenset({(num_stages - stage, 0)})
    most = -(-(problem.num_microbatches - problem.max_failures) // round_size)
    return moments_of_rows(problem.schedule, num_stages, most)[stage]


@cache
def moments_of_rows(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> list[InFlight]:
    """What each row of a schedule has in flight."""
    return [moments_of_row(actions) for actions in generate(kind, num_rows, num_microbatches).rows]


def moments_of_row(actions: Iterable[Action]) -> InFlight:
    """What a row has in flight while it runs one of its actions."""
    before = waiting = 0
    seen: set[tuple[int, int]] = set()
    for action in actions:
        before += action.op is Op.FORWARD
        if action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            seen.add((before, waiting))
        before -= action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        waiting += (action.op is Op.BACKWARD_INPUT) - (action.op is Op.BACKWARD_WEIGHT)
    return frozenset(seen)


def make_stage(
    problem: PlanningProblem, first: int, end: int, chosen: Devices, device: int, in_flight: InFlight, round_size: int
) -> StageSpec | None:
    """Return the stage of layers ``first .. end - 1``, or None where a device cannot hold it."""
    cluster, profile = problem.cluster, problem.profile
    groups, degree = chosen
    devices, turns = groups * degree, round_size // groups
    q = profile.tp_degrees.index(degree)
    layers = profile.layers[first:end]

    bytes_of = StageBytes(profile, first, end, groups, degree)
    splits = problem.schedule in SPLIT_KINDS
    rounds = [(before * turns, waiting * turns) for before, waiting in in_flight]
    plain = max(bytes_of.plain(*each, splits=splits) for each in rounds)
    again = max(bytes_of.again(*each) for each in rounds)
    limit = plain if cluster.memory_bytes is None else cluster.memory_bytes
    checkpointing = plain > limit
    exact = StageBytes(profile, first, end, groups, degree, rising=False)
    memory = max(exact.again(*each) if checkpointing else exact.plain(*each, splits=splits) for each in rounds)
    if checkpointing and (not problem.activation_checkpointing or again > limit):
        return None
    usable = range(sum(other <= cluster.devices_per_node for other in profile.tp_degrees) if round_size == 1 else 1)
    timeless = not any(
        nanoseconds(x.costs[k].forward_ms) or nanoseconds(x.backward_ms(k)) for x in profile.layers for k in usable
    )
    forward = backward = 0
    for layer in layers:
        gather, scatter = (
            (groups - 1) * _message(cluster.intra_node, num_bytes / devices) if num_bytes else 0
            for num_bytes in (
                sum(x.parameter_bytes for x in used(profile, layer)),
                sum(x.gradient_bytes for x in used(profile, layer)),
            )
        )
        runs = layer.trainable or layer.input_gradient
        forward += max(turns * (1 if timeless else nanoseconds(layer.costs[q].forward_ms)), gather)
        backward += max(turns * nanoseconds(layer.backward_ms(q)), runs * gather + scatter)
    if checkpointing and any(layer.trainable or layer.input_gradient for layer in layers):
        backward += forward
    per_round = turns * (exact.each_again if checkpointing else exact.each)
    send = 0
    if first > 0:
        between = device % cluster.devices_per_node == 0
        link = cluster.inter_node if between else cluster.intra_node
        cards = cluster.cards_per_node or cluster.devices_per_node
        share = max(1, groups / cards) if between else 1
        send = turns * _message(link, layers[0].input_bytes * share) * (2 if layers[0].input_gradient else 1)
    return StageSpec(
        first_layer=first,
        end_layer=end,
        node_index=device // cluster.devices_per_node,
        first_device=device % cluster.devices_per_node,
        num_devices=devices,
        shard=groups,
        recomputed_layers=len(layers) * checkpointing,
        forward_ms=forward / 1e6,
        backward_ms=backward / 1e6,
        send_ms=send / 1e6,
        memory_bytes=memory,
        max_in_flight=_most_that_fit(problem, memory, per_round, max(before for before, _ in in_flight)),
    )


def _most_that_fit(problem: PlanningProblem, planned: int, per_round: int, in_flight: int) -> int | None:
    if problem.schedule is not ScheduleKind.EAGER or problem.cluster.memory_bytes is None:
        return None
    if per_round == 0:
        return problem.num_microbatches
    return (problem.cluster.memory_bytes - (planned - in_flight * per_round)) // per_round


def gradient_sum_ms(problem: PlanningProblem, stage: StageSpec) -> float:
    """Return how long the gradients of a stage's layers take to be summed over the pipelines."""
    gradients = sum(layer.gradient_bytes for layer in problem.profile.layers[stage.first_layer : stage.end_layer])
    cards = problem.cluster.cards_per_node or problem.cluster.devices_per_node
    each = 2 * gradients / (stage.num_devices * (cards / problem.cluster.devices_per_node))
    return _message(problem.cluster.inter_node, each) / 1e6 if gradients else 0.0


def _message(link: Link, num_bytes: float) -> Ns:
    return nanoseconds(link.transfer_ms(num_bytes))
