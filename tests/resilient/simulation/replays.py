"""Small jobs and traces with round numbers, for the tests of replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilient.simulation.availability.traces import AvailabilityChange, AvailabilityTrace
from resilient.simulation.replay.outcome import ReplayOutcome
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.template import PipelineTemplate, StageSpec, TemplateSet

GIB = 2**30


def trace(*changes: tuple[int, Sequence[int], Sequence[int]], end_s: int) -> AvailabilityTrace:
    """Changes as (seconds, joined, lost)."""
    return AvailabilityTrace(
        name="t",
        changes=tuple(
            AvailabilityChange(time_ms=1000 * time, joined=tuple(joined), lost=tuple(lost))
            for time, joined, lost in changes
        ),
        end_ms=1000 * end_s,
    )


def template(*stages_s: tuple[float, float]) -> PipelineTemplate:
    """A node for each stage, which takes these seconds forward and backward."""
    return PipelineTemplate(
        num_nodes=len(stages_s),
        stages=tuple(
            StageSpec(
                first_layer=i, end_layer=i + 1, node_index=i, forward_ms=1e3 * forward, backward_ms=1e3 * backward
            )
            for i, (forward, backward) in enumerate(stages_s)
        ),
    )


def templates(smallest: int, largest: int) -> TemplateSet:
    """Equal stages; a microbatch takes 12 s in all, a third of it forward."""
    layouts = tuple((template(*[(4 / n, 8 / n)] * n),) for n in range(smallest, largest + 1))
    return TemplateSet(problem_digest="", layouts=layouts)


def job(
    num_layers: int,
    layer_s: float,
    num_microbatches: int,
    *,
    state_bytes: int = 0,
    link: Link | None = None,
    **kwargs: Any,
) -> PlanningProblem:
    """Equal layers; ``kwargs`` are those of :class:`PlanningProblem`."""
    cost = LayerCost(forward_ms=layer_s * 400, backward_input_ms=layer_s * 300, backward_weight_ms=layer_s * 300)
    return PlanningProblem(
        profile=ModelProfile(
            layers=tuple(
                LayerProfile(name=f"l{i}", costs=(cost,), parameter_bytes=state_bytes) for i in range(num_layers)
            )
        ),
        num_microbatches=num_microbatches,
        cluster=Cluster(inter_node=link or Link()),
        **kwargs,
    )


def split_s(outcome: ReplayOutcome) -> dict[str, float]:
    """Node-seconds of each part; parts without time are left out. They add up to what there is."""
    assert sum(outcome.split_ns.values()) == outcome.node_ns
    return {part: part_ns / 1e9 for part, part_ns in outcome.split_ns.items() if part_ns}
