"""Small jobs with round numbers, and random ones, for the tests of planning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.composition.batch_split import Lines, finish_ns, split_microbatches
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import Holdings, Pipeline, Plan, PlanningProblem, Sharding
from resilient.templates.replan.placement import Targets
from resilient.templates.replan.repair import NEW, repairs
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.template import PipelineTemplate, StageSpec, TemplateSet

MIB = 2**20


def targets_of(pipelines: Sequence[tuple[PipelineTemplate, int]]) -> Targets:
    """Pipelines to be made, by their layout and the pipeline that they continue."""
    layouts = [layout for layout, _ in pipelines]
    first = {id(layout): number for number, layout in reversed([*enumerate(layouts)])}
    numbers = np.array([first[id(layout)] for layout in layouts], dtype=np.int64)
    return Targets(layouts, numbers, np.array([continues for _, continues in pipelines], dtype=np.int64))


def repairs_of(plan: Plan, nodes: Iterable[int], sizes: range, **limits: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """The repairs of a plan with the nodes that are live.

    Their kinds, and of each pipeline what it continues (None of a new one) and its size.
    """
    live = set(nodes)
    left, wanted = (
        np.array(each, dtype=np.int64)
        for each in zip(*((len(live & {*p.nodes}), len(p.nodes)) for p in plan.pipelines), strict=True)
    )
    return [
        (
            kind,
            tuple(
                (None if index == NEW else index, size) for index, size in zip(of.tolist(), is_.tolist(), strict=True)
            ),
        )
        for kind, of, is_ in repairs(left, wanted, len(live) - int(left.sum()), sizes, **limits)
    ]


KINDS = (
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.EAGER,
    ScheduleKind.SPLIT,
    ScheduleKind.ZB_H1,
    ScheduleKind.ZB_H2,
    ScheduleKind.GPIPE,
)
"""Schedules with one stage for each device."""


def profile(
    times_ms: Sequence[float],
    state_bytes: int = MIB,
    shares: dict[int, tuple[int, ...]] | None = None,
    tp_degrees: tuple[int, ...] = (1,),
    activation_bytes: int = 0,
    input_bytes: int = 0,
) -> ModelProfile:
    """Layers l0, l1, ... that compute for the given times, a third of it forward; ``shares``: layer -> owners.

    A degree d divides times and activations by d. A third of the state are parameters, the gradients are as large.
    """
    return ModelProfile(
        layers=tuple(
            layer(
                i,
                [cost(ms / degree, activation_bytes // degree) for degree in tp_degrees],
                state_bytes,
                input_bytes,
                (shares or {}).get(i, ()),
            )
            for i, ms in enumerate(times_ms)
        ),
        tp_degrees=tp_degrees,
    )


def cost(ms: float, activation_bytes: int = 0, deferred_bytes: int = 0) -> LayerCost:
    """A third each for the forward, the input's gradient and the parameters' gradient."""
    return LayerCost(
        forward_ms=ms / 3,
        backward_input_ms=ms / 3,
        backward_weight_ms=ms - 2 * (ms / 3),
        activation_bytes=activation_bytes,
        deferred_bytes=deferred_bytes,
    )


def layer(
    index: int, costs: Sequence[LayerCost], state_bytes: int, input_bytes: int = 0, owners: tuple[int, ...] = ()
) -> LayerProfile:
    """Layer l<index>, trainable."""
    return LayerProfile(
        name=f"l{index}",
        costs=tuple(costs),
        parameter_bytes=state_bytes // 3,
        optimizer_bytes=state_bytes - state_bytes // 3,
        gradient_bytes=state_bytes // 3,
        input_bytes=input_bytes,
        shares=tuple(f"l{owner}" for owner in owners),
    )


def template(*stages_ms: float, num_nodes: int | None = None, sync_ms: float = 0.0, shard: int = 1) -> PipelineTemplate:
    """A template with one layer for each stage time, and one node unless ``num_nodes`` says else."""
    nodes = len(stages_ms) if num_nodes is None else num_nodes
    return PipelineTemplate(
        num_nodes=nodes,
        stages=tuple(
            StageSpec(
                first_layer=i,
                end_layer=i + 1,
                node_index=i * nodes // len(stages_ms),
                first_device=(i - -(-(i * nodes // len(stages_ms)) * len(stages_ms) // nodes)) * shard,
                num_devices=shard,
                shard=shard,
                forward_ms=ms / 3,
                backward_ms=ms - ms / 3,
            )
            for i, ms in enumerate(stages_ms)
        ),
        sync_ms=sync_ms,
    )


def template_set(*layouts: Sequence[PipelineTemplate] | PipelineTemplate) -> TemplateSet:
    """Templates of consecutive sizes: for each either its only layout or all of them."""
    return TemplateSet(
        problem_digest="",
        layouts=tuple((of,) if isinstance(of, PipelineTemplate) else tuple(of) for of in layouts),
    )


def step_ns(pipelines: Sequence[Lines], num_microbatches: int) -> int:
    """The time of one step under the best split, in whole nanoseconds."""
    return max(map(finish_ns, pipelines, split_microbatches(pipelines, num_microbatches)))


def layout(plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """Each pipeline's nodes and number of microbatches."""
    return [(pipeline.nodes, pipeline.num_microbatches) for pipeline in plan.pipelines]


