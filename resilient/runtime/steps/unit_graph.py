"""How the stages of a pipeline hang together: who sends to whom, and what each differentiates."""

from __future__ import annotations

from collections.abc import Sequence

from resilient.templates.schedules.graph import CHAIN, Backward
from resilient.templates.template import PipelineTemplate


def borders(template: PipelineTemplate, feeds: Sequence[tuple[str, str]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages the second of which uses what the first makes, by number.

    Args:
        template: Of the pipeline.
        feeds: Which unit's features go to which later one.
    """
    lanes = [stage.lane for stage in template.stages]
    within = [(number - 1, number) for number in range(1, len(lanes)) if lanes[number] == lanes[number - 1]]
    first = {lane: lanes.index(lane) for lane in lanes}
    last = {lane: number for number, lane in enumerate(lanes)}
    between = [
        (last[source], first[target])
        for unit, fed in feeds
        for source in template.lanes
        for target in template.lanes
        if source.unit == unit and target.unit == fed
    ]
    return (*within, *between)


def stage_backwards(
    template: PipelineTemplate, trained: Sequence[bool], feeds: Sequence[tuple[str, str]]
) -> tuple[Backward, ...]:
    """Return what each stage differentiates: frozen ones only what something trained before them wants.

    Args:
        template: Of the pipeline.
        trained: Of each of the model's layers.
        feeds: Which unit's features go to which later one.
    """
    found: list[Backward] = []
    wanted: dict[str, bool] = {}  # of each unit, whether what it makes has a gradient
    for number, stage in enumerate(template.stages):
        unit = stage.lane.unit
        if number == 0 or template.stages[number - 1].lane != stage.lane:
            before = any(wanted[source] for source, target in feeds if target == unit)
        else:
            before = wanted[unit]
        own = any(trained[stage.first_layer : stage.end_layer])
        found.append(Backward.ALL if own else Backward.INPUTS if before else Backward.NONE)
        wanted[unit] = own or before
    assert all(unit in wanted or unit == CHAIN.unit for unit, _ in feeds), "units come before those that they feed"
    return tuple(found)
