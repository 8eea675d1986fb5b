"""What planned actions are expected to take: the curves of their stages at the lengths of their samples."""

from __future__ import annotations

import torch

from resilient.planners.costs.cost_model import CostModel, Curve, LayerCurves, UnitCosts, UnitLayer
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import Backward, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.template import PipelineTemplate, StageSpec

FEEDS = (("vision", "llm"),)
ASSIGNMENT = StepAssignment(
    units=("vision", "llm"),
    places=torch.tensor([[[0, 0, 0], [-1] * 3, [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1]]]),
    tokens=torch.tensor([[3, 0, 1], [4, 2, 5]]),
    squares=torch.tensor([[5, 0, 1], [16, 4, 25]]),
)
"""Sample 0 has images of 1 and 2 tokens, sample 1 none, sample 2 one; the first two are one cell of text."""


def layer(name: str, scale: float, *, input_gradient: bool = True) -> UnitLayer:
    curves = LayerCurves(
        forward=Curve(attention=1.0, linear=10.0, fixed=100.0) * scale,
        backward_input=Curve(linear=20.0) * scale,
        backward_weight=Curve(linear=30.0) * scale,
    )
    return UnitLayer(name=name, curves=(curves,), input_gradient=input_gradient)


COSTS = CostModel(
    units=(
        UnitCosts(name="vision", layers=(layer("first", 1.0, input_gradient=False),), output_bytes=8e3),
        UnitCosts(name="llm", layers=(layer("a", 1.0), layer("b", 2.0), layer("c", 4.0)), boundary_bytes=1e3),
    )
)


def template(*, checkpointing: bool) -> PipelineTemplate:
    """The encoder beside the language model's first stage, whose second one is on another node."""
    places = [("vision", 0, 1, 0), ("llm", 1, 2, 0), ("llm", 2, 4, 1)]
    return PipelineTemplate(
        num_nodes=2,
        stages=tuple(
            StageSpec(
                lane=LaneName(unit), first_layer=first, end_layer=end, node_index=node, forward_ms=1.0, backward_ms=1.0,
                checkpointing=checkpointing,
            )
            for unit, first, end, node in places
        ),
    )  # fmt: skip


def planned(row: int, *, split: bool = False, checkpointing: bool = False) -> dict[str, float]:
    """Return what the actions of a row take, but those that take nothing."""
    pipeline = Pipeline(template=template(checkpointing=checkpointing), nodes=(0, 1), num_microbatches=2)
    plan = Plan(pipelines=(pipeline,))
    plan_lanes = PlanLanes(plan, FEEDS, [True] * 4)
    cells = ASSIGNMENT.cells((0,), plan_lanes)
    lanes = (
        UnitLane(name=LaneName("vision"), rows=(0,), cells=(0,), backwards=(Backward.ALL,)),
        UnitLane(name=LaneName("llm"), rows=(0, 1), cells=(0, 1), backwards=(Backward.ALL,) * 2),
    )
    graph = StepGraph(lanes=lanes, flows=cells.flows, num_rows=2)
    schedule = generate_units(graph, pace="llm", split=split, states=[[0], [1], [2]])
    cluster = Cluster(inter_node=Link(latency_ms=1.0, bytes_per_s=1e6))
    times = UnitTimes(plan_lanes, plan, COSTS, cluster)
    found = times.planned(schedule, (0,), row, ASSIGNMENT, cells)
    assert found.graph is graph
    named = zip(map(str, schedule.row(row)), found.action_ms, strict=True)
    return {name: action_ms for name, action_ms in named if action_ms}


def test_cells_take_what_the_layers_of_their_stage_do_at_their_lengths() -> None:
    assert planned(0) == {
        "vision.0:0F0": 5 + 30 + 100 + 1 + 10 + 100,  # its parts are calls of their own
        "llm.0:0F0": 20 + 60 + 100,
        "llm.0:0F1": 25 + 50 + 100,
        "llm.0:0B0": 50 * 6,
        "llm.0:0B1": 50 * 5,
        "llm.0:0SEND_F0": 1 + 6,
        "llm.0:0SEND_F1": 1 + 5,
        "vision.0:0B0": 30 * 3,  # nothing before it wants a gradient; sample 0 of the cell
        "vision.0:0B0.1": 30 * 1,
    }
    assert planned(1)["llm.0:1F0"] == 6 * (20 + 60 + 100)


def test_halves_of_backwards_take_what_they_compute() -> None:
    found = planned(1, split=True)
    assert (found["llm.0:1I0"], found["llm.0:1W0"]) == (6 * 20 * 6, 6 * 30 * 6)


def test_backward_has_the_forward_in_it_that_is_run_again() -> None:
    found = planned(0, checkpointing=True)
    assert found["llm.0:0B0"] == 50 * 6 + 180
    assert found["vision.0:0B0"] == 30 * 3 + 5 + 30 + 100


def test_assignment_is_read_back_of_its_numbers() -> None:
    decoded = StepAssignment.decoded(ASSIGNMENT.units, ASSIGNMENT.encoded())
    for name in ("places", "tokens", "squares"):
        assert torch.equal(getattr(decoded, name), getattr(ASSIGNMENT, name)), name
    assert len(ASSIGNMENT.encoded()) == StepAssignment.encoded_size(2, 3)
