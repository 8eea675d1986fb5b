"""What fits before nodes are lost fits afterwards, in as many microbatches as it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Configuration, Parallelism, Planner, Replica
from resilient.planners.published.dflop.planner import Dflop
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.templates.schedules.validator import validate
from tests.resilient.planners.jobs_of_planners import setting, table

EVERY: list[Planner] = [Dflop(), DistTrain()]


def strange(kind: str, seed: int) -> SampleTable:
    """A batch of one sample, without pictures, with one sample that is longer than all others, or as it is."""
    batch = table(1 if kind == "one" else 32, seed)
    vision, llm = (batch.units[name].tokens.copy() for name in ("vision", LLM))
    if kind == "no pictures":
        vision[:] = 0
    elif kind == "giant":
        vision[0], llm[0] = 2 * vision.max() + 1, 2 * llm.max() + 1
    return SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(llm)})


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.name)
@settings(max_examples=20, deadline=None)
@given(
    memory=st.integers(300_000, 1_000_000),
    seed=st.integers(0, 20),
    lost=st.integers(0, 6),
    kind=st.sampled_from(["as it is", "one", "no pictures", "giant"]),
)
def test_what_fits_alone_fits_after_losses(each: Planner, memory: int, seed: int, lost: int, kind: str) -> None:
    job, batch = setting(memory), strange(kind, seed)
    try:
        found = each.configure(job, table(64, seed))
        replicas = degraded_replicas(job, found, lost)
    except ValueError:
        return  # there is no room for the state
    rooms = [budget.units for budget in MemoryBudget.of_each(job, found, replicas) if budget is not None]
    if all(any((batch.units[name].tokens * own.parts.max()).max() > 1 for name, own in of.items()) for of in rooms):
        with pytest.raises(ValueError, match=r"^tokens of sample \d+ in '\w+' must be <= "):
            each.assign(job, found, batch, replicas)
        return
    assignment, again = (each.assign(job, found, batch, replicas).units[LLM] for _ in range(2))
    np.testing.assert_array_equal(assignment.replica, again.replica)
    np.testing.assert_array_equal(assignment.microbatch, again.microbatch)
    result = evaluate(job, found, each.assign(job, found, batch, replicas), batch, replicas)
    validate(result.timeline.schedule)
    assert result.peak_bytes <= memory + 1


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.name)
def test_a_replica_that_lost_devices_leaves_what_it_has_no_room_for_to_others(each: Planner) -> None:
    """The optimizer of replicas that lost devices takes what a long sample would need."""
    units = {
        "vision": Parallelism(dp=2, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=2, pp=2, stage_layers=(4, 4)),
    }
    found = Configuration(units=units, num_microbatches=4)
    batch = SampleTable(units={name: Lengths.of(np.array([1500, *[50] * 7])) for name in units})
    replicas = [Replica(num_microbatches=2, speed=0.5, devices=0.5), Replica(num_microbatches=4)]
    job = setting(4 * 16_000 + 4 * 100 * 1500)
    small, large = (
        min(1 / float(own.parts.max()) for own in budget.units.values())
        for budget in MemoryBudget.of_each(job, found, replicas)
        if budget is not None
    )
    assert small < 1500 < large
    assignment = each.assign(job, found, batch, replicas)
    assert set(assignment.units[LLM].replica.tolist()) == {1}
    assert evaluate(job, found, assignment, batch, replicas).peak_bytes <= 4 * 16_000 + 4 * 100 * 1500


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.name)
def test_there_are_more_microbatches_where_so_few_do_not_hold_a_batch(each: Planner) -> None:
    """Room is for 1500 tokens in the two microbatches that the first stage has at a time."""
    units = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=1, pp=2, stage_layers=(4, 4)),
    }
    found = Configuration(units=units, num_microbatches=2)
    batch = SampleTable(
        units={"vision": Lengths.of(np.zeros(20, np.int64)), LLM: Lengths.of(np.full(20, 300))},
    )
    memory = 4 * 16_000 + 4 * 100 * 1500
    assignment = each.assign(setting(memory), found, batch, [Replica(num_microbatches=2)])
    assert assignment.units[LLM].microbatch.max() >= 2
    result = evaluate(setting(memory), found, assignment, batch, [Replica(num_microbatches=2)])
    assert result.peak_bytes <= memory
