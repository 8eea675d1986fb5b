"""What DHP decides once: its prediction is what the simulation finds, samples fit, and it is ahead of static plans."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Configuration, Planner, Setting
from resilient.planners.published.dhp.planner import DHP, dhp_across_nodes
from resilient.planners.registry import planner
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_shares import kept_shares
from resilient.planners.stages.redundancy import check_redundancy
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.devices import cluster_of
from tests.resilient.planners.jobs_of_planners import COSTS, setting, table

SLOW = Link(bytes_per_s=1e6)


def simulate(who: Planner, job: Setting, known: SampleTable, batch: SampleTable) -> tuple[Configuration, Result]:
    found = who.configure(job, known)
    replicas = degraded_replicas(job, found, 0)
    return found, evaluate(job, found, who.assign(job, found, batch, replicas), batch, replicas)


def equal(count: int, vision: int, text: int) -> SampleTable:
    lengths = {"vision": np.full(count, vision), "llm": np.full(count, text)}
    return SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})


def even_batch(configuration: Configuration, microbatch: int) -> int:
    language = configuration.units[LLM]
    return configuration.num_microbatches * language.dp * language.cp * microbatch


@settings(max_examples=20, deadline=None)
@given(
    vision=st.integers(50, 2000),
    text=st.integers(50, 2000),
    num_nodes=st.integers(1, 8),
    microbatch=st.integers(1, 4),
    slow=st.booleans(),
)
def test_steps_of_equal_samples_take_little_less_than_is_predicted(
    vision: int, text: int, num_nodes: int, microbatch: int, slow: bool
) -> None:
    # Messages between units are not predicted.
    costs = CostModel(units=tuple(replace(each, output_bytes=0.0) for each in COSTS.units))
    job = replace(setting(), costs=costs, num_nodes=num_nodes, microbatch=microbatch)
    if slow:
        job = replace(job, cluster=Cluster(devices_per_node=2, memory_bytes=None, intra_node=SLOW, inter_node=SLOW))
    found = DHP().configure(job, equal(8, vision, text))
    # As many samples as give each rank as many in every microbatch.
    job = replace(job, global_batch=even_batch(found, microbatch))
    known = equal(job.global_batch, vision, text)
    found, result = simulate(DHP(), job, known, known)
    if job.global_batch == even_batch(found, microbatch):
        assert 0.85 * found.predicted_ms < result.iteration_ms < found.predicted_ms * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(
    memory=st.integers(100_000, 3_000_000),
    seed=st.integers(0, 9),
    # Alone in a node, a sample has two ranks.
    planner_needs=st.sampled_from([(DHP(), 1_100_000), (dhp_across_nodes(), 400_000)]),
)
def test_the_samples_it_was_asked_for_fit(memory: int, seed: int, planner_needs: tuple[DHP, int]) -> None:
    (who, needed), job, known = planner_needs, setting(memory), table(32, seed)
    try:
        found = who.configure(job, known)
    except ValueError:
        assert memory < needed
        return
    assert sum(found.units[LLM].stage_layers) == 8
    assert simulate(who, job, known, known)[1].peak_bytes <= memory


def test_room_is_left_for_samples_a_quarter_larger_than_those_known() -> None:
    # The two ranks of a node hold the longest sample known in one stage, which is faster.
    job, known = setting(2_200_000), table(200)
    found, faster = DHP().configure(job, known), DHP().configure(setting(), known)
    assert kept_shares(job, faster, known).max() < faster.units[LLM].cp == 2
    assert kept_shares(job, found, known).max() * 1.25 <= found.units[LLM].cp == 1


@settings(max_examples=20, deadline=None)
@given(
    devices_per_node=st.integers(1, 8),
    num_nodes=st.integers(1, 6),
    memory=st.none() | st.integers(500_000, 3_000_000),
    max_failures=st.integers(0, 2),
)
def test_groups_lie_within_nodes_that_have_state_enough(
    devices_per_node: int, num_nodes: int, memory: int | None, max_failures: int
) -> None:
    job = replace(setting(), num_nodes=num_nodes, max_failures=max_failures)
    job = replace(job, cluster=Cluster(devices_per_node=devices_per_node, memory_bytes=memory))
    try:
        found = DHP().configure(job, table(100))
    except ValueError:
        return
    language = found.units[LLM]
    assert devices_per_node % (language.tp * language.cp) == 0
    check_redundancy(job, found)


def test_ranks_of_two_devices_are_not_on_nodes_of_three() -> None:
    model = "qwen2-vl-7b"
    job = Setting(
        costs=derive_costs(model, "a100-80gb"),
        cluster=cluster_of("a100-80gb", 3),
        num_nodes=5,
        global_batch=8,
        microbatch=1,
    )
    known = workload("coco", 200, 0, model)
    found = [who.configure(job, known).units[LLM] for who in (DHP(), dhp_across_nodes())]
    assert [(each.tp, 3 % (each.tp * each.cp)) for each in found] == [(1, 0), (2, 1)]


@pytest.mark.parametrize("who", [DHP(), dhp_across_nodes()], ids=lambda who: who.name)
def test_the_optimizer_is_divided_among_all_ranks_as_often_as_nodes_may_fail(who: DHP) -> None:
    batch, peaks = table(32), list[int]()
    for max_failures in range(3):
        job = replace(setting(), max_failures=max_failures)
        peaks.append(simulate(who, job, table(200), batch)[1].peak_bytes)
    # 12 layers of 8 kB, on 16 ranks
    assert np.diff(peaks).tolist() == [12 * 8000 // 16] * 2


@pytest.mark.parametrize("seed", range(3))
def test_ahead_of_the_uniform_plan_and_of_static_groups(seed: int) -> None:
    job, known, batch = setting(), table(500, 100 + seed), table(32, seed)
    found, result = simulate(DHP(), job, known, batch)
    assert found == DHP().configure(job, known)
    for other in ("uniform", "static-cp"):
        assert result.iteration_ms < simulate(planner(other), job, known, batch)[1].iteration_ms


def test_sums_of_gradients_lead_to_more_stages() -> None:
    job = setting()
    slow = replace(job, cluster=Cluster(devices_per_node=2, memory_bytes=None, intra_node=SLOW, inter_node=SLOW))
    known = table(200)
    free, counted = DHP().configure(job, known), DHP().configure(slow, known)
    assert counted.units[LLM].cp < free.units[LLM].cp
    assert counted.predicted_ms > free.predicted_ms


def test_what_fits_in_no_way_is_refused() -> None:
    message = (
        "num_nodes must be enough for 'dhp', got 8 of 2 devices; use more nodes, a smaller microbatch, or another "
        "planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DHP().configure(setting(10_000), table(50))
    with pytest.raises(ValueError, match=r"^samples must be one or more, got none; draw some from the data set$"):
        DHP().configure(setting(), table(0))


@pytest.mark.parametrize("who", [DHP(), dhp_across_nodes()], ids=lambda each: each.name)
@pytest.mark.parametrize("position", [0, 1], ids=["vision", "llm"])
def test_groups_are_of_one_rank_where_a_unit_was_profiled_without_rings(who: DHP, position: int) -> None:
    units = list(COSTS.units)
    without = [replace(each, curves=each.curves[:1]) for each in units[position].layers]
    units[position] = replace(units[position], layers=tuple(without), degrees=((1, 1),))
    job, batch = replace(setting(), costs=CostModel(units=tuple(units)), num_nodes=2), table(32)
    batch.units[LLM].tokens[0], batch.units[LLM].squares[0] = 10**5, 10**10  # worth a group of its own
    configuration, result = simulate(who, job, table(500), batch)
    assert configuration.units[LLM].cp > 1
    assert result.iteration_ms >= job.sample_ms(LLM, batch.units[LLM])[0]
