"""Nodes that are unlike the others are refused by name, unless they may differ in that."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
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
    assert job.last("node_lost") == {"node": 5, "cause": f"cannot join: {cause}"}
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
    assert job.last("node_lost")["cause"].startswith("cannot join: script must be the same on all nodes, got helpers 2")
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
    assert job.last("node_lost")["node"] == node
    assert job.stop is None
