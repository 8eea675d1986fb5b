"""Every planner by its name, on one small job before and after nodes are lost."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Setting
from resilient.planners.registry import AUTO, BASELINE, PLACES_GENERATORS, PLANNERS, check_generators, planner
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.devices import cluster_of

MODEL = "siglip-so400m+llama3.2-1b"


@pytest.fixture(scope="module")
def job() -> tuple[Setting, SampleTable, SampleTable]:
    setting = Setting(
        costs=derive_costs(MODEL, "a100-80gb"),
        cluster=cluster_of("a100-80gb", 4),
        num_nodes=3,
        global_batch=24,
        microbatch=1,
    )
    table = workload("coco", 224, 0, MODEL)
    return setting, table[:200], table[200:]


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_plan_a_job_that_can_be_simulated_and_goes_on_after_a_loss(
    name: str, job: tuple[Setting, SampleTable, SampleTable]
) -> None:
    setting, samples, batch = job
    chosen = planner(name)
    assert chosen.name == name
    configuration = chosen.configure(setting, samples)
    steps: list[float] = []
    for lost in (0, 1):
        replicas = degraded_replicas(setting, configuration, lost)
        assignment = chosen.assign(setting, configuration, batch, replicas)
        result = evaluate(setting, configuration, assignment, batch, replicas)
        assert 0 <= result.bubble < 1
        assert result.peak_bytes > 0
        steps.append(result.iteration_ms)
    assert 0 < steps[0] < math.inf
    assert steps[1] > 0.999 * steps[0]


def test_planners_that_know_no_generators_refuse_them_by_name() -> None:
    two = derive_costs(MODEL, "a100-80gb")
    three = replace(two, units=(*two.units, replace(two.units[0], name="image")))
    for name in (*PLANNERS, AUTO):
        check_generators(name, two)
        if name in PLACES_GENERATORS:
            check_generators(name, three)
            continue
        message = (
            f"planner must place what comes after the language model, got {name!r}, which knows nothing of image; "
            "choose one of uniform, uniform-sorted, disttrain, resilient, auto"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_generators(name, three)


def test_planner_names_those_there_are() -> None:
    message = f"planner must be one of {', '.join(PLANNERS)}, got 'megatron'; choose one of these"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        planner("megatron")
    assert BASELINE in PLANNERS
