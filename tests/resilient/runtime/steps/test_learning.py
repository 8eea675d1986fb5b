"""All ranks learn the same from what each has measured, and samples are placed by it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from resilient.data.sampler import StepSampler
from resilient.planners.costs.correction import UNCORRECTED, Correction, Factor, Observation, buckets
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.planners.own.planner import ResilientPlanner
from resilient.planners.pipelines.decision import template_of
from resilient.planners.planner import Setting
from resilient.planners.stages.one_pipeline import pipeline_configurations
from resilient.runtime.steps.assignments import AHEAD, Assignments
from resilient.runtime.steps.learning import Learning
from resilient.runtime.steps.planning import UnitPlanning, lengths_table
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.runtime.steps.unit_steps import WARM_UP_STEPS, UnitSteps
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan
from tests.resilient.planners.jobs_of_planners import COSTS
from tests.resilient.ranks import as_threads, join
from tests.resilient.runtime.steps.test_planning import LENGTHS

UNITS, FEEDS = ("vision", "llm"), (("vision", "llm"),)
BATCH, MICROBATCH, NUM_STEPS = 16, 4, 12


def scaled(unit: UnitCosts, factor: float) -> UnitCosts:
    """Return a unit whose layers take so many times as long."""
    layers = tuple(
        replace(
            layer,
            curves=tuple(
                replace(
                    each,
                    forward=each.forward * factor,
                    backward_input=each.backward_input * factor,
                    backward_weight=each.backward_weight * factor,
                )
                for each in layer.curves
            ),
        )
        for layer in unit.layers
    )
    return replace(unit, layers=layers)


TRUTH = replace(COSTS, units=(scaled(COSTS.units[0], 8.0), COSTS.units[1]))
MISTAKEN = replace(COSTS, units=(scaled(COSTS.units[0], 4.0), COSTS.units[1]))
"""The encoder takes twice as long as that."""


def test_ranks_learn_from_what_all_have_seen() -> None:
    calls = [("vision", 5, 2.0, 3.0), ("vision", 5, 1.0, 3.0), ("llm", 1000, 4.0, 2.0)]

    def rank(number: int, address: str) -> Correction:
        comm, learning = join(address, number, 2), Learning(UNITS)
        learning.meet(comm)
        for unit, longest, expected_ms, taken_ms in calls[number::2]:
            learning.see(unit, longest, expected_ms=expected_ms, taken_ms=taken_ms)
        learning.see("llm", 7, expected_ms=0.0, taken_ms=1.0)  # nothing is expected of it, nothing is learnt
        for _ in range(2):  # in the second barrier there is nothing more
            total = learning.bring()
            assert total.shape == (learning.size,)
            comm.all_reduce(total, (0, 1)).wait()
            learning.take(total)
        return learning.correction

    seen = [
        Observation(unit=unit, tp=1, tokens=longest, predicted_ms=expected_ms, actual_ms=taken_ms)
        for unit, longest, expected_ms, taken_ms in calls
    ]
    assert as_threads(2, rank) == [UNCORRECTED.observe(seen)] * 2


def test_degrees_are_learnt_apart() -> None:
    learning = Learning(UNITS, (1, 2))
    learning.see("llm", 64, expected_ms=2.0, taken_ms=6.0, degree=2)
    learning.take(learning.bring())
    assert learning.correction.factor("llm", 2, 64) == 3.0
    assert learning.correction.factor("llm", 1, 64) == 1.0
    assert [learning.unit_factor("llm", degree) for degree in (1, 2)] == [1.0, 3.0]


def test_who_joins_goes_on_from_what_others_have_learnt() -> None:
    place = int(buckets(64))

    def rank(number: int, address: str) -> Correction:
        learning = Learning(UNITS)
        if number:  # the first one has just joined; the last one has learnt from one step more
            factors = {("vision", 1, place): Factor(value=1.0 + number, num_steps=10)}
            if number == 2:
                factors["llm", 1, 0] = Factor(value=0.5, num_steps=1)
            learning.correction = Correction(factors=factors)
        learning.see("vision", 64, expected_ms=1.0, taken_ms=9.0)  # of a step that was given up
        learning.meet(join(address, number, 3))
        assert not learning.bring().any()
        return learning.correction

    factors = {("vision", 1, place): Factor(value=2.5, num_steps=10), ("llm", 1, 0): Factor(value=0.5, num_steps=1)}
    assert as_threads(3, rank) == [Correction(factors=factors)] * 3


def planning(costs: CostModel) -> UnitPlanning:
    """Return that of two nodes, each of which is to be a pipeline."""
    cluster, planner, samples = Cluster(), ResilientPlanner(), lengths_table(UNITS, LENGTHS, range(100))
    setting = Setting(costs=costs, cluster=cluster, num_nodes=1, global_batch=BATCH, microbatch=MICROBATCH)
    (answer,) = pipeline_configurations(planner, setting, samples, range(1, 2)).values()
    templates = (template_of(setting, answer, samples),)
    return UnitPlanning(
        planner=planner, costs=costs, lengths=LENGTHS, feeds=FEEDS, templates=templates, cluster=cluster
    )


def test_samples_are_placed_as_by_the_true_times_once_these_are_learnt() -> None:
    mistaken = planning(MISTAKEN)
    (template,) = mistaken.templates
    plan = Plan(
        pipelines=tuple(
            Pipeline(template=template, nodes=(node,), num_microbatches=BATCH // MICROBATCH // 2) for node in range(2)
        )
    )
    sampler = StepSampler(num_samples=1000, global_batch=BATCH, seed=0)
    placement = mistaken.placement(plan, MICROBATCH)
    lanes = PlanLanes(plan, FEEDS, [True] * 12)

    def rank(number: int, address: str) -> tuple[dict[int, torch.Tensor], dict[int, float]]:
        comm = join(address, number, 2)
        assignments = Assignments(
            comm, UNITS, BATCH, NUM_STEPS, partial(mistaken.prepared, placement, sampler), Learning(UNITS)
        )
        steps = UnitSteps(
            comm=comm, assignments=assignments, slot=plan.slots[number], lanes=lanes, states=lambda _: [], split=False,
            times=UnitTimes(lanes, plan, MISTAKEN, Cluster()),
        )  # fmt: skip
        truth = UnitTimes(lanes, plan, TRUTH, Cluster())
        steps.begin(0)
        placed, took_ms = dict[int, torch.Tensor](), dict[int, float]()
        for step in range(1, NUM_STEPS + 1):
            work, assignment = steps.work(step, 1, lambda _: {}), assignments.of(step)
            assert assignment is not None
            graph, cells = work.schedule.graph, assignment.cells(assignment.joined(number), lanes)
            own = np.array(graph.row_of) == work.row
            cells_ms = truth.cells_ms(graph, assignment, cells) * own[:, np.newaxis]
            placed[step], took_ms[step] = assignment.places, float(cells_ms.sum())
            total = steps.bring(step)
            comm.all_reduce(total, (0, 1)).wait()
            steps.learn(
                step, {(int(stage), int(cell)): float(cells_ms[stage, cell]) for stage, cell in np.argwhere(cells_ms)}
            )
            steps.take(step, total)
        steps.close()
        return placed, took_ms

    (placed, first_ms), (same, second_ms) = as_threads(2, rank)
    assert all(torch.equal(placed[step], same[step]) for step in placed)
    right = replace(mistaken, costs=TRUTH)
    true_placement = right.placement(plan, MICROBATCH)

    def true_places(step: int) -> torch.Tensor:
        return right.prepared(true_placement, sampler, step, UNCORRECTED)().places

    # measured in the third step, told in the barrier of the fourth, used when the fifth begins
    learnt_from = WARM_UP_STEPS + 1 + 2 + AHEAD
    are_right = {step: torch.equal(placed[step], true_places(step)) for step in placed}
    assert all(are_right[step] for step in range(learnt_from, NUM_STEPS + 1))
    assert not any(are_right[step] for step in range(1, learnt_from))

    def slowest_ms(steps: range) -> float:
        return sum(max(first_ms[step], second_ms[step]) / (first_ms[step] + second_ms[step]) for step in steps)

    before, after = range(1, learnt_from), range(learnt_from, NUM_STEPS + 1)
    assert slowest_ms(after) / len(after) == pytest.approx(0.5, abs=0.01)
    assert slowest_ms(before) / len(before) > 0.52
