"""An interrupted job ends after the running step with a checkpoint, in time, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Interrupted, Tick
from resilient.protocol.messages import Failed, Regroup, Shutdown
from resilient.state.manifest import Manifest, SavedState
from tests.agent.membership.simulated import RECIPE, STATES, Job

GRACE_S = 120.0


def started(**changes: Any) -> Job:
    job = Job(**changes)
    job.start()
    assert job.machine.phase is Phase.RUNNING
    return job


def interrupt(job: Job) -> None:
    job.feed(Interrupted(reason="SIGTERM"))


def pass_time(job: Job, until_s: float) -> None:
    job.now = until_s
    job.feed(Tick())


def path_of(step: int) -> str:
    return f"/runs/x/checkpoints/step-{step:08d}"


def check_interrupted(job: Job, step: int) -> None:
    """Check that the job ended with 130 and a whole checkpoint of the step, and says so."""
    assert [(made.path, set(made.manifest.states)) for made in job.manifests] == [(path_of(step), set(STATES))]
    assert job.stop is not None
    assert job.stop.exit_code == 130
    assert job.stop.reason == (
        f"interrupted (SIGTERM); resume with: resilient run --nodes 5 --resume {path_of(step)} train.py"
    )


def test_job_stops_after_the_running_step_with_a_checkpoint() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    assert job.last("interrupted") == {"reason": "SIGTERM", "grace_s": GRACE_S}
    assert [state.inbox for state in job.workers.values()] == [
        [Regroup(generation=2, at_boundary=True, heard_step=3)]
    ] * 5
    job.step(4)
    job.answer()
    check_interrupted(job, 4)


def test_checkpoint_that_is_there_is_not_written_again() -> None:
    states = {name: (SavedState(file=name, num_bytes=1, sha256="f"),) for name in STATES}
    job = started(resume=("/ckpt", Manifest(step=7, recipe=RECIPE, states=states)))
    interrupt(job)
    job.answer()
    assert job.manifests == []
    assert job.stop is not None
    assert job.stop.reason == "interrupted (SIGTERM); resume with: resilient run --nodes 5 --resume /ckpt train.py"


def test_second_interruption_ends_at_once_and_says_what_is_left() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    job.now += 0.9
    interrupt(job)
    assert (job.stop, job.kinds().count("interrupted")) == (None, 1), "so soon it is the same wish"
    job.now += 0.1
    interrupt(job)
    assert job.manifests == []
    assert job.stop is not None
    assert job.stop.exit_code == 130
    assert job.stop.reason == (
        "interrupted twice (SIGTERM); there is no checkpoint; start again with: resilient run --nodes 5 train.py"
    )


def test_interruption_before_the_job_has_begun_ends_at_once() -> None:
    job = Job()
    job.connect()
    interrupt(job)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (130, "interrupted (SIGTERM)")


@pytest.mark.parametrize("moment", ["agreeing", "installing"])
def test_interruption_during_a_recovery_saves_what_was_agreed_on(moment: str) -> None:
    job = started()
    job.step(3)
    job.lose(2)
    if moment == "installing":
        for worker in list(job.workers):
            job.answer([worker])
            if job.machine.phase is Phase.INSTALLING:
                break
        assert job.machine.phase is Phase.INSTALLING
    interrupt(job)
    job.answer()
    check_interrupted(job, 3)


def test_interruption_during_a_join_needs_no_other_boundary() -> None:
    job = started()
    job.step(3)
    job.ready(job.connect())
    assert job.machine.phase is Phase.AGREEING
    interrupt(job)
    job.answer()
    check_interrupted(job, 3)


def test_node_lost_while_the_boundary_is_waited_for_costs_the_step_only() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    job.lose(2)
    job.answer()
    check_interrupted(job, 3)


def test_node_lost_while_the_checkpoint_is_written_has_the_others_write_it() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    while job.machine.phase is not Phase.SAVING:
        for worker in list(job.workers):
            if job.workers[worker].inbox and job.machine.phase is not Phase.SAVING:
                job._act(worker, job.workers[worker].inbox.pop(0))
    job.lose(next(node for node, _ in job.machine.awaiting))
    job.answer()
    check_interrupted(job, 3)


def test_step_that_takes_too_long_is_dropped_for_the_checkpoint() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    pass_time(job, GRACE_S / 2)
    assert all(state.inbox[-1] == Regroup(generation=2, heard_step=3) for state in job.workers.values())
    job.answer()
    check_interrupted(job, 3)


def test_worker_that_does_not_report_leaves_the_others_time_for_the_checkpoint() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    pass_time(job, GRACE_S / 2)
    job.answer([worker for worker in job.workers if worker[0] != 4])
    pass_time(job, 0.625 * GRACE_S)
    pass_time(job, 0.75 * GRACE_S)
    assert job.last("node_lost") == {
        "node": 4,
        "cause": "no report within 30 s; where it hangs is at the end of /runs/x/logs/node-4/worker-0.log",
    }
    job.answer()
    check_interrupted(job, 3)


def test_checkpoint_that_takes_too_long_is_given_up() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    pass_time(job, GRACE_S)
    assert job.manifests == []
    assert job.stop is not None
    assert job.stop.exit_code == 130
    assert job.stop.reason == (
        "interrupted (SIGTERM); the checkpoint was not written within 120 s; there is no checkpoint; start again with: "
        "resilient run --nodes 5 train.py"
    )


def test_last_step_of_an_interrupted_job_is_its_checkpoint() -> None:
    job = started()
    job.step(10)
    interrupt(job)
    job.finish()
    job.answer()
    assert [made.path for made in job.manifests] == [path_of(10)]
    assert job.stop is not None
    assert job.stop.exit_code == 130
    assert job.stop.reason == (
        f"interrupted (SIGTERM); all steps are done and saved in {path_of(10)}; run the end of the script with: "
        f"resilient run --nodes 5 --resume {path_of(10)} train.py"
    )


def test_loss_of_all_nodes_after_the_interruption_is_told_with_it() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    job.lose(0, 1, 2, 3, 4)
    assert job.stop is not None
    assert job.stop.exit_code == 130
    assert job.stop.reason == (
        "interrupted (SIGTERM); all nodes are lost, the last one (4) because of: node lost; there is no checkpoint; "
        "start again with: resilient run --nodes 5 train.py"
    )


def test_script_that_fails_after_the_interruption_is_the_reason() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    job.say((0, 0), Failed(error="ValueError: no"))
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason.startswith("node 0: ValueError: no; resume with: ")


def test_checkpoint_whose_manifest_cannot_be_written_is_none() -> None:
    job = started()
    job.step(3)
    interrupt(job)
    job.step(4)
    job.manifest_error = f"{path_of(4)} cannot be written ([Errno 28] No space left on device); make room there"
    job.answer()
    assert job.stop is None
    pass_time(job, GRACE_S)
    assert job.stop is not None
    assert job.stop.exit_code == 130
    assert job.stop.reason == (
        "interrupted (SIGTERM); the checkpoint was not written within 120 s; there is no checkpoint; start again with: "
        "resilient run --nodes 5 train.py"
    )


# ---------------------------------------------------------------- before the first generation


def test_nodes_that_are_waited_for_are_named_ever_more_rarely_and_left_behind_in_the_end() -> None:
    job = Job(start_timeout_s=600.0)
    for _ in range(5):
        job.connect()
    for node in (0, 1, 2, 3):
        job.ready(node)
    notices: list[tuple[float, list[int]]] = []
    for second in range(0, 600, 10):
        before = len(job.records)
        pass_time(job, second)
        notices += [(second, record.fields["nodes"]) for record in job.records[before:] if record.kind == "waiting"]
    assert notices == [(60, [4]), (120, [4]), (240, [4]), (480, [4])]
    pass_time(job, 600.0)
    assert job.told[-1].message == Shutdown(exit_code=1, reason="evicted: not ready within 600 s; see its log")
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert job.last("generation")["nodes"] == [0, 1, 2, 3]


def test_nodes_that_never_come_end_the_job() -> None:
    job = Job(start_timeout_s=600.0)
    pass_time(job, 0.0)
    pass_time(job, 600.0)
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == "all nodes went away, or did not come, before the job began; see /runs/x/logs"
