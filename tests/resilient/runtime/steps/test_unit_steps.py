"""What a worker reads and runs in a step of which its pipeline is a part."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import msgspec
import pytest
import torch

from resilient.comm import SingleProcessCommunicator
from resilient.data.reader import Cell
from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.planner import Configuration
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.assignments import Assignments
from resilient.runtime.steps.learning import Learning
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.runtime.steps.unit_steps import WARM_UP_STEPS, UnitSteps
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec

STAGES = [("vision", 0, 0, 0), ("vision", 1, 0, 1), ("llm", 0, 1, 1)]
TEMPLATE = PipelineTemplate(
    num_nodes=2,
    stages=tuple(
        StageSpec(
            lane=LaneName(unit, number), first_layer=layer, end_layer=layer + 1, node_index=node, forward_ms=1.0,
            backward_ms=2.0,
        )
        for unit, number, layer, node in STAGES
    ),
    decision=msgspec.json.encode(Configuration(units={}, num_microbatches=1)).decode(),
)  # fmt: skip
"""Two lanes of the encoder, the second one beside the language model."""
PLAN = Plan(
    pipelines=tuple(Pipeline(template=TEMPLATE, nodes=(2 * n, 2 * n + 1), num_microbatches=1) for n in range(2))
)
PLACES = [[[1, 0, 0], [1, 1, 0], [-1, -1, -1]], [[0, 0, 0], [1, 0, 0], [1, 0, 1]]]
"""Of three samples; the first one's pictures are in another pipeline than its text."""
TOKENS = [[4, 2, 0], [6, 3, 5]]


def costs_of(unit: str, token_ms: float) -> UnitCosts:
    """Return a layer that takes so long for each token."""
    curves = LayerCurves(forward=Curve(linear=token_ms), backward_input=Curve(), backward_weight=Curve())
    shared = replace(curves, forward=curves.forward * 0.5)
    layer = UnitLayer(name="layer", curves=(curves, shared))
    return UnitCosts(name=unit, layers=(layer,), degrees=((1, 1), (2, 1)))


COSTS = CostModel(units=(costs_of("vision", 1.0), costs_of("llm", 10.0)))


class _Known:
    def __init__(self, places: list[list[list[int]]] = PLACES) -> None:
        self.learning = Learning(("vision", "llm"), (1, 2))
        self._places = torch.tensor(places)

    def start(self, step: int) -> None:
        """Nothing is to be made."""

    def of(self, step: int) -> StepAssignment:
        tokens = torch.tensor(TOKENS)
        return StepAssignment(
            units=("vision", "llm"), places=self._places, tokens=tokens, squares=tokens, longest=tokens
        )


def steps_of(rank: int, known: _Known | None = None, plan: Plan = PLAN) -> UnitSteps:
    lanes = PlanLanes(plan, (("vision", "llm"),), (True, True))
    return UnitSteps(
        comm=SingleProcessCommunicator(),
        assignments=cast(Assignments, known or _Known()),
        slot=plan.slots[rank],
        lanes=lanes,
        states=lambda stage: [stage.first_layer],
        split=False,
        times=UnitTimes(lanes, plan, COSTS, Cluster()),
    )


SHARDED = Plan(
    pipelines=(
        Pipeline(
            template=replace(
                TEMPLATE,
                num_nodes=1,
                stages=tuple(
                    StageSpec(
                        lane=LaneName(unit), first_layer=layer, end_layer=layer + 1, node_index=0, num_devices=2,
                        shard=2, forward_ms=1.0, backward_ms=2.0,
                    )
                    for layer, unit in enumerate(("vision", "llm"))
                ),
                decision=msgspec.json.encode(Configuration(units={}, num_microbatches=1, shard=2)).decode(),
            ),
            nodes=(0,),
            num_microbatches=3,
        ),
    )
)  # fmt: skip
"""One node of two devices."""


def test_devices_that_share_cells_do_the_same_with_the_same_samples() -> None:
    """Of the encoder's lanes the second one has two devices, which are those of the language model."""
    shared = tuple(replace(stage, num_devices=2) if stage.node_index else stage for stage in TEMPLATE.stages)
    template = replace(TEMPLATE, stages=shared)
    plan = Plan(pipelines=tuple(replace(each, template=template) for each in PLAN.pipelines))
    assert [(slot.node, slot.shard_index) for slot in plan.slots] == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    found = [steps_of(rank, plan=plan) for rank in (4, 5)]
    alone = steps_of(3)
    for steps in found:
        assert steps.cells(1) == alone.cells(1)
        assert [str(action) for action in steps.work(1, 1, lambda cell: {}).schedule.row(3)] == [
            str(action) for action in alone.work(1, 1, lambda cell: {}).schedule.row(3)
        ]
        assert not steps.work(1, 1, lambda cell: {}).idle
    assert [steps.planned(1).device for steps in found] == [0, 1]
    assert found[0].planned(1).action_ms == found[1].planned(1).action_ms


