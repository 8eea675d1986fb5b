"""The best of all planners' answers is as fast as each of them, and is assigned by whose it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.own.best import BestOfAll
from resilient.planners.planner import Replica
from resilient.planners.registry import PLANNERS, planner
from tests.resilient.planners.small_jobs import small_job


@pytest.mark.parametrize("seed", range(3))
def test_no_planner_is_faster_than_the_best_of_all(seed: int) -> None:
    setting, known, batch = small_job(seed, 1)
    setting = replace(setting, num_nodes=3)
    best = BestOfAll().configure(setting, known)
    batches = known_batches(setting, known, 4)
    times: dict[str, float] = {}
    for name in PLANNERS:
        try:
            answer = planner(name).configure(setting, known)
        except ValueError:
            continue
        (answer,) = timed(planner(name), setting, [answer], batches)
        times[name] = answer.predicted_ms
    assert len(times) > 5
    assert best.predicted_ms == min(times.values())
    theirs = planner(best.assigned_by).assign(
        setting, replace(best, assigned_by=""), batch, [Replica(num_microbatches=3)]
    )
    ours = BestOfAll().assign(setting, best, batch, [Replica(num_microbatches=3)])
    for unit, place in ours.units.items():
        assert place.microbatch.tolist() == theirs.units[unit].microbatch.tolist()


def test_job_that_nobody_has_an_answer_for_is_refused() -> None:
    setting, known, _ = small_job(0, 1)
    tiny = replace(setting, cluster=replace(setting.cluster, memory_bytes=1))
    with pytest.raises(ValueError, match=r"^num_pipelines must be one that 'resilient' has an answer for"):
        BestOfAll().configure(tiny, known)