def survivors(problem: PlanningProblem, before: Plan, after: Plan) -> Holdings:
    """What the ranks of ``after`` whose worker was in ``before`` held there."""
    had = {(slot.node, slot.local_rank): slot.intervals(problem.profile) for slot in before.slots}
    held: dict[str, dict[int, ByteIntervals]] = {each.name: {} for each in problem.profile.layers}
    for slot in after.slots:
        for state, intervals in had.get((slot.node, slot.local_rank), {}).items():
            held[state][slot.rank] = intervals
    return held


def whole_states(problem: PlanningProblem, held: Mapping[str, Iterable[int]]) -> Holdings:
    """These ranks hold these states whole."""
    layers = {layer.name: layer for layer in problem.profile.layers}
    return {state: dict.fromkeys(ranks, layers[state].whole) for state, ranks in held.items()}


_LINKS = st.sampled_from([Link(), Link(latency_ms=0.05), Link(latency_ms=0.2, bytes_per_s=1e9)])
_DEVICES_AND_DEGREES = [(1, (1,)), (2, (1,)), (2, (1, 2)), (2, (2,)), (4, (1, 2, 4)), (4, (2, 4))]


@st.composite
def problems(draw: st.DrawFn, min_layers: int = 1, max_degree: int = 4) -> PlanningProblem:
    """Random jobs: uneven layers, tied states, frozen layers, several degrees, memory limits, slow links, sharding.

    Every one can be planned on :func:`enough_nodes` nodes; some need more than (f + 1) x ``min_pipeline_nodes``.
    """
    devices, degrees = draw(st.sampled_from([case for case in _DEVICES_AND_DEGREES if case[1][-1] <= max_degree]))
    min_pipeline_nodes = draw(st.integers(1, 3 if devices < 4 else 2))
    max_failures = draw(st.integers(0, 2))
    smallest = max(min_layers, min_pipeline_nodes * devices)
    sizes = draw(st.lists(st.integers(0, 10 * MIB), min_size=smallest, max_size=max(12, smallest)))
    times = draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    tied = draw(st.booleans())
    whole = ModelProfile(
        layers=tuple(
            layer(
                i,
                [cost(ms * (1 + 0.1 * (degree > 1)) / degree, 3 * MIB // degree, MIB // degree) for degree in degrees],
                size,
                input_bytes=MIB,
                owners=(0,) if tied and i and i == len(sizes) - 1 else (),
            )
            for i, (ms, size) in enumerate(zip(times, sizes, strict=True))
        ),
        tp_degrees=degrees,
    )
    frozen = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) // 2))
    return PlanningProblem(
        profile=whole.frozen([f"l{i}" for i in frozen]) if frozen else whole,
        num_microbatches=draw(st.integers(max_failures + 1, 24)),
        cluster=Cluster(
            devices_per_node=devices,
            memory_bytes=draw(st.none() | st.integers(1, 4).map(lambda times: times * _enough_memory(whole))),
            intra_node=draw(_LINKS),
            inter_node=draw(_LINKS),
        ),
        max_failures=max_failures,
        min_pipeline_nodes=min_pipeline_nodes,
        activation_checkpointing=draw(st.booleans()),
        sharding=draw(st.sampled_from((Sharding.OFF, Sharding.AUTO)))
        if max_degree > 1 and degrees[0] == 1
        else Sharding.OFF,
    )


def _enough_memory(profile: ModelProfile) -> int:
    """Memory that holds any three layers, a tied state beside them, and their activations of all microbatches."""
    states = max(each.state_bytes + each.gradient_bytes for each in profile.layers)
    kept = max(c.activation_bytes + c.deferred_bytes + each.input_bytes for each in profile.layers for c in each.costs)
    return 4 * states + 3 * len(profile.layers) * kept


def enough_nodes(problem: PlanningProblem) -> int:
    """A number of nodes on which f + 1 pipelines hold the model, whatever :func:`problems` drew."""
    deepest = len(problem.profile.layers) // problem.cluster.devices_per_node
    return (problem.max_failures + 1) * max(problem.min_pipeline_nodes, deepest)


def cut(*ends: int, degree: int = 1, devices: int = 1) -> PipelineTemplate:
    """A template with stages that end before these layers, of ``degree`` devices each, ``devices`` to a node."""
    return PipelineTemplate(
        num_nodes=len(ends) * degree // devices,
        stages=tuple(
            StageSpec(
                first_layer=first,
                end_layer=end,
                node_index=i * degree // devices,
                first_device=i * degree % devices,
                num_devices=degree,
                forward_ms=(end - first) / degree / 3,
                backward_ms=(end - first) / degree - (end - first) / degree / 3,
            )
            for i, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
        ),
    )


def plan_of(*pipelines: tuple[PipelineTemplate, Sequence[int]]) -> Plan:
    """A plan of these templates on these nodes, with one microbatch each."""
    return Plan(
        pipelines=tuple(Pipeline(template=of, nodes=tuple(nodes), num_microbatches=1) for of, nodes in pipelines)
    )


def schedule_alone(
    kind: ScheduleKind, template: PipelineTemplate, num_microbatches: int, states: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Return what a template's pipeline runs where it is the only one."""
    pipeline = Pipeline(template=template, nodes=tuple(range(template.num_nodes)), num_microbatches=num_microbatches)
    return Plan(pipelines=(pipeline,), schedule_kind=kind).schedule(0, states)
