"""A coordinator without nodes of its own: it waits for others, and lets as many train as may."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeLeaving, Tick
from tests.agent.membership.simulated import Job, job_spec

NEVER_S = 10 * 86400.0


def _job(least: int, most: int | None = None) -> Job:
    return Job(job_spec(min_pipeline_nodes=1), num_nodes=least, most_nodes=most, has_own_nodes=False)


def _join(job: Job) -> int:
    node = job.connect(is_guest=True)
    job.ready(node)
    return node


def _nodes(job: Job) -> list[int]:
    return job.last("generation")["nodes"]


def _take_in(job: Job) -> None:
    """Have the workers reach the next boundary, and those that wait be let in."""
    job.answer()
    job.step(job.machine.status()["step"] + 1)
    job.answer()


def test_it_waits_for_the_least_number_and_says_so() -> None:
    job = _job(3)
    job.feed(Tick())
    assert job.last("waiting") == {"nodes": [], "num_missing": 3, "waited_s": 0}
    _join(job)
    _join(job)
    job.now = 70.0
    job.feed(Tick())
    assert job.last("waiting") == {"nodes": [], "num_missing": 1, "waited_s": 70}
    job.now = NEVER_S
    job.feed(Tick())
    assert (job.machine.phase, job.stop) == (Phase.STARTING, None)
    _join(job)
    assert _nodes(job) == [0, 1, 2]


def test_who_goes_away_before_it_began_is_replaced() -> None:
    job = _job(2)
    _join(job)
    job.lose(0)
    job.feed(NodeLeaving(node=_join(job), reason="asked to leave"))
    _join(job)
    assert job.machine.phase is Phase.STARTING
    _join(job)
    assert _nodes(job) == [2, 3]


def test_who_is_too_slow_goes_and_the_job_waits_on() -> None:
    job = _job(2)
    _join(job)
    job.feed(Tick())
    job.now = NEVER_S
    job.connect(is_guest=True)
    job.feed(Tick())
    assert 1 in job.machine.members
    job.now += 1800.0
    job.feed(Tick())
    assert job.last("node_lost")["node"] == 1
    assert (job.machine.phase, job.stop) == (Phase.STARTING, None)
    _join(job)
    assert _nodes(job) == [0, 2]


@pytest.mark.parametrize("goes", [0, 3])
def test_more_than_may_train_stand_by_until_there_is_room(goes: int) -> None:
    job = _job(2, 3)
    for _ in range(2):
        _join(job)
    assert _nodes(job) == [0, 1]
    for _ in range(3):
        _join(job)
    _take_in(job)
    assert _nodes(job) == [0, 1, 2]
    generation = job.machine.generation
    _take_in(job)
    assert job.machine.generation == generation, "nobody else is let in"
    job.lose(goes)
    _take_in(job)
    assert _nodes(job) == ([1, 2, 3] if goes == 0 else [0, 1, 2])


def test_error_of_the_first_script_ends_the_job_but_a_later_one_costs_a_node() -> None:
    job = _job(2)
    job.connect(is_guest=True)
    job.end_worker((0, 0), 1, "no such file")
    assert job.stop is not None
    assert job.stop.exit_code == 1
    job = _job(2)
    _join(job)
    job.connect(is_guest=True)
    job.end_worker((1, 0), 1, "no such file")
    assert (job.machine.phase, job.stop) == (Phase.STARTING, None)
    _join(job)
    assert _nodes(job) == [0, 2]
