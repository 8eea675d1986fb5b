"""Tests of what makes assignments: a planner that has no places for samples is named, with the step they are of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.data.lengths import SampleLengths
from resilient.data.sampler import StepSampler
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.errors import ArgumentError
from resilient.planners.costs.correction import UNCORRECTED
from resilient.planners.costs.samples import SampleTable
from resilient.planners.pipelines.decision import template_of
from resilient.planners.planner import Setting
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.stages.one_pipeline import pipeline_configurations
from resilient.runtime.steps.planning import UnitPlanning, lengths_table
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan
from tests.resilient.planners.jobs_of_planners import COSTS

NODES, BATCH, MICROBATCH = 2, 8, 2
UNITS = [EmulatedUnit(name=name, num_layers=4, cost=CostCurve(fixed_ms=1, token_ms=1)) for name in ("vision", "llm")]
LENGTHS = SampleLengths(EmulatedDataset(UNITS, "heavy"), EmulatedModel(UNITS))


def planning(samples: SampleTable) -> UnitPlanning:
    """Return that of two nodes with memory without limit."""
    cluster, planner = Cluster(), DistTrain()
    setting = Setting(costs=COSTS, cluster=cluster, num_nodes=NODES, global_batch=BATCH, microbatch=MICROBATCH)
    answers = pipeline_configurations(planner, setting, samples, range(NODES, NODES + 1))
    template = template_of(setting, answers[NODES], samples)
    return UnitPlanning(
        planner=planner, costs=COSTS, lengths=LENGTHS, feeds=(), templates=(template,), cluster=cluster
    )  # fmt: skip


def test_planner_without_places_for_samples_is_named_with_their_step() -> None:
    sampler = StepSampler(num_samples=20, global_batch=BATCH, seed=0)
    roomy = planning(lengths_table(("vision", "llm"), LENGTHS, range(20)))
    plan = Plan(pipelines=(Pipeline(template=roomy.templates[0], nodes=(0, 1), num_microbatches=BATCH // MICROBATCH),))
    places = roomy.prepared(roomy.placement(plan, MICROBATCH), sampler, 3, UNCORRECTED)().places
    assert list(places.shape) == [2, BATCH, 3]
    tight = replace(roomy, cluster=Cluster(memory_bytes=1))
    make = tight.prepared(tight.placement(plan, MICROBATCH), sampler, 3, UNCORRECTED)
    with pytest.raises(ArgumentError) as raised:
        make()
    assert str(raised.value) == (
        "planner must have places for the samples of step 3, got 'disttrain', which has none: "
        f"{raised.value.__cause__}; choose another one"
    )
