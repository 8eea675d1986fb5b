"""Losses: the membership machine goes on with those that are left, or stops. Driven with simulated workers."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import (
    Tell,
    Tick,
)
from resilient.protocol.messages import (
    Failed,
    Regroup,
    Report,
    Save,
    Shutdown,
    Suspect,
)
from tests.agent.membership.simulated import STATES, Job, job_spec, outcome, regroups, started

# ---------------------------------------------------------------- failures


def test_failure_redoes_the_step_under_way() -> None:
    job = started()
    job.step(1)
    job.lose(2)
    assert job.machine.phase is Phase.AGREEING
    assert job.last("detected") == {"nodes": [2], "cause": "node lost", "step": 1}
    job.answer()
    generation = job.last("generation")
    assert generation["cause"] == "failure"
    assert (generation["version"], generation["lost_steps"], generation["roll_forward"]) == (1, 1, False)
    assert 2 not in generation["nodes"]
    assert job.machine.phase is Phase.RUNNING
    assert job.machine.generation == 2


def test_failure_after_the_last_step_redoes_nothing() -> None:
    job = started()
    job.step(10)
    job.lose(2)
    job.answer()
    assert job.last("generation")["cause"] == "start"
    assert job.last("finished") == {"step": 10, "path": "/runs/x/checkpoints/step-00000010"}


@pytest.mark.parametrize("next_begun", [False, True])
def test_survivors_roll_forward_when_one_of_them_passed_the_barrier(next_begun: bool) -> None:
    """The step that they commit is not lost; the next one is, where somebody was already in it."""
    job = started()
    job.step(1)
    for worker in job.placed():
        job.workers[worker].complete = True
    passed = job.workers[1, 0]
    passed.version, passed.passed, passed.complete, passed.begun = 2, outcome(2), False, next_begun
    job.lose(3)
    job.answer()
    generation = job.last("generation")
    assert (generation["version"], generation["lost_steps"], generation["roll_forward"]) == (2, int(next_begun), True)


def test_survivors_roll_forward_when_only_the_dead_node_passed_the_barrier() -> None:
    job = started()
    job.step(1)
    for worker in job.placed():
        job.workers[worker].complete = True
    job.report_step(2)
    job.lose(job.plan.slots[0].node)
    job.answer()
    generation = job.last("generation")
    assert (generation["version"], generation["lost_steps"], generation["roll_forward"]) == (2, 0, True)
    assert job.machine.outcome == outcome(2)


def test_step_whose_reporter_died_is_recorded_from_the_survivors_before_the_generation() -> None:
    job = started()
    job.step(1)
    for worker in (job.workers[place] for place in job.placed()):
        worker.version, worker.passed, worker.complete = 2, outcome(2), False
    job.lose(job.plan.slots[0].node)
    job.answer()
    steps = [(record.generation, record.fields["step"]) for record in job.records if record.kind == "step"]
    assert steps == [(1, 1), (1, 2)]
    assert job.last("step")["loss"] == outcome(2).loss
    assert [kind for kind in job.kinds() if kind in ("detected", "step", "generation")][-3:] == [
        "detected",
        "step",
        "generation",
    ]


def test_second_failure_while_agreeing_shrinks_the_set() -> None:
    job = started(num_nodes=6)
    job.step(1)
    job.lose(2)
    job.answer([(0, 0), (1, 0), (3, 0)])
    assert job.machine.awaiting == {(4, 0), (5, 0)}
    job.lose(4)
    assert job.machine.awaiting == {(5, 0)}
    job.answer()
    assert job.machine.generation == 2
    assert job.kinds().count("detected") == 1
    assert not {2, 4} & set(job.plan.nodes)


def test_second_failure_after_publication_begins_another_generation() -> None:
    job = started(num_nodes=6)
    job.step(1)
    job.lose(2)
    for worker in list(job.workers):
        message = job.workers[worker].inbox.pop(0)
        job.say(worker, Report(generation=message.generation, progress=job.workers[worker].progress()))
    assert (job.machine.phase, job.machine.generation) == (Phase.INSTALLING, 2)
    job.lose(4)
    assert regroups(job, 0) == [Regroup(generation=3, heard_step=1)]
    job.answer()
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 3)
    assert job.last("generation")["lost_steps"] == 1  # of the first failure: still to be redone
    job.step(2)
    joiner = job.connect()
    job.ready(joiner)
    job.answer()
    assert job.last("generation")["lost_steps"] == 0


def test_worker_killed_by_a_signal_takes_its_node_out() -> None:
    job = started()
    job.step(1)
    job.end_worker((2, 0), -9)
    assert job.last("detected")["cause"] == "worker killed by SIGKILL"
    job.lose(2)
    job.answer()
    assert job.machine.generation == 2
    assert job.kinds().count("node_lost") == 1


def test_suspicion_alone_regroups_the_same_members() -> None:
    job = started()
    job.step(1)
    before = job.plan
    job.say((1, 0), Suspect(generation=1, reason="reset"))
    job.say((2, 0), Suspect(generation=1, reason="reset"))
    job.answer()
    assert (job.plan, job.machine.generation) == (before, 2)
    assert job.last("detected") == {"nodes": [], "cause": "communication failed: reset", "step": 1}


def test_suspicions_without_progress_save_and_stop() -> None:
    job = started(max_suspicions=3)
    job.step(1)
    for _ in range(3):
        job.say((1, 0), Suspect(generation=job.machine.generation, reason="reset"))
        job.answer()
        assert job.stop is None
    job.say((1, 0), Suspect(generation=job.machine.generation, reason="reset"))
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 3
    assert "communication keeps failing" in job.stop.reason


def test_messages_of_other_generations_are_ignored() -> None:
    job = started()
    job.step(1)
    job.lose(2)
    job.say((1, 0), Report(generation=1, progress=job.workers[1, 0].progress()))
    assert (1, 0) in job.machine.awaiting
    job.answer()
    num_records = len(job.records)
    job.say((1, 0), Suspect(generation=1, reason="late"))
    job.say((1, 0), Report(generation=2, progress=job.workers[1, 0].progress()))
    assert job.machine.phase is Phase.RUNNING
    assert len(job.records) == num_records


def test_dead_node_is_not_heard() -> None:
    job = started()
    job.lose(2)
    job.workers[2, 0] = job.workers[1, 0]
    assert job.say((2, 0), Failed(error="late")) == []


def test_worker_without_a_report_in_time_is_evicted() -> None:
    job = started(report_timeout_s=60.0)
    job.step(1)
    job.lose(2)
    job.answer([(0, 0), (1, 0), (3, 0)])
    job.now = 59.0
    job.feed(Tick())
    assert job.machine.phase is Phase.AGREEING
    job.now = 60.0
    evicted = job.feed(Tick())
    assert any(isinstance(i, Tell) and i.node == 4 and isinstance(i.message, Shutdown) for i in evicted)
    assert job.last("node_lost") == {
        "node": 4,
        "cause": "no report within 60 s; where it hangs is at the end of /runs/x/logs/node-4/worker-0.log",
    }
    assert 4 not in job.machine.members


# ---------------------------------------------------------------- too few nodes, lost states


def test_too_few_nodes_save_every_state_once_and_stop_resumably() -> None:
    job = started(num_nodes=4, arguments=("--lr", "3"))
    job.step(1)
    job.lose(1)
    for worker in list(job.workers):
        job.workers[worker].inbox.pop(0)
        job.say(worker, Report(generation=2, progress=job.workers[worker].progress()))
    saves = [message for state in job.workers.values() for message in state.inbox if isinstance(message, Save)]
    assert sorted(name for save in saves for name in save.states) == sorted(STATES)
    job.answer()
    path = "/runs/x/checkpoints/step-00000001"
    assert job.manifests[-1].path == path
    assert job.stop is not None
    assert job.stop.exit_code == 3
    assert job.stop.reason == (
        f"3 nodes are live ([0, 2, 3]), 4 are needed; resume with: "
        f"resilient run --nodes 4 --resume {path} train.py --lr 3"
    )
    assert job.last("stopped")["path"] == path


def test_failure_while_saving_saves_again_with_those_who_are_left() -> None:
    job = started(num_nodes=4)
    job.step(1)
    job.lose(1)
    for worker in list(job.workers):
        job.workers[worker].inbox.pop(0)
        job.say(worker, Report(generation=2, progress=job.workers[worker].progress()))
    assert job.machine.phase is Phase.SAVING
    victim = min(node for node, _ in job.machine.awaiting)
    pipeline = next(p for p in job.plan.pipelines if victim in p.nodes)
    job.lose(victim)
    job.answer()
    assert job.stop is not None
    survives = 1 not in pipeline.nodes
    assert job.stop.exit_code == (4 if survives else 3)
    assert bool(job.manifests) != survives


def lose_both_holders(job: Job) -> None:
    first, second = (pipeline.nodes[0] for pipeline in job.plan.pipelines[:2])
    job.lose(first, second)
    job.answer()


def test_lost_state_falls_back_to_the_newest_checkpoint() -> None:
    job = started(num_nodes=4)
    job.step(3)
    for worker in job.placed():
        job.say(worker, job.saved(1, 3, job.workers[worker].current))
    assert job.last("checkpoint") == {"step": 3, "path": "/runs/x/checkpoints/step-00000003"}
    job.step(5)
    for node in (job.connect(), job.connect()):
        job.machine.members[node].leaving = False
        job.ready(node)
    lose_both_holders(job)
    generation = job.last("generation")
    assert (generation["version"], generation["transfers"]) == (3, 0)
    assert job.stop is None
    assert "everybody loads /runs/x/checkpoints/step-00000003" in job.last("output")["text"]
    job.step(4)
    assert job.machine.status()["step"] == 4


def test_lost_state_without_a_checkpoint_stops_for_good() -> None:
    job = started(num_nodes=4)
    job.step(5)
    lose_both_holders(job)
    assert job.stop is not None
    assert job.stop.exit_code == 4
    assert "nobody holds" in job.stop.reason


def test_states_lost_before_the_first_step_are_made_again() -> None:
    job = started(num_nodes=6)
    lose_both_holders(job)
    assert job.stop is None
    assert job.last("generation")["version"] == 0


def test_all_nodes_lost_is_an_end() -> None:
    job = started(num_nodes=4)
    job.step(1)
    job.lose(0, 1, 2, 3)
    assert job.stop is not None
    assert job.stop.exit_code == 4


def test_last_checkpoint_not_written_in_time_is_an_end() -> None:
    job = started(num_nodes=4, save_timeout_s=10.0)
    job.step(1)
    job.lose(1)
    for worker in list(job.workers):
        job.workers[worker].inbox.pop(0)
        job.say(worker, Report(generation=2, progress=job.workers[worker].progress()))
    job.now = 10.0
    job.feed(Tick())
    assert job.stop is not None
    assert "was not written in time" in job.stop.reason


# ---------------------------------------------------------------- steps that were done and not told


def steps(job: Job) -> list[tuple[int, int, float]]:
    """Return generation and number of all steps recorded, and when they were done, in order."""
    return [(each.generation, each.fields["step"], each.fields["time"]) for each in job.records if each.kind == "step"]


@pytest.mark.parametrize("reporter_is_lost", [True, False])
def test_steps_that_were_not_told_are_recorded_once_and_in_order(reporter_is_lost: bool) -> None:
    job = started()
    job.step(1)
    for number in range(2, 6):
        job.step(number, reported=False)
    job.lose(job.plan.slots[0 if reporter_is_lost else -1].node)
    if not reporter_is_lost:  # it tells late, before it reports like the others
        for number in range(2, 6):
            job.report_step(number)
    job.answer()
    assert steps(job) == [(1, number, number) for number in range(1, 6)]
    assert job.last("generation")["version"] == 5
    job.step(6)
    assert steps(job)[-1] == (2, 6, 6)
    assert len(steps(job)) == 6


def test_steps_told_before_a_second_loss_count() -> None:
    job = started(num_nodes=6, spec=job_spec(max_failures=2, min_pipeline_nodes=1))
    job.step(1)
    for number in range(2, 6):
        job.step(number, reported=False)
    first, second = job.plan.slots[0].node, job.plan.slots[-1].node
    job.lose(first)
    job.answer([(second, 0)])
    job.lose(second)
    job.answer()
    assert steps(job) == [(1, number, number) for number in range(1, 6)]


def test_job_goes_on_from_a_step_of_which_nobody_tells_more_than_its_outcome() -> None:
    job = started()
    job.step(1)
    job.step(2, reported=False)
    job.lose(job.plan.slots[0].node)
    for worker in job.placed():
        job.say(worker, Report(generation=2, progress=job.workers[worker].progress()))
    assert [step for _, step, _ in steps(job)] == [1]
    assert job.last("generation")["version"] == job.machine.status()["step"] == 2
