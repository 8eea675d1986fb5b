"""Nodes that are unlike the others are refused by name, unless they may differ in that."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeLost, Tick
from resilient.protocol.alike import Alike
from resilient.protocol.messages import Shutdown, Welcome
from tests.agent.membership.simulated import Job, job_spec

JOB = {"job": {"model": "m"}}


def told_last(job: Job) -> object:
    return job.told[-1].message


def joined_by(alike: Alike, *, allow_different: tuple[str, ...] = ()) -> Job:
    """Return a job in training, which a node tries to join that says this of itself."""
    own = {**JOB, "script": {"train.py": "1", "helpers": "1"}, "data": {"sample 3": "1", "sample 5": "1"}}
    job = Job(job_spec(alike=own), allow_different=allow_different)
    job.start()
    job.ready(job.connect(), job_spec(alike={**own, **alike}))
    return job


@pytest.mark.parametrize(
    ("alike", "cause"),
    [
        ({"script": {"train.py": "2", "helpers": "1"}},
         "script must be the same on all nodes, got train.py 2 on node 5 (h) and 1 on node 0 (h); copy the script and "
         "its modules to all nodes, or start the job with --allow-different script"),
        ({"data": {"sample 3": "2", "sample 5": "1"}},
         "data must be the same on all nodes, got sample 3 2 on node 5 (h) and 1 on node 0 (h); give the data set the "
         "same samples on all nodes, or start the job with --allow-different data"),
        ({"job": {"model": "n"}},
         "job must be the same on all nodes, got model n on node 5 (h) and m on node 0 (h); start the script with the "
         "same arguments on all nodes"),
        ({"data": {"sample 3": "2"}, "script": {"helpers": "2"}},
         "script and data must be the same on all nodes, got helpers 2 on node 5 (h) and 1 on node 0 (h); sample 3 2 "
         "on node 5 (h) and 1 on node 0 (h); copy the script and its modules to all nodes, or start the job with "
         "--allow-different script --allow-different data"),
        ({"data": {"sample 3": "2"}, "job": {"model": "n"}},
         "job and data must be the same on all nodes, got model n on node 5 (h) and m on node 0 (h); sample 3 2 on "
         "node 5 (h) and 1 on node 0 (h); start the script with the same arguments on all nodes"),
    ],
)  # fmt: skip
def test_joiner_that_differs_is_refused_by_name_and_the_job_goes_on(alike: Alike, cause: str) -> None:
    job = joined_by(alike)
    assert job.last("not_joined") == {"node": 5, "cause": cause}
    assert told_last(job) == Shutdown(exit_code=1, reason=f"cannot join: {cause}")
    assert (job.machine.phase, job.machine.generation, job.stop) == (Phase.RUNNING, 1, None)
    job.ready(job.connect())
    assert job.last("node_ready")["node"] == 6, "it is held against the first, not against who was refused"


def test_first_three_of_many_differences_are_told() -> None:
    own, other = ({"script": {f"m{i}": value for i in range(5)}} for value in "12")
    job = Job(job_spec(alike=own), num_nodes=2)
    for node in range(2):
        job.connect()
        job.ready(node, job_spec(alike=(own, other)[node]))
    assert job.stop is not None
    there = "on node 1 (h) and 1 on node 0 (h)"
    assert job.stop.reason == (
        f"node 1: script must be the same on all nodes, got m0 2 {there}, m1 2 {there}, m2 2 {there} and 2 more; copy "
        "the script and its modules to all nodes, or start the job with --allow-different script"
    )
    assert job.stop.exit_code == 1


def test_what_may_differ_is_recorded_and_the_joiner_admitted() -> None:
    job = joined_by({"data": {"sample 3": "2"}}, allow_different=("data",))
    difference = "sample 3 2 on node 5 (h) and 1 on node 0 (h)"
    assert job.last("difference_allowed") == {"node": 5, "what": "data", "difference": difference}
    assert job.last("node_ready")["node"] == 5


def test_what_may_not_differ_is_refused_though_something_else_may() -> None:
    job = joined_by({"data": {"sample 3": "2"}, "script": {"helpers": "2"}}, allow_different=("data",))
    assert job.last("not_joined")["cause"].startswith("script must be the same on all nodes, got helpers 2")
    assert "difference_allowed" not in job.kinds()


def test_module_that_only_one_of_two_has_imported_is_no_difference() -> None:
    job = joined_by({"script": {"train.py": "1", "plots": "1"}})
    assert job.last("node_ready")["node"] == 5


def test_node_of_another_package_is_refused_before_it_starts_workers() -> None:
    here, there = ({"versions": {"torch": version}, "package": {"sources": "1"}} for version in ("2.8", "2.9"))
    job = Job(num_nodes=4)
    for _ in range(4):
        job.connect(alike=here)
    for node in range(4):
        job.ready(node)
    job.answer()
    assert isinstance(told_last(job), Welcome)
    node = job.connect(alike=there)
    assert told_last(job) == Shutdown(
        exit_code=1,
        reason="cannot join: versions must be the same on all nodes, got torch 2.9 on node 4 (h) and 2.8 on node 0 "
        "(h); install the same versions on all nodes, or start the job with --allow-different versions",
    )
    assert job.last("not_joined")["node"] == node
    assert job.stop is None


# ------------------------------------------------------------ guests: nodes that the launcher has not started


def guest_first(guest: Alike, own: Alike, told: Alike | None = None) -> Job:
    """Return a job of four nodes of the launcher's own, before which a guest was ready, as node 0."""
    job = Job(job_spec(alike=own), num_nodes=4)
    job.connect(alike=told, is_guest=True)
    for _ in range(4):
        job.connect(alike={"package": {"sources": "1"}})
    job.ready(0, job_spec(alike=guest, num_steps=7))
    assert job.kinds() == ["node_connected"] * 5
    for node in range(1, 5):
        job.ready(node)
    job.answer()
    return job


