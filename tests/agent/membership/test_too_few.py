"""Too few nodes are left: the job waits a while for others, then saves what the survivors hold, and stops."""

from __future__ import annotations

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Interrupted, NodeLeaving, Tick
from tests.agent.membership.simulated import Job, started

WAIT_S = 10.0
SAVED = "resume with: resilient run --nodes 4 --resume /runs/x/checkpoints/step-00000003 train.py"


def waiting() -> Job:
    """Return a job of four nodes that needs four, and has lost one."""
    job = started(num_nodes=4, wait_for_nodes_s=WAIT_S)
    job.step(3)
    job.lose(1)
    job.answer()
    assert (job.machine.phase, job.stop) == (Phase.AGREEING, None)
    assert job.last("too_few") == {"num_missing": 1, "coming": [], "wait_s": WAIT_S}
    return job


def pass_time(job: Job, until_s: float) -> None:
    job.now = until_s
    job.feed(Tick())
    job.answer()


def check_stopped(job: Job, reason: str, exit_code: int = 3) -> None:
    assert [made.manifest.step for made in job.manifests] == [3]
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (exit_code, f"{reason}; {SAVED}")


def test_node_that_comes_in_time_takes_the_place_of_the_lost_one() -> None:
    job = waiting()
    pass_time(job, WAIT_S - 1)
    job.ready(job.connect())
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    generation = job.last("generation")
    assert (generation["nodes"], generation["version"], generation["cause"]) == ([0, 2, 3, 4], 3, "failure")
    assert job.kinds().count("too_few") == 1


def test_job_stops_with_a_checkpoint_when_nobody_has_come() -> None:
    job = waiting()
    pass_time(job, WAIT_S - 1)
    assert job.stop is None
    pass_time(job, WAIT_S)
    check_stopped(job, "3 nodes are live ([0, 2, 3]), 4 are needed")


def test_node_that_has_connected_is_waited_for_until_it_is_ready_or_lost() -> None:
    for is_lost in (False, True):
        job = waiting()
        node = job.connect()
        pass_time(job, 5 * WAIT_S)
        assert job.machine.phase is Phase.AGREEING
        if is_lost:
            job.lose(node)
            job.answer()
            check_stopped(job, "3 nodes are live ([0, 2, 3]), 4 are needed")
        else:
            job.ready(node)
            job.answer()
            assert job.machine.phase is Phase.RUNNING


def test_further_loss_while_waiting_does_not_prolong_it() -> None:
    job = waiting()
    pass_time(job, WAIT_S / 2)
    first, second = (pipeline.nodes for pipeline in job.plan.pipelines)
    rest = second if 1 in first else first
    job.lose(next(node for node in (first if 1 in first else second) if node != 1))
    job.answer()
    assert job.stop is None
    pass_time(job, WAIT_S)
    nodes = sorted(rest)
    check_stopped(job, f"2 nodes are live ({nodes}), 4 are needed")


def test_interruption_while_waiting_saves_at_once() -> None:
    job = waiting()
    job.feed(Interrupted(reason="SIGTERM"))
    job.answer()
    check_stopped(job, "interrupted (SIGTERM)", 130)


def test_loss_after_a_departure_does_not_prolong_the_wait() -> None:
    job = started(num_nodes=4, wait_for_nodes_s=WAIT_S)
    job.step(3)
    job.feed(NodeLeaving(node=1, reason="spot notice"))
    job.answer()
    pass_time(job, WAIT_S / 2)
    job.lose(2)
    job.answer()
    assert job.stop is None
    pass_time(job, WAIT_S)
    check_stopped(job, "2 nodes are live ([0, 3]), 4 are needed")


def test_waiting_is_no_stall() -> None:
    job = started(num_nodes=4, wait_for_nodes_s=1e6)
    job.step(3)
    job.feed(NodeLeaving(node=1, reason="spot notice"))
    job.answer()
    pass_time(job, 5e5)
    assert (job.machine.phase, job.stop) == (Phase.AGREEING, None)
    assert "detected" not in job.kinds()


WHY = ", for 2 pipelines of 2 nodes (max_failures=1, min_pipeline_nodes=2)"
AGAIN = "start again with: resilient run --nodes 4 train.py"


def starting(wait_s: float = WAIT_S) -> Job:
    """Return a job of four nodes that needs four, and has lost one before its first generation."""
    job = Job(num_nodes=4, wait_for_nodes_s=wait_s)
    for _ in range(4):
        job.connect()
    for node in (0, 2, 3):
        job.ready(node)
    job.lose(1)
    return job


def test_node_that_comes_in_time_before_the_first_generation_takes_the_place_of_the_lost_one() -> None:
    job = starting()
    assert job.last("too_few") == {"num_missing": 1, "coming": [], "wait_s": WAIT_S}
    pass_time(job, WAIT_S - 1)
    node = job.connect()
    pass_time(job, 5 * WAIT_S)
    assert (job.machine.phase, job.stop) == (Phase.STARTING, None), "it is waited for until it is ready"
    job.ready(node)
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    generation = job.last("generation")
    assert (generation["nodes"], generation["version"], generation["cause"]) == ([0, 2, 3, 4], 0, "start")
    assert job.kinds().count("too_few") == 1


def test_job_whose_lost_node_nobody_replaces_before_the_first_generation_is_to_be_started_again() -> None:
    job = starting()
    pass_time(job, WAIT_S - 1)
    assert job.stop is None
    pass_time(job, WAIT_S)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (3, f"3 nodes are live ([0, 2, 3]), 4 are needed{WHY}; {AGAIN}")


def test_job_that_is_not_to_wait_ends_with_a_node_lost_before_the_first_generation() -> None:
    job = starting(0.0)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (3, f"3 nodes are live ([0, 2, 3]), 4 are needed{WHY}; {AGAIN}")
    assert "too_few" not in job.kinds()


def test_job_that_was_started_with_too_few_nodes_waits_for_nobody() -> None:
    job = Job(num_nodes=3, wait_for_nodes_s=WAIT_S)
    job.start()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (3, f"3 nodes are live ([0, 1, 2]), 4 are needed{WHY}; {AGAIN}")


def test_job_that_is_not_to_wait_saves_at_once() -> None:
    job = started(num_nodes=4, wait_for_nodes_s=0.0)
    job.step(3)
    job.lose(1)
    job.answer()
    check_stopped(job, "3 nodes are live ([0, 2, 3]), 4 are needed")
