"""Announced departures: nodes that leave give away what only they hold, and are let go when nobody needs them."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeLeaving, Tell
from resilient.protocol.messages import Generation, Regroup, Shutdown, Suspect
from tests.agent.membership.simulated import NUM_LAYERS, STATES, Job, job_spec, regroups, started

LEFT = Shutdown(exit_code=0, reason="left")
ALONE = job_spec(max_failures=0, min_pipeline_nodes=1, microbatch=24)
"""One pipeline: each state is on one node only."""


def leave(job: Job, *nodes: int) -> None:
    for node in nodes:
        job.feed(NodeLeaving(node=node, reason="SIGTERM"))


def dismissed(job: Job) -> list[int]:
    return [told.node for told in job.told if told.message == LEFT]


def holders(job: Job) -> dict[str, int]:
    """Each state's only holder."""
    return {name: node for (node, _), worker in job.workers.items() for name in worker.current}


def published(job: Job) -> None:
    """Have everybody report, and nobody act on the generation that follows."""
    generation = job.machine.generation
    while job.machine.generation == generation:
        for worker in list(job.workers):
            message = job.workers[worker].inbox.pop(0)
            assert isinstance(message, Regroup)
            job._act(worker, message)


def test_leaver_is_left_out_and_shut_down_after_publication() -> None:
    job = started()
    job.step(1)
    job.feed(NodeLeaving(node=3, reason="SIGTERM"))
    assert job.told[-1].message != Shutdown(exit_code=0, reason="left")
    job.step(2)
    job.answer()
    assert job.told[-1] == Tell(node=3, message=Shutdown(exit_code=0, reason="left"))
    generation = job.last("generation")
    assert (generation["cause"], generation["version"], generation["lost_steps"]) == ("leave", 2, 0)
    assert 3 not in generation["nodes"]
    job.lose(3)
    assert job.machine.phase is Phase.RUNNING


def test_departure_that_leaves_too_few_nodes_saves_and_stops_at_the_boundary() -> None:
    job = started(num_nodes=4)
    job.feed(NodeLeaving(node=3, reason="SIGTERM"))
    job.step(1)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 3
    assert job.manifests[-1].manifest.step == 1


def interrupt_copies(job: Job) -> None:
    """Keep everybody from acting on the generation published last."""
    for worker in job.workers.values():
        assert isinstance(worker.inbox.pop(), Generation)


def test_leaver_that_alone_holds_a_state_gives_it_away_and_no_step_is_lost() -> None:
    job = started(num_nodes=3, spec=ALONE)
    job.step(3)
    leaver = job.plan.slots[0].node
    only_there = [name for name, node in holders(job).items() if node == leaver]
    assert only_there
    leave(job, leaver)
    published(job)
    assert dismissed(job) == []
    announced = job.workers[leaver, 0].inbox[-1]
    assert isinstance(announced, Generation)
    assert (announced.rank, announced.num_sources) == (len(announced.plan.slots), 1)
    assert sorted(t.state for t in announced.transfers if t.source == announced.rank) == only_there
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert dismissed(job) == [leaver]
    assert set(holders(job)) == set(STATES)
    generation = job.last("generation")
    assert (generation["cause"], generation["version"], generation["lost_steps"]) == ("leave", 3, 0)
    assert (generation["senders"], leaver in generation["nodes"] + generation["standby"]) == ([leaver], False)


def test_all_but_one_leave_together() -> None:
    job = started(num_nodes=3, spec=ALONE)
    job.step(3)
    leave(job, 0, 2)
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert holders(job) == dict.fromkeys(STATES, 1)
    assert sorted(dismissed(job)) == [0, 2]


def test_leaver_stays_until_all_are_installed() -> None:
    job = started(num_nodes=3, spec=ALONE)
    job.step(3)
    leave(job, 0)
    published(job)
    job.answer([(0, 0)])
    assert (job.machine.phase, dismissed(job)) == (Phase.INSTALLING, [])
    job.answer([(1, 0)])
    assert (job.machine.phase, dismissed(job)) == (Phase.INSTALLING, [])
    job.answer()
    assert (job.machine.phase, dismissed(job)) == (Phase.RUNNING, [0])


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_leaver_that_sends_nothing_is_kept_until_the_copies_of_what_it_holds_have_arrived(lost: int) -> None:
    job = started(num_nodes=5)
    job.step(3)
    leave(job, 4)
    published(job)
    assert (job.last("generation")["transfers"], job.last("generation")["senders"]) == (2, [])
    interrupt_copies(job)
    job.lose(lost)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 3, "three nodes are too few, and what they and the leaver hold is saved"
    assert job.manifests[-1].manifest.step == 3


