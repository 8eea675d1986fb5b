"""What planners are given: jobs and replicas with something in them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from resilient.planners.planner import Configuration, Replica
from tests.resilient.planners.jobs_of_planners import setting


@pytest.mark.parametrize(("count", "speed"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_replica_without_work_or_speed_is_refused(count: int, speed: float) -> None:
    message = f"num_microbatches must be >= 1 and speed > 0, got {count} and {speed}; leave out pipelines without work"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Replica(num_microbatches=count, speed=speed)


@pytest.mark.parametrize("name", ["num_nodes", "global_batch", "microbatch"])
def test_a_job_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be >= 1, got 0; a job has one at least$"):
        replace(setting(), **{name: 0})


def test_a_stage_that_runs_behind_the_next_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^lead must be >= 1, got 0; 1 is 1F1B, 2 is eager 1F1B$"):
        Configuration(units={}, num_microbatches=1, lead=0)
