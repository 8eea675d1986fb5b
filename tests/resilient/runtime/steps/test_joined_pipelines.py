"""Pipelines that share samples have one schedule, which is valid wherever each unit has its samples."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.planner import Configuration
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.validator import validate
from resilient.templates.template import PipelineTemplate, StageSpec

UNITS, NUM_LAYERS = ("vision", "audio", "llm"), 2
FEEDS = (("vision", "llm"), ("audio", "llm"))


def drawn_template(rng: Random) -> PipelineTemplate:
    """Return one or two lanes of each encoder and one of the language model, of one or two stages on any nodes."""
    num_nodes = rng.randint(1, 4)
    stages: list[StageSpec] = []
    for number, unit in enumerate(UNITS):
        first, end = number * NUM_LAYERS, (number + 1) * NUM_LAYERS
        cuts = rng.choice([(first, end), (first, first + 1, end)])
        for lane in range(1 if unit == "llm" else rng.randint(1, 2)):
            for one, other in pairwise(cuts):
                stages.append(
                    StageSpec(
                        lane=LaneName(unit, lane), first_layer=one, end_layer=other,
                        node_index=rng.randrange(num_nodes), forward_ms=1.0, backward_ms=2.0,
                    )
                )  # fmt: skip
    decision = Configuration(units={}, num_microbatches=1, lead=rng.randint(1, 2), colocated=rng.random() < 0.5)
    return PipelineTemplate(num_nodes=num_nodes, stages=tuple(stages), decision=msgspec.json.encode(decision).decode())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_features_of_each_sample_reach_the_language_model_once_in_whatever_pipeline_it_is(seed: int) -> None:
    rng = Random(seed)
    templates = [drawn_template(rng) for _ in range(2)]
    pipelines = tuple(
        Pipeline(template=each, nodes=tuple(range(each.num_nodes)), num_microbatches=2)
        for each in (rng.choice(templates) for _ in range(rng.randint(2, 4)))
    )
    trained = [rng.random() < 0.7 for _ in range(NUM_LAYERS * len(UNITS))]
    lanes = PlanLanes(Plan(pipelines=pipelines), FEEDS, trained)
    crossing = rng.random()
    places: list[list[tuple[int, int, int]]] = [[] for _ in UNITS]
    for _ in range(rng.randint(1, 12)):
        home = rng.randrange(len(pipelines))
        for unit, of_unit in zip(UNITS, places, strict=True):
            at = rng.randrange(len(pipelines)) if rng.random() < crossing else home
            numbers = [lane.number for lane in pipelines[at].template.lanes if lane.unit == unit]
            missing = unit != "llm" and rng.random() < 0.3
            of_unit.append((-1, -1, -1) if missing else (at, rng.choice(numbers), rng.randrange(3)))
    ones = torch.ones(len(UNITS), len(places[0]))
    assignment = StepAssignment(units=UNITS, places=torch.tensor(places), tokens=ones, squares=ones, longest=ones)

    def name_of(unit: int, sample: int) -> tuple[LaneName, int]:
        pipeline, lane, cell = places[unit][sample]
        return lanes.name(pipeline, LaneName(UNITS[unit], lane)), cell

    def states(stage: StageSpec) -> list[int]:
        return [layer for layer in range(stage.first_layer, stage.end_layer) if trained[layer]]

    joined = {assignment.joined(pipeline) for pipeline in range(len(pipelines))}
    assert sorted(each for of in joined for each in of) == list(range(len(pipelines)))
    arrived: dict[tuple[str, int], tuple[LaneName, int]] = {}
    for of in joined:
        cells = assignment.cells(of, lanes)
        schedule = lanes.schedule(of, cells, states, split=seed % 2 > 0)
        validate(schedule)
        graph, ranks = schedule.graph, lanes.rows(of)
        assert [ranks[row] for row in graph.row_of] == [lanes.row_of[stage] for stage in graph.stages]
        for flow, part in zip(graph.flows, graph.part_of, strict=True):
            ends = [graph.row_of[graph.end_of(graph.flow_number[flow], source)] for source in (True, False)]
            sent = [action for action in schedule.row(ends[0]) if action.op is Op.SEND_F and action.flow == flow]
            assert len(sent) == (ends[0] != ends[1])
            there = set(cells.samples[flow.target][flow.target_cell])
            for sample in set(cells.part(flow.source, flow.cell, part)) & there:
                assert (flow.source.unit, sample) not in arrived
                arrived[flow.source.unit, sample] = flow.target, flow.target_cell
    encoded = [(unit, sample) for unit in (0, 1) for sample, place in enumerate(places[unit]) if place[0] >= 0]
    assert arrived == {(UNITS[unit], sample): name_of(2, sample) for unit, sample in encoded}
