"""Ends that go wrong halfway: a part of the last checkpoint, a joiner, the worker that speaks for the job."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeLeaving, Tick
from resilient.protocol.messages import Failed, Finish, Finished, Note
from tests.agent.membership.simulated import STATES, Job, job_spec, started

LAST = "/runs/x/checkpoints/step-00000010"
RUN_THE_END = (
    f"all steps are done and saved in {LAST}; run the end of the script with: resilient run --nodes 4 --resume "
    f"{LAST} train.py"
)


def mains(job: Job) -> dict[int, bool]:
    """Return, by node, whether its worker was told that it speaks for the job, of those that may end."""
    told = {
        node: [word for word in state.inbox if isinstance(word, Finish)] for (node, _), state in job.workers.items()
    }
    return {node: words[-1].is_main for node, words in told.items() if words}


def finish(job: Job, *silent: int, unsaved: Collection[int] = ()) -> None:
    """Have all but these nodes save what they hold of the last step, and say that they are done."""
    for worker in job.placed():
        if worker[0] not in silent:
            states = () if worker[0] in unsaved else job.workers[worker].current
            job.say(worker, job.saved(job.machine.generation, 10, states))
            job.say(worker, Finished(generation=job.machine.generation))


def test_last_step_that_nobody_told_of_is_saved_before_the_job_is_finished() -> None:
    """Node 0 dies after the last barrier, before it says so; the step before was saved on the way."""
    job = started()
    job.step(9)
    for worker in job.placed():
        job.say(worker, job.saved(1, 9, job.workers[worker].current))
    job.step(10, reported=False)
    job.lose(0)
    finish(job, unsaved=range(5))
    assert job.machine.phase is Phase.AGREEING
    job.answer()
    assert [made.manifest.step for made in job.manifests] == [9, 10]
    assert job.last("step")["step"] == 10
    assert job.last("finished") == {"step": 10, "path": LAST}
    assert job.stop is not None
    assert job.stop.exit_code == 0


@pytest.mark.parametrize("at", ["before all have finished", "after all others have"])
def test_another_worker_speaks_for_the_job_if_the_first_is_lost_while_the_others_finish(at: str) -> None:
    job = started()
    job.step(10)
    if at == "after all others have":
        finish(job, 0)
    job.lose(0)
    while job.machine.phase is not Phase.FINISHED:
        for worker in job.placed():
            if job.machine.phase is not Phase.FINISHED and job.workers[worker].inbox:
                job._act(worker, job.workers[worker].inbox.pop(0))
    assert sorted(mains(job).values()) == [False, False, False, True]
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (0, "the job is finished")


def test_last_step_needs_no_further_generation_and_so_no_more_nodes() -> None:
    job = started(num_nodes=4)
    job.step(10)
    finish(job, 1)
    job.lose(1)
    job.answer()
    assert "generation" not in job.kinds()[job.kinds().index("node_lost") :]
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (0, "the job is finished")


def test_node_lost_while_the_survivors_save_the_last_step_has_the_others_save_it() -> None:
    job = started()
    job.step(10)
    job.lose(0)
    for worker in job.placed():
        job._act(worker, job.workers[worker].inbox.pop(0))
    assert job.machine.phase is Phase.SAVING
    job.lose(next(node for node, _ in job.machine.awaiting))
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code in (0, 3)
    assert (job.stop.exit_code == 0) == bool(job.manifests), "two of five may have held a layer alone"


def test_worker_that_speaks_for_the_job_and_is_killed_in_the_end_of_its_script_is_told() -> None:
    job = started()
    job.step(10)
    job.finish()
    main = next(node for node, is_main in mains(job).items() if is_main)
    del job.workers[main, 0]
    job.end_worker((main, 0), -9)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        f"node {main}, which speaks for the job, was lost before its script ended (worker killed by SIGKILL); "
        f"{RUN_THE_END}"
    )


def test_loss_of_the_node_that_speaks_for_the_job_costs_nothing_once_its_script_has_ended() -> None:
    job = started(spec=job_spec(min_pipeline_nodes=1), num_nodes=2, workers_per_node=2)
    job.step(10)
    job.finish()
    job.end_worker((0, 0), 0)
    job.lose(0)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 0


def test_error_in_the_end_of_the_script_names_the_checkpoint() -> None:
    job = started()
    job.step(10)
    job.finish()
    job.end_worker((3, 0), 1, "ZeroDivisionError: 1/0")
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (1, f"node 3: ZeroDivisionError: 1/0; {RUN_THE_END}")


def test_node_that_stood_by_speaks_for_the_job_if_all_others_are_lost_and_ends_its_script_before_it_leaves() -> None:
    job = started(spec=job_spec(global_batch=4), num_nodes=9)
    job.step(10)
    for worker in job.placed():
        job.say(worker, job.saved(1, 10, job.workers[worker].current))
    (spare,) = set(range(9)) - set(job.plan.nodes)
    note = Note(name="accuracy", value=0.5)
    assert job.say((spare, 0), note) == []
    job.lose(*job.plan.nodes)
    while job.machine.phase is not Phase.FINISHED:
        job._act((spare, 0), job.workers[spare, 0].inbox.pop(0))
    assert mains(job) == {spare: True}
    job.say((spare, 0), note)
    assert job.last("note") == {"name": "accuracy", "value": 0.5}
    job.feed(NodeLeaving(node=spare, reason="spot notice"))
    assert set(job.machine.members) == {spare}
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (0, "the job is finished")


def test_job_is_over_when_the_last_node_leaves_that_only_stood_by() -> None:
    job = started(spec=job_spec(global_batch=4), num_nodes=9)
    job.step(10)
    job.finish()
    (spare,) = set(range(9)) - set(job.plan.nodes)
    for worker in job.placed():
        job.end_worker(worker, 0)
    assert set(job.machine.members) == {spare}
    job.feed(NodeLeaving(node=spare, reason="spot notice"))
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (0, "the job is finished")


def test_joiner_whose_worker_never_gets_ready_is_given_up() -> None:
    job = started(start_timeout_s=100.0)
    job.now = 50.0
    node = job.connect()
    job.now = 149.0
    job.feed(Tick())
    assert node in job.machine.members
    job.now = 150.0
    job.feed(Tick())
    cause = f"not ready within 100 s of joining; see /runs/x/logs/node-{node}/worker-0.log"
    assert job.last("node_lost") == {"node": node, "cause": cause}
    assert job.told[-1].node == node
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 1)


def test_job_is_not_finished_while_a_part_of_its_last_checkpoint_is_missing() -> None:
    job = started()
    job.step(10)
    victim, *others = job.placed()
    generation = job.machine.generation
    for worker in others:
        job.say(worker, job.saved(generation, 10, job.workers[worker].current[:1]))
    job.lose(victim[0])
    for worker in others:
        job.say(worker, Finished(generation=generation))
    assert job.machine.phase is Phase.AGREEING
    job.answer()
    assert [(made.manifest.step, set(made.manifest.states)) for made in job.manifests] == [(10, set(STATES))]
    assert job.last("finished")["step"] == 10


@pytest.mark.parametrize("again", [False, True])
def test_all_nodes_lost_between_the_last_manifest_and_the_end_is_no_lack_of_nodes(again: bool) -> None:
    """The nodes may be back, with new workers, before the last of the old ones is found to be lost."""
    job = started()
    job.step(10)
    for worker in job.placed():
        job.say(worker, job.saved(1, 10, job.workers[worker].current))
    before = list(job.machine.members)
    if again:
        job.connect()
    job.lose(*before)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (1, f"all nodes were lost before the script ended; {RUN_THE_END}")


def test_joiner_that_fails_disturbs_nobody() -> None:
    job = started()
    node = job.connect()
    job.say((node, 0), Failed(error="ModuleNotFoundError: no"))
    assert job.last("not_joined") == {"node": node, "cause": "ModuleNotFoundError: no"}
    other = job.connect()
    job.end_worker((other, 0), 1, "ImportError: no")
    another = job.connect()
    job.ready(another, job_spec(alike={"job": {"model": "another"}}))
    assert (job.machine.phase, job.machine.generation, job.stop) == (Phase.RUNNING, 1, None)
    assert set(job.machine.members) == set(range(5))


def test_joiner_with_less_memory_than_is_planned_with_is_sent_away() -> None:
    job = Job(job_spec(memory_bytes=2**30))
    job.start()
    node = job.connect()
    job.ready(node, job_spec(memory_bytes=2**30 - 1))
    assert job.last("not_joined") == {
        "node": node,
        "cause": "devices must have at least 1073741824 bytes of memory, those of the first worker, got "
        "1073741823; start with a node of the least memory, or use equal nodes",
    }
    assert (job.machine.phase, job.machine.generation, job.stop) == (Phase.RUNNING, 1, None)
    job.ready(job.connect(), job_spec(memory_bytes=2**31))
    assert job.last("node_ready")["node"] == node + 1


def test_script_that_ends_on_one_node_only_fails_the_start() -> None:
    job = Job(num_nodes=3)
    for _ in range(3):
        job.connect()
    job.end_worker((2, 0), 0)
    assert job.stop is None
    job.ready(0)
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason.startswith("node 2: the script ended without training, while it trains on other nodes")


def test_worker_that_ends_as_if_all_were_well_in_mid_training_is_not_waited_for() -> None:
    job = started()
    job.step(3)
    del job.workers[2, 0]
    job.end_worker((2, 0), 0)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        "node 2: a worker ended before the job was finished; the script must reach Trainer.fit's end; resume with: "
        "resilient run --nodes 4 --resume /runs/x/checkpoints/step-00000003 train.py"
    )


def test_checkpoint_that_nobody_can_write_says_why() -> None:
    job = started()
    job.step(3)
    job.say((0, 0), Failed(error="CheckpointError: no room"))
    for node in range(5):
        del job.workers[node, 0]
        job.end_worker((node, 0), 1, "CheckpointError: no room")
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        "node 0: CheckpointError: no room; all nodes are lost, the last one (4) because of: worker ended with exit "
        "code 1; there is no checkpoint; start again with: resilient run --nodes 4 train.py"
    )


def test_loss_of_the_node_that_speaks_for_the_job_after_training_is_told() -> None:
    job = started()
    job.step(10)
    job.finish()
    main = job.plan.slots[0].node
    job.lose(main)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        f"node {main}, which speaks for the job, was lost before its script ended (node lost); {RUN_THE_END}"
    )
