"""A published experiment: 30 nodes lose one every 6 h, 1 h or 10 min until 15 are left (Oobleck, SOSP'23).

The 6 h number sets how fast steps are; the others are predicted.
``benchmarks/papers/oobleck_tables.py`` has all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.simulation.availability.traces import AvailabilityTrace, periodic_failures
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.scenario import Scenario
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import cluster_of
from resilient.templates.plan import PlanningProblem


def failures(interval_s: float) -> AvailabilityTrace:
    trace = periodic_failures(30, interval_s)
    return trace.lasting(trace.changes[-1].time_ms / 3.6e6)


@pytest.mark.parametrize(
    ("policy", "published", "tolerance"),
    [
        ("resilient", (85.59, 85.42, 84.80), 0.02),
        ("varuna", (86.51, 85.17, 76.39), 0.12),
        ("bamboo", (17.47, 17.13, 16.01), 0.08),
    ],
)
def test_gpt2_under_failures_is_predicted_from_its_throughput_without_many(
    policy: str, published: tuple[float, float, float], tolerance: float
) -> None:
    job = Scenario(
        problem=PlanningProblem(
            profile=derive_profile("gpt2-medium", "a40"), num_microbatches=32, cluster=cluster_of("a40", 1)
        ),
        batch=1024,
        max_nodes=30,
        costs=ChangeCosts(checkpoint_s=11.5, restart_s=71.5, insurance_steps=None),
    )
    factor = 1.0
    for _ in range(6):
        factor *= job.run(failures(21600), policy).samples_per_s / published[0]
        job = replace(job, costs=replace(job.costs, step_factor=factor))
    found = [job.run(failures(interval_s), policy).samples_per_s for interval_s in (21600, 3600, 600)]
    assert found[0] == pytest.approx(published[0], rel=0.01)
    assert found[1:] == pytest.approx(published[1:], rel=tolerance)


@pytest.mark.parametrize(
    ("model", "batch", "published"),
    [
        ("bert-large", 8192, {"resilient": 287.10, "varuna": 260.11, "bamboo": 77.04}),
        ("gpt2-medium", 1024, {"resilient": 85.59, "varuna": 86.51, "bamboo": 17.47}),
    ],
)
def test_systems_are_as_fast_beside_each_other_as_published(
    model: str, batch: int, published: dict[str, float]
) -> None:
    """One factor for all, which the first system sets, as they ran the same model on the same machines."""
    microbatches = batch // 32
    problem = PlanningProblem(
        profile=derive_profile(model, "a40"), num_microbatches=microbatches, cluster=cluster_of("a40", 1)
    )
    costs = ChangeCosts(checkpoint_s=13.0, restart_s=66.0, insurance_steps=None)
    job = Scenario(problem=problem, batch=batch, max_nodes=30, costs=costs)
    for _ in range(6):
        factor = job.costs.step_factor * job.run(failures(21600), "resilient").samples_per_s / published["resilient"]
        job = replace(job, costs=replace(job.costs, step_factor=factor))
    found = {policy: job.run(failures(21600), policy).samples_per_s for policy in published}
    assert found == pytest.approx(published, rel=0.15)
