"""Devices that divide a copy go through their cells in step; when some are lost, the others still have a whole copy."""

from __future__ import annotations

import numpy as np
import pytest

from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import described_step
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Replica
from tests.resilient.planners.jobs_of_planners import setting


@pytest.mark.parametrize(
    ("num_replicas", "cp", "longest"),
    [
        (8, 1, [4, 4, 4, 4, 8, 8, 8, 8]),
        (7, 1, [7, 7, 7, 7, 7, 7, 7]),  # three alone would not have all of a copy
        (3, 1, [3, 3, 3]),
        (4, 2, [2, 2, 4, 4]),
        (2, 8, [1, 2]),  # each has two copies
    ],
)
def test_each_group_of_those_that_are_left_takes_as_long_as_its_longest(
    num_replicas: int, cp: int, longest: list[int]
) -> None:
    job = setting()
    spread = {unit.name: Parallelism(dp=8, pp=1, cp=cp, stage_layers=(len(unit.layers),)) for unit in job.costs.units}
    configuration = Configuration(units=spread, num_microbatches=1, colocated=True, shard=4)
    own, one = np.arange(num_replicas), np.ones(num_replicas, np.int64)
    place = Place(replica=own, microbatch=0 * one, group=0 * one, degree=one)
    batch = SampleTable(units=dict.fromkeys(spread, Lengths.of(1000 * (own + 1))))
    replicas = [Replica(num_microbatches=1)] * num_replicas
    step, _, _ = described_step(job, configuration, Assignment(units=dict.fromkeys(spread, place)), batch, replicas)
    lengths = 1000 * np.array(longest)
    forward = job.costs.by_name["llm"].forward()
    expected = [forward.call_ms(tokens, tokens**2) for tokens in lengths.tolist()]
    assert np.asarray(step.costs.forward_ms)[-num_replicas:, 0, 0].tolist() == pytest.approx(expected)
