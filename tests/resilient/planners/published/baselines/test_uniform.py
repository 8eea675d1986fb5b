"""The uniform planners: the best plan by simulating known batches, samples as they come or sorted once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.known_batches import known_batches, simulated
from resilient.planners.planner import Configuration, Replica, Setting
from resilient.planners.published.baselines.uniform import Uniform, UniformSorted
from resilient.planners.published.baselines.uniform_plans import Estimates, has_room, uniform_plans
from resilient.templates.inputs.cluster import Cluster
from tests.resilient.planners.jobs_of_planners import check_places, setting, table

BOTH = pytest.mark.parametrize("planner", [Uniform(), UniformSorted()], ids=lambda planner: planner.name)


def mean_ms(planner: Uniform, plan: Configuration, samples: SampleTable, job: Setting | None = None) -> float:
    job = job or setting()
    batches = known_batches(job, samples, 3)
    return float(np.mean([each.iteration_ms for each in simulated(planner, job, plan, batches)]))


@BOTH
def test_no_uniform_plan_is_much_faster_on_the_known_batches(planner: Uniform) -> None:
    samples = table(200)
    found = planner.configure(setting(), samples)
    steps = [mean_ms(planner, plan, samples) for plan in uniform_plans(setting(), samples)]
    assert len(steps) > 80
    assert found.predicted_ms == mean_ms(planner, found, samples)
    assert found.predicted_ms <= 1.05 * min(steps)


@BOTH
@pytest.mark.parametrize("global_batch", [4, 5, 7, 11])
def test_no_number_of_microbatches_is_faster_for_batches_that_replicas_do_not_divide(
    planner: Uniform, global_batch: int
) -> None:
    job = replace(setting(), cluster=Cluster(), num_nodes=3, global_batch=global_batch)
    samples = table(3 * global_batch)
    found = planner.configure(job, samples)
    assert found.units[LLM].dp == 3
    steps = [
        mean_ms(planner, replace(found, num_microbatches=number), samples, job) for number in range(1, global_batch + 1)
    ]
    assert found.predicted_ms == min(steps)


@BOTH
def test_microbatches_stages_and_places_of_encoders_are_tried(planner: Uniform) -> None:
    plans = list(uniform_plans(setting(), table(200)))
    assert {plan.units[LLM].tp for plan in plans} == {1, 2}
    assert {plan.units[LLM].pp for plan in plans} >= {1, 2, 4, 8}
    assert {plan.colocated for plan in plans} == {True, False}
    assert len({plan.units["vision"].dp // plan.units[LLM].dp for plan in plans}) > 1
    estimates = Estimates(planner, setting(), known_batches(setting(), table(200), 1)[0])
    assert all(estimates.step_ms(plan) > 0 for plan in plans)
    for plan in plans:
        assert plan.units["vision"].tp == plan.units[LLM].tp
        used = [spread.num_devices for spread in plan.units.values()]
        assert (max(used) if plan.colocated else sum(used)) <= setting().num_devices


@BOTH
def test_plans_fit_the_known_batches_or_are_refused(planner: Uniform) -> None:
    samples, fitted = table(200), list[bool]()
    for power in range(16, 26):
        job = replace(setting(), cluster=Cluster(devices_per_node=2, memory_bytes=2**power))
        try:
            found = planner.configure(job, samples)
        except ValueError:
            fitted.append(False)
            continue
        fitted.append(True)
        assert has_room(job, found, samples)
        results = simulated(planner, job, found, known_batches(job, samples, 3))
        assert max(each.peak_bytes for each in results) <= 2**power
    assert fitted == sorted(fitted)
    assert set(fitted) == {True, False}


def test_samples_are_sorted_once_over_all_microbatches() -> None:
    job, batch = setting(), table(32, 5)
    plan = UniformSorted().configure(job, table(200))
    replicas = [Replica(num_microbatches=2), Replica(num_microbatches=3, speed=0.5)]
    assignment, again = (UniformSorted().assign(job, plan, batch, replicas) for _ in range(2))
    check_places(assignment, again, 32, replicas)
    work = sum(job.sample_ms(name, batch.units[name], spread.tp) for name, spread in plan.units.items())
    assert isinstance(work, np.ndarray)
    by_replica = [work[assignment.units[LLM].replica == index].sum() for index in range(2)]
    assert by_replica[0] / by_replica[1] == pytest.approx(2, rel=0.2)
    longest, second = np.argsort(-work)[:2]
    places = [
        (assignment.units[LLM].replica[each], assignment.units[LLM].microbatch[each]) for each in (longest, second)
    ]
    assert places == [(0, 0), (0, 1)]


def test_known_batches_are_the_first_samples_and_repeat_where_there_are_few() -> None:
    job, samples = setting(), table(100)
    tokens = samples.units[LLM].tokens.tolist()
    found = [each.units[LLM].tokens.tolist() for each in known_batches(job, samples, 5)]
    assert found == [tokens[:32], tokens[32:64], tokens[64:96]]
    few = known_batches(job, samples[:20], 5)
    assert [each.units[LLM].tokens.tolist() for each in few] == [tokens[:20] + tokens[:12]]
