"""What planned actions are expected to take: the curves of their stages at the lengths of their samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from resilient.planners.costs.correction import Correction, Factor, buckets
from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import Backward, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.ranks import as_threads, join

FEEDS = (("vision", "llm"),)
ASSIGNMENT = StepAssignment(
    units=("vision", "llm"),
    places=torch.tensor([[[0, 0, 0], [-1] * 3, [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1]]]),
    tokens=torch.tensor([[3, 0, 1], [4, 2, 5]]),
    squares=torch.tensor([[5, 0, 1], [16, 4, 25]]),
    longest=torch.tensor([[2, 0, 1], [4, 2, 5]]),
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


def template(*, recomputed: int) -> PipelineTemplate:
    """The encoder beside the language model's first stage, whose second one is on another node."""
    places = [("vision", 0, 1, 0), ("llm", 1, 2, 0), ("llm", 2, 4, 1)]
    return PipelineTemplate(
        num_nodes=2,
        stages=tuple(
            StageSpec(
                lane=LaneName(unit), first_layer=first, end_layer=end, node_index=node, forward_ms=1.0, backward_ms=1.0,
                recomputed_layers=min(recomputed, end - first),
            )
            for unit, first, end, node in places
        ),
    )  # fmt: skip


def step(plan_lanes: PlanLanes, *, split: bool) -> tuple[Schedule, StepCells]:
    """Return what is done with the samples."""
    cells = ASSIGNMENT.cells((0,), plan_lanes)
    lanes = (
        UnitLane(name=LaneName("vision"), rows=(0,), cells=(0,), backwards=(Backward.ALL,)),
        UnitLane(name=LaneName("llm"), rows=(0, 1), cells=(0, 1), backwards=(Backward.ALL,) * 2),
    )
    graph = StepGraph(lanes=lanes, flows=cells.flows, num_rows=2)
    return generate_units(graph, pace="llm", split=split, states=[[0], [1], [2]]), cells


def lanes_and_times(*, recomputed: int = 0, costs: CostModel = COSTS) -> tuple[PlanLanes, UnitTimes]:
    """Return the lanes of a pipeline on two nodes, and what tells their times."""
    cluster = Cluster(inter_node=Link(latency_ms=1.0, bytes_per_s=1e6))
    pipeline = Pipeline(template=template(recomputed=recomputed), nodes=(0, 1), num_microbatches=2)
    plan = Plan(pipelines=(pipeline,))
    plan_lanes = PlanLanes(plan, FEEDS, [True] * 4)
    return plan_lanes, UnitTimes(plan_lanes, plan, costs, cluster)


def planned(row: int, *, split: bool = False, recomputed: int = 0, costs: CostModel = COSTS) -> dict[str, float]:
    """Return what the actions of a row take, but those that take nothing."""
    plan_lanes, times = lanes_and_times(recomputed=recomputed, costs=costs)
    schedule, cells = step(plan_lanes, split=split)
    found = times.planned(schedule, (0,), row, ASSIGNMENT, [cells])
    assert found.graph is schedule.graph
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


def test_messages_take_longer_than_they_occupy_the_link() -> None:
    plan_lanes, times = lanes_and_times()
    schedule, cells = step(plan_lanes, split=False)
    latency = times.planned(schedule, (0,), 0, ASSIGNMENT, [cells]).latency_ms
    told = zip(map(str, schedule.row(0)), latency, strict=True)
    assert {name: each for name, each in told if each} == {"llm.0:0SEND_F0": 1.0, "llm.0:0SEND_F1": 1.0}


def test_units_that_pad_compute_each_sequence_as_long_as_the_longest_of_its_call() -> None:
    vision = replace(COSTS.units[0], padded=True)
    found = planned(0, costs=replace(COSTS, units=(vision, COSTS.units[1])))
    # sample 0 has as many sequences as 3 tokens need that are no longer than 2; sample 2 is a call of its own
    assert found["vision.0:0F0"] == 8 + 40 + 100 + 1 + 10 + 100
    assert found["vision.0:0B0"] == 30 * 4
    assert found["llm.0:0F0"] == planned(0)["llm.0:0F0"]


def test_what_was_learnt_corrects_cells_by_the_longest_of_their_sequences() -> None:
    keys = {("vision", 1, int(buckets(2))): 2.0, ("llm", 1, int(buckets(4))): 3.0, ("llm", 1, int(buckets(16))): 5.0}
    learnt = Correction(factors={key: Factor(value=value, num_steps=9) for key, value in keys.items()})
    plan_lanes, times = lanes_and_times()
    schedule, cells = step(plan_lanes, split=False)
    told = times.planned(schedule, (0,), 0, ASSIGNMENT, [cells], correction=learnt).action_ms
    found = dict(zip(map(str, schedule.row(0)), told, strict=True))
    before = planned(0)
    assert found["vision.0:0F0"] == 2 * before["vision.0:0F0"]
    assert found["vision.0:0B0.1"] == 2 * before["vision.0:0B0.1"]
    assert found["llm.0:0F1"] == 3 * before["llm.0:0F1"]
    assert found["llm.0:0SEND_F1"] == before["llm.0:0SEND_F1"]


def test_halves_of_backwards_take_what_they_compute() -> None:
    found = planned(1, split=True)
    assert (found["llm.0:1I0"], found["llm.0:1W0"]) == (6 * 20 * 6, 6 * 30 * 6)


def test_backward_has_the_forward_in_it_that_is_run_again() -> None:
    found = planned(0, recomputed=2)
    assert found["llm.0:0B0"] == 50 * 6 + 180
    assert found["vision.0:0B0"] == 30 * 3 + 5 + 30 + 100


def test_all_ranks_go_by_the_costs_of_the_first() -> None:
    slower = replace(COSTS, units=(replace(COSTS.units[0], layers=(layer("first", 3.0),)), COSTS.units[1]))

    def rank(number: int, address: str) -> list[list[float]]:
        plan_lanes, times = lanes_and_times(costs=slower if number else COSTS)
        schedule, cells = step(plan_lanes, split=False)
        times.meet(join(address, number, 2))
        return times.cells_ms(schedule.graph, ASSIGNMENT, cells).tolist()

    plan_lanes, times = lanes_and_times()
    schedule, cells = step(plan_lanes, split=False)
    assert as_threads(2, rank) == [times.cells_ms(schedule.graph, ASSIGNMENT, cells).tolist()] * 2


def test_assignment_is_read_back_of_its_numbers() -> None:
    decoded = StepAssignment.decoded(ASSIGNMENT.units, ASSIGNMENT.encoded())
    for name in ("places", "tokens", "squares", "longest"):
        assert torch.equal(getattr(decoded, name), getattr(ASSIGNMENT, name)), name
    assert len(ASSIGNMENT.encoded()) == StepAssignment.encoded_size(2, 3)


def test_halves_take_nothing_where_the_other_one_has_all() -> None:
    first = planned(0, split=True)
    assert (first.get("vision.0:0I0"), first["vision.0:0W0"]) == (None, 30 * 3), "nothing before it wants a gradient"
    for recomputed, again_ms in ((1, 2 * 180), (2, 6 * 180)):
        found = planned(1, split=True, recomputed=recomputed)
        assert (found["llm.0:1I0"], found.get("llm.0:1W0")) == (6 * 50 * 6 + again_ms, None)
