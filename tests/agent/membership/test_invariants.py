"""The invariants of the machine can be broken, and say what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilient.agent.membership.context import Phase
from resilient.agent.membership.machine import MembershipError
from resilient.agent.membership.next_generation.forming import Checkpoint
from resilient.protocol.messages import WorkerProgress
from tests.agent.membership.simulated import Job, outcome, started


def running() -> Job:
    job = started(num_nodes=6)
    job.step(3)
    job.machine.validate()
    return job


def agreeing() -> Job:
    job = running()
    job.lose(2)
    job.machine.validate()
    assert job.machine.phase is Phase.AGREEING
    return job


def enter_phase(phase: Phase) -> Callable[[Job], None]:
    def spoil(job: Job) -> None:
        job.machine.lifecycle._phase = phase

    return spoil


def skip_generations(job: Job) -> None:
    job.machine.lifecycle.context.next_generation()
    job.machine.lifecycle.context.next_generation()


def take_a_step_back(job: Job) -> None:
    job.machine.lifecycle.progress.commit(outcome(2))


def forget_a_node(job: Job) -> None:
    del job.machine.lifecycle.context.members[4]


def admit_nobody(job: Job) -> None:
    job.machine.members[0].admitted = False


def count_a_stranger(job: Job) -> None:
    job.machine.lifecycle.participants.note_finished((9, 0))


def plan_without_asking(job: Job) -> None:
    job.machine.lifecycle.job.take(99)


def count_a_checkpoint_twice(job: Job) -> None:
    job.machine.lifecycle.checkpoints._whole += 2 * [Checkpoint(step=1, path="/c")]


def turn_back_time(job: Job) -> None:
    job.machine.lifecycle.context.begin(-1.0)


def have_failed(job: Job) -> None:
    job.machine.lifecycle.ending.note_failure("no")


def grow_a_worker(job: Job) -> None:
    job.machine.members[3].done.add(7)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (enter_phase(Phase.AGREEING), "a change is not under way while agreeing; nobody is waited for while agreeing"),
        (enter_phase(Phase.STARTING), "the job is starting in generation 1; the job starts again after running"),
        (skip_generations, "generation 3 follows 1"),
        (take_a_step_back, "step 2 follows 3, and is not what a new generation loads"),
        (forget_a_node, "nodes [4] take part in generation 1 and are gone"),
        (admit_nobody, "nodes [0] have a place and were not told"),
        (count_a_stranger, "[(9, 0)] have finished without a place"),
        (plan_without_asking, "plans for 99 nodes are there, asked for were 6"),
        (count_a_checkpoint_twice, "a checkpoint is counted twice"),
        (turn_back_time, "the job advanced in the future; time goes back from 0.0 to -1.0"),
        (have_failed, "the job has failed and is running"),
        (grow_a_worker, "node 3 has workers that it was not started with"),
    ],
)
def test_broken_invariant_of_a_running_job_is_named(spoil: Callable[[Job], None], found: str) -> None:
    job = running()
    spoil(job)
    with pytest.raises(MembershipError) as error:
        job.machine.validate()
    assert error.value.reason == f"the membership is inconsistent: {found}"


def test_report_of_a_node_that_is_gone_is_named() -> None:
    job = agreeing()
    change = job.machine.lifecycle.change
    assert change is not None
    change.hear((2, 0), WorkerProgress(version=3, complete=False))
    with pytest.raises(MembershipError, match=r"inconsistent: reports of nodes \[2\] count, which are gone\n"):
        job.machine.validate()


def test_stop_is_for_good() -> None:
    job = running()
    job.lose(*range(6))
    assert job.machine.phase is Phase.STOPPED
    enter_phase(Phase.RUNNING)(job)
    with pytest.raises(MembershipError, match=r"the job goes on \(running\) after it was stopped"):
        job.machine.validate()


def test_steps_may_go_back_to_what_a_new_generation_loads() -> None:
    job = running()
    lifecycle = job.machine.lifecycle
    lifecycle.checkpoints._whole.append(Checkpoint(step=2, path="/c"))
    lifecycle.context.next_generation()
    lifecycle.progress.commit(outcome(2))
    job.machine.validate()