def test_training_does_not_begin_before_the_leaver_has_sent_what_it_holds() -> None:
    job = started(num_nodes=3, spec=ALONE)
    job.step(3)
    leave(job, 0)
    published(job)
    job.answer([(1, 0), (2, 0)])
    assert job.machine.phase is Phase.INSTALLING
    job.answer()
    assert job.machine.phase is Phase.RUNNING


def test_leaver_that_dies_while_it_sends_is_a_failure() -> None:
    job = started()
    job.step(3)
    leave(job, 3)
    published(job)
    assert job.last("generation")["senders"] == [3]
    job.lose(3)
    assert job.last("detected") == {"nodes": [3], "cause": "node lost", "step": 3}
    job.answer()
    generation = job.last("generation")
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 3)
    assert (generation["cause"], generation["version"], generation["lost_steps"]) == ("failure", 3, 0)


def test_leaver_is_a_source_once_more_when_the_copy_fails() -> None:
    job = started(num_nodes=3, spec=ALONE)
    job.step(3)
    leave(job, 0)
    published(job)
    interrupt_copies(job)
    job.say((1, 0), Suspect(generation=2, reason="reset"))
    job.answer()
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 3)
    assert (job.last("generation")["senders"], dismissed(job)) == ([0], [0])
    assert set(holders(job)) == set(STATES)


def test_state_held_by_a_lost_leaver_alone_is_lost() -> None:
    job = started(num_nodes=3, spec=ALONE)
    job.step(3)
    leave(job, 0)
    published(job)
    interrupt_copies(job)
    job.lose(0)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 4
    assert job.stop.reason.startswith("no live node holds layer.0")


def idle_nodes(job: Job) -> list[int]:
    return [node for node, _ in job.workers if node not in job.plan.nodes]


def regroup(job: Job) -> None:
    """Begin another generation of the same nodes, from here."""
    job.say(job.placed()[0], Suspect(generation=job.machine.generation, reason="reset"))
    job.answer()


def give_what_is_lost(job: Job, lost: int, heir: int) -> None:
    """Have a node that stands by hold what a node does that is then lost, as after a change just before."""
    worker = job.workers[heir, 0]
    worker.version, worker.retained = job.workers[lost, 0].version, job.workers[lost, 0].current
    job.lose(lost)


def test_node_that_stands_by_sends_what_only_it_still_holds() -> None:
    senders: list[list[int]] = []
    for choice in range(2):  # one of the two gets the place, and the other may have to send
        job = started(num_nodes=NUM_LAYERS + 2, spec=ALONE)
        job.step(3)
        regroup(job)
        give_what_is_lost(job, job.plan.nodes[1], idle_nodes(job)[choice])
        job.answer()
        assert job.machine.phase is Phase.RUNNING
        assert set(holders(job)) == set(STATES)
        assert dismissed(job) == []
        senders.append(job.last("generation")["senders"])
        assert set(senders[-1]) <= set(job.last("generation")["standby"])
    assert sorted(map(len, senders)) == [0, 1]


def test_node_that_stands_by_and_leaves_while_a_change_is_agreed_on_is_a_source_before_it_goes() -> None:
    job = started(num_nodes=NUM_LAYERS + 1, spec=ALONE)
    job.step(3)
    regroup(job)
    (idle,) = idle_nodes(job)
    give_what_is_lost(job, job.plan.nodes[1], idle)
    leave(job, idle)
    assert dismissed(job) == []
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert (job.last("generation")["senders"], dismissed(job)) == ([idle], [idle])
    assert set(holders(job)) == set(STATES)


def test_node_that_stands_by_leaves_at_once_while_others_train() -> None:
    job = started(num_nodes=NUM_LAYERS + 1, spec=ALONE)
    (idle,) = idle_nodes(job)
    leave(job, idle)
    assert dismissed(job) == [idle]
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 1)


def test_departure_announced_while_the_change_is_installed_follows_at_the_next_boundary() -> None:
    job = started(num_nodes=6)
    job.step(1)
    leave(job, 5)
    published(job)
    leave(job, 4)
    assert regroups(job, 0) == []
    job.answer([worker for worker in job.workers if worker[0] != 4])
    assert (job.machine.phase, job.machine.generation) == (Phase.INSTALLING, 2)
    job.answer()
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 3)
    assert dismissed(job) == [5, 4]


@pytest.mark.parametrize("moment", ["before it is ready", "ready, before the first generation"])
def test_node_that_leaves_before_the_job_begins_is_not_waited_for(moment: str) -> None:
    job = Job(num_nodes=5)
    for _ in range(5):
        job.connect()
    for node in range(4):
        job.ready(node)
    if moment == "before it is ready":
        leave(job, 4)
    else:
        leave(job, 3)
        job.ready(4)
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert job.machine.generation == 1
    assert len(dismissed(job)) == 1