def test_devices_that_divide_units_do_the_same_with_samples_of_their_own() -> None:
    """Round 0: device 0 has a picture and its text, device 1 a text alone; round 1: device 1 a picture and its text."""
    known = _Known([[[0, 0, 0], [-1, -1, -1], [0, 0, 3]], [[0, 0, 0], [0, 0, 1], [0, 0, 3]]])
    first, second = (steps_of(rank, known, plan=SHARDED) for rank in range(2))
    assert first.cells(1) == [Cell("vision", (0,)), Cell("llm", (0,))]
    assert second.cells(1) == [Cell("llm", (1,)), Cell("vision", (2,)), Cell("llm", (2,))]
    works = [steps.work(1, 1, lambda cell: {}) for steps in (first, second)]
    named = [[str(action) for action in work.schedule.row(work.row)] for work in works]
    assert named[0] == named[1]
    assert [name for name in named[0] if "REDUCE" not in name] == [
        f"{lane}.0:0{op}{cell}"
        for cell in (0, 1)
        for op, lanes in (("F", ("vision", "llm")), ("B", ("llm", "vision")))
        for lane in lanes
    ]
    vision, llm = LaneName("vision"), LaneName("llm")
    assert [work.idle for work in works] == [{(vision, 1), (llm, 1)}, {(vision, 0)}]
    assert [work.schedule.graph.flows for work in works] == [((vision, 0, llm, 0),), ((vision, 1, llm, 1),)]
    # device 1 waits in round 0 for text of 6 tokens, having 3 itself, and nobody waits for what it has not
    assert [steps.num_microbatches(1) for steps in (first, second)] == [(4 + 60) / 6, (60 + 0 + 50) / 6]
    assert [steps.planned(1).device for steps in (first, second)] == [0, 1]
    assert first.planned(1).action_ms == second.planned(1).action_ms


def test_only_who_should_take_longest_says_how_long_cells_take() -> None:
    known = _Known([[[-1, -1, -1]] * 3, [[0, 0, 0], [0, 0, 1], [0, 0, 1]]])
    seen: list[float] = []
    for rank in range(2):
        steps = steps_of(rank, known, plan=SHARDED)
        for _ in range(WARM_UP_STEPS + 1):
            steps.learn(1, {(1, 0): 100.0})
        seen.append(float(known.learning.bring().sum()))
    assert seen == [0.0, 80 + 100], "text of 8 tokens takes longer than of 6"


def test_cells_that_are_read_name_lanes_as_the_template_of_their_pipeline_does() -> None:
    assert steps_of(0).cells(1) == []
    assert steps_of(1).cells(1) == [Cell("llm", (0,))]
    assert steps_of(2).cells(1) == [Cell("vision", (0,))]
    assert sorted(steps_of(3).cells(1) or ()) == [Cell("llm", (1,)), Cell("llm", (2,)), Cell("vision", (1,), 1)]
    for slot in PLAN.slots:
        lanes = {stage.lane for stage in slot.stages}
        assert lanes >= {LaneName(cell.unit, cell.lane) for cell in steps_of(slot.rank).cells(1) or ()}


def test_workers_of_joined_pipelines_run_rows_of_one_schedule() -> None:
    lanes = PlanLanes(PLAN, (("vision", "llm"),), (True, True))
    schedule = lanes.schedule((0, 1), _Known().of(1).cells((0, 1), lanes), lambda stage: [stage.first_layer])
    for rank in range(4):
        steps = steps_of(rank)
        assert steps.cells(1) is not None
        (made,) = steps._made.values()
        assert (made.schedule, made.row, made.pipelines) == (schedule, rank, (0, 1))


def test_step_is_worth_what_its_cells_are_expected_to_take_of_what_the_plan_has_them_take() -> None:
    # the plan has each lane take 3 ms for a microbatch, and a worker with two lanes 6 ms
    assert [steps_of(rank).num_microbatches(1) for rank in range(4)] == [0.0, 60 / 6, 4 / 3, (80 + 2) / 6]


def test_costs_that_are_wrong_about_a_unit_make_no_difference_between_workers() -> None:
    known = _Known()
    for unit, expected_ms, taken_ms in (("vision", 2.0, 6.0), ("vision", 1.0, 3.0), ("llm", 4.0, 2.0)):
        known.learning.see(unit, 64, expected_ms=expected_ms, taken_ms=taken_ms)
    known.learning.take(known.learning.bring())
    found = [steps_of(rank, known).num_microbatches(1) for rank in range(4)]
    assert found == pytest.approx([0.0, 0.5 * 60 / 6, 3 * 4 / 3, (0.5 * 80 + 3 * 2) / 6])
