"""Entrain within memory: forwards run ahead as far as helps, and after losses every batch still fits."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import known_batches, simulated
from resilient.planners.planner import Configuration, Parallelism, Replica
from resilient.planners.published.entrain.planner import Entrain
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.templates.schedules.validator import validate
from tests.resilient.planners.jobs_of_planners import setting, table
from tests.resilient.planners.test_every_planner import planned_job


def test_forwards_run_ahead_no_further_than_helps() -> None:
    at, samples = setting(), table(200)
    found = Entrain().configure(at, samples)
    steps = [
        result.iteration_ms
        for lead in (1, 2, 3)
        for result in simulated(Entrain(), at, replace(found, lead=lead), known_batches(at, samples, 1))
    ]
    assert found.lead == 1 + int(np.argmin(steps)) > 1
    assert found.predicted_ms == min(steps)


@given(seed=st.integers(0, 2**32 - 1), part=st.sampled_from([0.7, 1.0, 1.5]))
@settings(max_examples=40, deadline=None)
def test_every_batch_fits_whose_samples_fit_alone(seed: int, part: float) -> None:
    """With such a part of the memory that the step would take without a limit, whatever is lost."""
    job, known, batch = planned_job(np.random.default_rng(seed))
    try:
        configuration = Entrain().configure(job, known)
    except ValueError:
        return  # there are too few devices
    (free,) = simulated(Entrain(), job, configuration, [batch])
    memory = int(part * free.peak_bytes)
    job = replace(job, cluster=replace(job.cluster, memory_bytes=memory))
    for lost in range(job.num_nodes):
        try:
            replicas = degraded_replicas(job, configuration, lost)
            budgets = MemoryBudget.of_each(job, configuration, replicas)
        except ValueError:
            return  # they have no memory for the state
        if np.any([budget.holds(batch) for budget in budgets if budget is not None], axis=0).all():
            assignment = Entrain().assign(job, configuration, batch, replicas)
            result = evaluate(job, configuration, assignment, batch, replicas)
            validate(result.timeline.schedule)
            assert result.peak_bytes <= memory
        else:
            with pytest.raises(ValueError, match=r"^tokens of sample \d+ in '\w+' must be <= "):
                Entrain().assign(job, configuration, batch, replicas)


def test_a_sample_goes_to_a_replica_that_has_memory_for_it() -> None:
    """Of the language model 70 tokens where half of the devices are lost, else 190."""
    units = {name: Parallelism(dp=2, pp=1, stage_layers=(layers,)) for name, layers in (("vision", 4), (LLM, 8))}
    configuration = Configuration(units=units, num_microbatches=4)
    replicas = [Replica(num_microbatches=4, speed=part, devices=part) for part in (0.5, 1.0)]
    at = setting(16 * 8_000 + 800 * 150)
    texts = {large: np.array([160, 150, 20, large, 10]) for large in (180, 200)}
    batches = {
        large: SampleTable(units={"vision": Lengths.of(0 * text), LLM: Lengths.of(text)})
        for large, text in texts.items()
    }
    free = Entrain().assign(setting(), configuration, batches[180], replicas)
    assert free.units[LLM].replica[texts[180] > 70].min() == 0
    found = Entrain().assign(at, configuration, batches[180], replicas)
    assert found.units[LLM].replica[texts[180] > 70].min() == 1
    assert evaluate(at, configuration, found, batches[180], replicas).peak_bytes <= 16 * 8_000 + 800 * 150
    message = (
        "tokens of sample 3 in 'llm' must be <= 190, which fit into memory alone, got 200; leave it out, or "
        "configure the job for longer samples"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Entrain().assign(at, configuration, batches[200], replicas)
