"""The last checkpoint is of copies that are equal, or that most witnesses agree with; otherwise there is none."""

from __future__ import annotations

from collections.abc import Mapping

from resilient.agent.membership.parts.events import Interrupted
from resilient.protocol.messages import Report
from tests.agent.membership.simulated import STATES, Job, job_spec, started

WHY = (
    "all copies of a layer's state must be equal, got different ones after step 1 ({}) and no majority to tell which "
    "is right; check the memory of these nodes, and keep three copies (max_failures=2) or more for most to decide"
)
AGAIN = "; there is no checkpoint; start again with: resilient run --nodes {} train.py"
RESUME = "; resume with: resilient run --nodes {} --resume /runs/x/checkpoints/step-00000001 train.py"


def saving(num_copies: int) -> Job:
    """Return a job of nodes that hold everything each, about to be told to save step 1: it is interrupted."""
    job = started(num_copies, spec=job_spec(max_failures=num_copies - 1, min_pipeline_nodes=1))
    job.feed(Interrupted(reason="SIGTERM"))
    job.step(1)
    return job


def writers(job: Job) -> Mapping[str, int]:
    """Return the nodes that have written what the manifest names, by state."""
    (write,) = job.manifests
    return {name: write.nodes[saved.file] for name, (saved,) in write.manifest.states.items()}


def stop_of(job: Job) -> tuple[int, str]:
    assert job.stop is not None
    return job.stop.exit_code, job.stop.reason


def test_all_who_hold_states_are_asked_and_equal_copies_are_a_checkpoint() -> None:
    job = saving(3)
    job.answer()
    assert stop_of(job) == (130, "interrupted (SIGTERM)" + RESUME.format(3))
    assert set(writers(job)) == set(STATES)
    assert "replica_dropped" not in job.kinds()


def test_damaged_copy_of_a_writer_is_written_again_by_a_sound_holder() -> None:
    undamaged = saving(3)
    undamaged.answer()
    victim = writers(undamaged)[STATES[0]]
    job = saving(3)
    job.workers[victim, 0].damaged = {STATES[0]: 7}
    job.answer()
    assert stop_of(job) == (130, "interrupted (SIGTERM)" + RESUME.format(3))
    assert writers(job)[STATES[0]] != victim
    assert set(writers(job)) == set(STATES)
    assert job.last("replica_dropped") == {"node": victim, "local_rank": 0, "states": [STATES[0]], "step": 1}


def test_damaged_copy_that_was_not_to_be_written_is_told_too() -> None:
    job = saving(3)
    job.workers[2, 0].damaged = {STATES[0]: 7}
    job.answer()
    assert stop_of(job)[0] == 130
    assert job.last("replica_dropped")["node"] == 2
    assert len(job.manifests) == 1


def test_two_copies_that_differ_are_no_checkpoint() -> None:
    job = saving(2)
    job.workers[1, 0].damaged = {STATES[0]: 7, STATES[2]: 7}
    job.answer()
    named = "layer.0 on nodes 0, 1; layer.2 on nodes 0, 1"
    reason = f"interrupted (SIGTERM), and there is no checkpoint of step 1: {WHY.format(named)}{AGAIN.format(2)}"
    assert stop_of(job) == (130, reason)
    assert job.manifests == []


def test_copy_of_a_damaged_copy_does_not_outvote_the_last_witness() -> None:
    job = saving(3)
    for node in (0, 1):
        job.workers[node, 0].damaged = {STATES[0]: 7}
    job.workers[0, 0].made_of = {STATES[0]: 1}
    job.answer()
    named = "layer.0 on nodes 0 (made of node 1's), 1, 2"
    reason = f"interrupted (SIGTERM), and there is no checkpoint of step 1: {WHY.format(named)}{AGAIN.format(3)}"
    assert stop_of(job) == (130, reason)


def test_too_few_nodes_with_copies_that_differ_name_the_checkpoint_before() -> None:
    job = started(4, spec=job_spec(checkpoint_every=1))
    job.step(1)
    for worker in job.placed():
        job.say(worker, job.saved(1, 1, job.workers[worker].current))
    job.step(2)
    lost = job.plan.pipelines[0].nodes[0]
    survivors = [worker for worker in job.workers if worker[0] != lost]
    for worker in survivors:
        job.workers[worker].damaged = dict.fromkeys(STATES, worker[0])
    job.lose(lost)
    job.answer()
    code, reason = stop_of(job)
    assert code == 3
    assert reason.startswith("3 nodes are live (")
    assert ", 4 are needed, and there is no checkpoint of step 2: all copies of a layer's state must be " in reason
    assert reason.endswith(RESUME.format(4))


def test_devices_of_different_kinds_are_not_compared() -> None:
    job = saving(2)
    job.workers[0, 0].device = "loom"
    job.workers[1, 0].damaged = {STATES[0]: 7}
    job.answer()
    assert stop_of(job) == (130, "interrupted (SIGTERM)" + RESUME.format(2))


def test_who_holds_states_that_others_write_is_waited_for_and_if_lost_done_without() -> None:
    job = started(5, spec=job_spec(max_failures=4, min_pipeline_nodes=1))
    job.step(1)
    job.feed(Interrupted(reason="SIGTERM"))
    for worker, state in job.workers.items():
        state.inbox.clear()
        job.say(worker, Report(generation=2, progress=state.progress()))
    assert job.machine.awaiting == set(job.workers)
    (idle,) = (worker for worker, state in job.workers.items() if not state.inbox[0].states)
    job.lose(idle[0])
    job.answer()
    assert stop_of(job) == (130, "interrupted (SIGTERM)" + RESUME.format(5))