@pytest.mark.parametrize(
    ("guest", "told", "cause"),
    [
        ({"job": {"model": "n"}}, {},
         "job must be the same on all nodes, got model n on node 0 (h) and m on node 1 (h); start the script with the "
         "same arguments on all nodes"),
        (JOB, {"package": {"sources": "2"}},
         "package must be the same on all nodes, got sources 2 on node 0 (h) and 1 on node 1 (h); install the same "
         "version of resilient, unchanged, on all nodes, or start the job with --allow-different package"),
    ],
)  # fmt: skip
def test_guest_that_is_ready_first_and_differs_is_refused_alone(guest: Alike, told: Alike, cause: str) -> None:
    job = guest_first(guest, JOB, told)
    assert job.last("not_joined") == {"node": 0, "cause": cause}
    assert Shutdown(exit_code=1, reason=f"cannot join: {cause}") in [tell.message for tell in job.told]
    assert (job.machine.phase, job.stop) == (Phase.RUNNING, None)
    assert job.last("generation")["nodes"] == [1, 2, 3, 4]
    assert job.last("job")["num_steps"] == 10


def test_guest_that_is_ready_first_and_alike_takes_part_from_the_start() -> None:
    job = guest_first(JOB, JOB)
    assert (job.machine.generation, job.last("generation")["nodes"]) == (1, [0, 1, 2, 3, 4])
    assert job.last("job")["num_steps"] == 10


def test_guest_that_differs_is_refused_alone_when_it_is_the_last_to_be_ready() -> None:
    job = Job(job_spec(alike=JOB), num_nodes=4)
    for node in range(5):
        job.connect(is_guest=node == 2)
    for node in (0, 1, 3, 4):
        job.ready(node)
    assert job.machine.phase is Phase.STARTING
    job.ready(2, job_spec(alike={"job": {"model": "n"}}))
    job.answer()
    assert job.last("not_joined")["cause"].startswith("job must be the same on all nodes, got model n ")
    assert (job.machine.phase, job.last("generation")["nodes"]) == (Phase.RUNNING, [0, 1, 3, 4])


def test_job_begins_with_its_guests_when_none_of_the_launchers_own_nodes_is_left() -> None:
    job = Job(job_spec(alike=JOB), num_nodes=1)
    for node in range(5):
        job.connect(is_guest=node != 0)
    for node in range(1, 5):
        job.ready(node)
    job.feed(NodeLost(node=0, cause="node lost"))
    job.feed(Tick())
    job.answer()
    assert (job.machine.phase, job.last("generation")["nodes"]) == (Phase.RUNNING, [1, 2, 3, 4])


def test_guest_that_is_lost_before_the_job_begins_is_not_missed() -> None:
    job = Job(job_spec(alike=JOB), num_nodes=4)
    job.connect(is_guest=True)
    job.ready(0)
    job.lose(0)
    for node in range(1, 4):
        job.connect()
        job.ready(node)
    assert job.machine.phase is Phase.STARTING
    job.connect()
    job.ready(4)
    job.answer()
    assert job.last("generation")["nodes"] == [1, 2, 3, 4]
