"""Ends that go wrong halfway: a part of the last checkpoint, a joiner, the worker that speaks for the job."""

from __future__ import annotations

from resilient.agent.membership.parts.context import Phase
from resilient.protocol.messages import Failed, Finished
from tests.agent.membership.simulated import Job, job_spec, started


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
    assert job.machine.phase is Phase.RUNNING
    job.finish()
    assert job.last("finished")["step"] == 10
    assert job.manifests


def test_joiner_that_fails_disturbs_nobody() -> None:
    job = started()
    node = job.connect()
    job.say((node, 0), Failed(error="ModuleNotFoundError: no"))
    assert job.last("node_lost") == {"node": node, "cause": "cannot join: ModuleNotFoundError: no"}
    other = job.connect()
    job.end_worker((other, 0), 1, "ImportError: no")
    another = job.connect()
    job.ready(another, job_spec(digest="other"))
    assert (job.machine.phase, job.machine.generation, job.stop) == (Phase.RUNNING, 1, None)
    assert set(job.machine.members) == set(range(5))


def test_joiner_with_less_memory_than_is_planned_with_is_sent_away() -> None:
    job = Job(job_spec(memory_bytes=2**30))
    job.start()
    node = job.connect()
    job.ready(node, job_spec(memory_bytes=2**30 - 1))
    assert job.last("node_lost") == {
        "node": node,
        "cause": "cannot join: devices must have at least 1073741824 bytes of memory, those of the first worker, got "
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
    assert job.stop.reason == (f"node {main}, which speaks for the job, was lost before its script ended (node lost)")
