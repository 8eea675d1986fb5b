"""How the stages of a pipeline hang together: who sends to whom, what each differentiates, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

from resilient.planners.costs.samples import LLM
from resilient.planners.pipelines.decision import decision_of, encoders_come_first
from resilient.templates.schedules.graph import CHAIN, Backward, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.schedules.unit_generator import generate_units
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


def step_schedule(
    template: PipelineTemplate,
    cells: StepCells,
    backwards: Sequence[Backward],
    states: Sequence[Sequence[int]] | None = None,
    *,
    split: bool = False,
) -> Schedule:
    """Return what the rows of a pipeline do in a step.

    Args:
        template: Of the pipeline.
        cells: Of the step.
        backwards: What each stage differentiates.
        states: Per stage, the indices of the states whose gradients are summed; None for no sums.
        split: Whether backwards for the weights stand apart.
    """
    stages: dict[LaneName, list[int]] = {}
    for number, stage in enumerate(template.stages):
        stages.setdefault(stage.lane, []).append(number)
    lanes = tuple(
        UnitLane(
            name=lane,
            rows=tuple(template.row_of[number] for number in stages[lane]),
            cells=tuple(cells.samples[lane]),
            backwards=tuple(backwards[number] for number in stages[lane]),
        )
        for lane in template.lanes
    )
    decision = decision_of(template)
    return generate_units(
        StepGraph(lanes=lanes, flows=cells.flows, num_rows=len(template.rows)),
        pace=LLM,
        lead=decision.lead,
        split=split,
        apart=encoders_come_first(decision),
        states=states,
    )
