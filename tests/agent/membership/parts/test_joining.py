"""Nodes that come to the coordinator as one queue: who is still at the door is waited for, after the last nobody is."""

from __future__ import annotations

from resilient.agent.membership.parts.events import Tick
from resilient.protocol.messages import Regroup
from tests.agent.membership.simulated import regroups, started


def test_joiners_of_one_queue_join_together_as_soon_as_the_last_is_ready() -> None:
    job = started(num_nodes=4)
    for num_behind in (2, 2):
        job.ready(job.connect(num_behind=num_behind))
        assert regroups(job, 0) == [], "others are at the door"
    last = job.connect(num_behind=0)
    assert regroups(job, 0) == []
    job.ready(last)
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True)], "nobody else is coming"
    job.answer()
    assert {4, 5, 6} <= set(job.last("generation")["nodes"])


def test_joiners_of_a_queue_that_was_empty_in_between_wait_for_others() -> None:
    job = started(num_nodes=4)
    together = [job.connect(), job.connect(num_behind=1), job.connect()]
    for node in together:
        job.ready(node)
    assert regroups(job, 0) == []
    job.now = 0.25
    job.feed(Tick())
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True)]


def test_joiner_waits_for_who_is_at_the_door_no_longer_than_a_moment() -> None:
    """Who is there may be no node."""
    job = started(num_nodes=4)
    job.ready(job.connect(num_behind=1))
    job.now = 0.2
    job.feed(Tick())
    assert regroups(job, 0) == []
    job.now = 0.25
    job.feed(Tick())
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True)]
