"""What DHP decides once: its prediction is what the simulation finds, samples fit, and it is ahead of static plans."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Configuration, Planner, Setting
from resilient.planners.published.dhp.planner import DHP
from resilient.planners.registry import planner
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_shares import kept_shares
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import COSTS, setting, table

SLOW = Link(bytes_per_s=1e6)


def simulate(who: Planner, job: Setting, known: SampleTable, batch: SampleTable) -> tuple[Configuration, Result]:
    found = who.configure(job, known)
    replicas = degraded_replicas(job, found, 0)
    return found, evaluate(job, found, who.assign(job, found, batch, replicas), batch, replicas)


def equal(count: int, vision: int, text: int) -> SampleTable:
    lengths = {"vision": np.full(count, vision), "llm": np.full(count, text)}
    return SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})


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
    job = replace(job, global_batch=found.num_microbatches * found.units[LLM].cp * microbatch)
    known = equal(job.global_batch, vision, text)
    found, result = simulate(DHP(), job, known, known)
    if job.global_batch == found.num_microbatches * found.units[LLM].cp * microbatch:
        assert 0.85 * found.predicted_ms < result.iteration_ms < found.predicted_ms * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(memory=st.integers(100_000, 3_000_000), seed=st.integers(0, 9))
def test_the_samples_it_was_asked_for_fit(memory: int, seed: int) -> None:
    job, known = setting(memory), table(32, seed)
    try:
        found = DHP().configure(job, known)
    except ValueError:
        assert memory < 400_000
        return
    assert sum(found.units[LLM].stage_layers) == 8
    assert simulate(DHP(), job, known, known)[1].peak_bytes <= memory


def test_room_is_left_for_samples_a_quarter_larger_than_those_known() -> None:
    # Groups of all 16 ranks hold the longest sample known, of 14.7, and would be faster.
    job, known = setting(900_000), table(200)
    found = DHP().configure(job, known)
    assert kept_shares(job, found, known).max() * 1.25 <= found.units[LLM].cp


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
