"""Damaged copies of states: they are made anew from the others, or the job stops and saves none of them."""

from __future__ import annotations

from resilient.agent.membership.parts.context import Phase
from resilient.protocol.messages import Dropped, Failed, Generation, Report, Save
from resilient.state.witnesses import witness
from tests.agent.membership.simulated import STATES, Job, job_spec, started


def three_copies() -> Job:
    """Return a job of three nodes that hold everything each, in its second step."""
    job = started(3, spec=job_spec(max_failures=2, min_pipeline_nodes=1))
    assert all(state.current == STATES for state in job.workers.values())
    job.step(1)
    return job


def drop(job: Job, node: int, *names: str) -> None:
    state = job.workers[node, 0]
    state.current = tuple(name for name in state.current if name not in names)
    message = Dropped(generation=job.machine.generation, step=state.version, odd={witness(node, 0): names})
    job.say((node, 0), message)


def test_dropped_copies_come_from_the_others_and_the_step_is_redone() -> None:
    job = three_copies()
    drop(job, 1, "layer.1", "layer.3")
    states = ["layer.1", "layer.3"]
    assert job.last("replica_dropped") == {"node": 1, "local_rank": 0, "states": states, "step": 1}
    assert job.last("detected") == {
        "nodes": [],
        "cause": "copies on node 1 differed from those of most others after step 1: layer.1, layer.3",
        "step": 1,
    }
    job.answer()
    generation = job.last("generation")
    assert (generation["cause"], generation["version"], generation["lost_steps"]) == ("failure", 1, 1)
    assert (generation["nodes"], generation["transfers"]) == ([0, 1, 2], 2)
    assert job.workers[1, 0].current == STATES
    assert job.machine.phase is Phase.RUNNING


def test_copies_dropped_by_two_nodes_are_each_told_and_one_generation_follows() -> None:
    job = three_copies()
    drop(job, 1, "layer.1")
    drop(job, 2, "layer.3")
    assert job.kinds().count("replica_dropped") == 2
    job.answer()
    assert (job.machine.generation, job.last("generation")["transfers"]) == (2, 2)


def test_odd_copy_of_which_only_another_holder_tells_is_made_anew_too() -> None:
    """Whoever drops first cuts the others' comparison short: node 2 has not heard that its copy is odd."""
    job = started(4, spec=job_spec(max_failures=3, min_pipeline_nodes=1))
    job.step(1)
    job.workers[1, 0].current = tuple(name for name in STATES if name != "layer.1")
    odd = {witness(1, 0): ("layer.1",), witness(2, 0): ("layer.1", "layer.2")}
    job.say((1, 0), Dropped(generation=1, step=1, odd=odd))
    job.say((2, 0), Dropped(generation=1, step=1, odd=odd))
    dropped = [record.fields for record in job.records if record.kind == "replica_dropped"]
    assert [(fields["node"], fields["states"]) for fields in dropped] == [
        (1, ["layer.1"]),
        (2, ["layer.1", "layer.2"]),
    ]
    assert job.last("detected")["cause"] == (
        "copies on nodes 1, 2 differed from those of most others after step 1: layer.1, layer.2"
    )
    for worker in list(job.workers):
        job.workers[worker].inbox.clear()
        job.say(worker, Report(generation=2, progress=job.workers[worker].progress()))
    (message,) = [message for message in job.workers[0, 0].inbox if isinstance(message, Generation)]
    slots = message.plan.slots
    copies = [(slots[transfer.target].node, transfer.state) for transfer in message.transfers]
    assert sorted(copies) == [(1, "layer.1"), (2, "layer.1"), (2, "layer.2")]
    sources = [(witness(slots[transfer.source].node, 0), transfer.state) for transfer in message.transfers]
    assert not any(state in odd.get(source, ()) for source, state in sources)


def test_odd_copies_of_who_has_no_place_change_nothing() -> None:
    """Only workers that have a place compare: who is getting ready has none, as who was never there."""
    job = three_copies()
    node = job.connect()
    before = len(job.records)
    for stranger in (witness(node, 0), witness(9, 0), witness(1, 1)):
        odd = {witness(1, 0): ("layer.1",), stranger: ("layer.1",)}
        job.say((1, 0), Dropped(generation=1, step=1, odd=odd))
    assert job.machine.phase is Phase.RUNNING
    assert len(job.records) == before


def test_dropped_copy_does_not_wait_for_the_boundary_that_others_wait_for() -> None:
    job = three_copies()
    job.ready(job.connect())
    assert job.machine.phase is Phase.AGREEING
    drop(job, 0, "layer.0")
    job.answer()
    assert (job.machine.phase, job.last("generation")["nodes"]) == (Phase.RUNNING, [0, 1, 2, 3])


def test_node_that_damages_its_copies_again_and_again_is_named() -> None:
    job = three_copies()
    while job.stop is None:
        drop(job, 1, "layer.2")
        job.answer()
    assert job.stop.reason.startswith(
        "copies of states keep getting damaged (nodes 1); check the memory of these, and leave them out; resume with: "
    )
    assert job.machine.generation <= 6


def test_states_nobody_can_vouch_for_are_not_saved() -> None:
    job = three_copies()
    job.say((2, 0), Failed(error="ReplicaError: all copies must be equal", is_sound=False))
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (
        1,
        "node 2: ReplicaError: all copies must be equal; there is no checkpoint; start again with: "
        "resilient run --nodes 3 train.py",
    )
    assert not any(isinstance(message, Save) for state in job.workers.values() for message in state.inbox)
    assert job.last("failed")["node"] == 2


def test_newest_checkpoint_is_what_a_job_of_damaged_states_resumes_from() -> None:
    """A part of it may be heard of after the failure: whoever wrote it says so before it reports."""
    job = three_copies()
    first, second, third = (job.saved(1, 1, states) for states in (STATES[:1], STATES[1:2], STATES[2:]))
    job.say((0, 0), first)
    job.say((2, 0), third)
    job.step(2)
    job.say((0, 0), Failed(error="ReplicaError: all copies must be equal", is_sound=False))
    job.say((1, 0), second)
    job.say((1, 0), Failed(error="ReplicaError: all copies must be equal", is_sound=False))
    job.answer()
    assert job.stop is not None
    path = "/runs/x/checkpoints/step-00000001"
    assert job.stop.reason.endswith(f"; resume with: resilient run --nodes 3 --resume {path} train.py")
    assert job.last("stopped")["path"] == path
