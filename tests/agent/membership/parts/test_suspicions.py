"""Connections that break generation after generation cost the node at their end, not the job."""

from __future__ import annotations

from resilient.agent.membership.parts.context import EXIT_FAILED, EXIT_RESUMABLE, Phase
from resilient.protocol.messages import Shutdown, Suspect
from tests.agent.membership.simulated import Job, job_spec, started


def break_link(job: Job, node: int, other: int, *more: tuple[int, int]) -> None:
    """Have nodes suspect others, in this order, in the generation in force; then form the next."""
    generation, ranks = job.machine.generation, {slot.node: slot.rank for slot in job.plan.slots}
    for teller, accused in ((node, other), *more):
        job.say((teller, 0), Suspect(generation=generation, reason="reset", peer=ranks[accused]))
    job.answer()


def trained(num_nodes: int) -> Job:
    job = started(num_nodes)
    job.step(1)
    return job


def test_node_that_suspects_everybody_is_let_go() -> None:
    job = trained(6)
    break_link(job, 1, 2)
    assert len(job.machine.members) == 6
    break_link(job, 1, 4)
    cause = "its connections to node 2 and node 4 keep failing, and no step is done"
    assert job.last("node_lost") == {"node": 1, "cause": cause}
    told = job.told[-1]
    assert (told.node, told.message) == (1, Shutdown(exit_code=EXIT_FAILED, reason=cause))
    assert (job.machine.phase, sorted(job.machine.members)) == (Phase.RUNNING, [0, 2, 3, 4, 5])


def test_node_that_everybody_suspects_is_let_go() -> None:
    job = trained(6)
    break_link(job, 2, 1)
    break_link(job, 4, 1)
    assert job.last("node_lost")["node"] == 1
    assert sorted(job.machine.members) == [0, 2, 3, 4, 5]


def test_node_all_of_whose_links_break_is_let_go_though_it_is_told_of_by_the_same_peer() -> None:
    job = trained(6)
    break_link(job, 4, 1)
    break_link(job, 4, 1, (1, 3), (3, 1))
    assert job.last("node_lost") == {
        "node": 1,
        "cause": "its connections to node 3 and node 4 keep failing, and no step is done",
    }


def test_of_a_single_link_the_node_that_complains_is_let_go_the_second_time() -> None:
    job = trained(6)
    break_link(job, 1, 2)
    cause = "communication between nodes 1 and 2 failed: reset"
    assert job.last("detected") == {"nodes": [], "cause": cause, "step": 1}
    break_link(job, 1, 2)
    cause = "its connections to node 2 keep failing, and no step is done"
    assert job.last("node_lost") == {"node": 1, "cause": cause}


def test_of_a_single_link_of_which_both_ends_complain_the_higher_node_is_let_go() -> None:
    job = trained(6)
    break_link(job, 1, 2)
    break_link(job, 2, 1)
    cause = "its connections to node 1 keep failing, and no step is done"
    assert job.last("node_lost") == {"node": 2, "cause": cause}
    job.step(2)
    assert job.machine.parts.suspicions.count == 0


def test_other_end_is_let_go_when_it_breaks_a_further_link_at_once() -> None:
    job = trained(7)
    break_link(job, 2, 1)
    break_link(job, 2, 1)
    assert sorted(job.machine.members) == [0, 1, 3, 4, 5, 6]
    break_link(job, 1, 3)
    assert sorted(job.machine.members) == [0, 3, 4, 5, 6]
    assert job.last("node_lost")["cause"] == "its connections to node 2 and node 3 keep failing, and no step is done"
    job.step(2)
    assert job.stop is None


def test_link_that_breaks_because_another_did_does_not_count() -> None:
    """Whoever leaves a generation looks to its peers as if its connections had broken."""
    job = trained(6)
    break_link(job, 1, 2, (3, 1), (4, 1), (5, 3))
    break_link(job, 1, 2, (3, 1), (4, 1), (5, 3))
    assert job.last("node_lost") == {
        "node": 1,
        "cause": "its connections to node 2 keep failing, and no step is done",
    }


def test_link_of_which_both_ends_tell_counts_whoever_tells_first() -> None:
    job = trained(6)
    for _ in range(2):
        break_link(job, 2, 1, (1, 3), (4, 5), (3, 1))
    assert job.last("node_lost") == {
        "node": 3,
        "cause": "its connections to node 1 keep failing, and no step is done",
    }


def test_neighbour_that_tells_before_the_node_that_left_it_is_not_let_go() -> None:
    job = trained(6)
    for _ in range(2):
        break_link(job, 4, 1, (1, 3))
    assert job.last("node_lost") == {
        "node": 1,
        "cause": "its connections to node 3 and node 4 keep failing, and no step is done",
    }


def test_nobody_is_let_go_where_all_may_have_left_because_of_another() -> None:
    job = trained(6)
    for _ in range(4):
        assert job.stop is None
        break_link(job, 4, 1, (1, 3), (3, 5))
    assert job.stop is not None
    assert job.stop.reason.startswith("communication keeps failing between live nodes (1 and 3, 1 and 4); check ")
    assert "node_lost" not in job.kinds()


def test_what_one_end_tells_does_not_count_after_all_were_asked_to_leave() -> None:
    job = trained(6)
    for _ in range(2):
        job.say((5, 0), Suspect(generation=job.machine.generation, reason="timed out"))
        break_link(job, 1, 3)
    assert "node_lost" not in job.kinds()
    job.step(2)
    for _ in range(2):
        job.say((5, 0), Suspect(generation=job.machine.generation, reason="timed out"))
        break_link(job, 1, 3, (3, 1))
    assert job.last("node_lost")["node"] == 3


def test_step_in_between_clears_suspicion() -> None:
    job = trained(6)
    for number in range(2, 9):
        break_link(job, 1, 2)
        job.step(number)
    assert "node_lost" not in job.kinds()


def test_pair_that_cannot_be_spared_stops_the_job_and_is_named() -> None:
    job = trained(4)
    for _ in range(4):
        assert job.stop is None
        break_link(job, 1, 2)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (
        EXIT_RESUMABLE,
        "communication keeps failing between live nodes (1 and 2); check the network; resume with: "
        "resilient run --nodes 4 --resume /runs/x/checkpoints/step-00000001 train.py",
    )


def test_links_without_a_common_node_stop_the_job_and_are_named() -> None:
    job = trained(8)
    for node in (0, 2, 4, 6):
        assert job.stop is None
        break_link(job, node, node + 1)
    assert job.stop is not None
    assert job.stop.reason.startswith(
        "communication keeps failing between live nodes (0 and 1, 2 and 3, 4 and 5, 6 and 7); check the network; "
    )
    assert "node_lost" not in job.kinds()


def test_network_that_fails_everywhere_costs_no_more_than_two_nodes() -> None:
    job = trained(9)
    for _ in range(4):
        nodes = sorted(job.plan.nodes)
        break_link(job, nodes[0], nodes[1])
    assert job.stop is not None
    assert job.kinds().count("node_lost") == 2


def test_node_alone_in_holding_a_state_is_not_let_go() -> None:
    job = Job(job_spec(max_failures=0, global_batch=24, microbatch=24), num_nodes=4)
    job.start()
    job.step(1)
    nodes = sorted(job.plan.nodes)
    for _ in range(3):
        break_link(job, nodes[0], nodes[1])
    assert "node_lost" not in job.kinds()


def test_workers_of_one_node_that_suspect_each_other_cost_their_node() -> None:
    job = started(6, workers_per_node=2)
    job.step(1)
    for _ in range(2):
        ranks = {(slot.node, slot.local_rank): slot.rank for slot in job.plan.slots}
        suspect = Suspect(generation=job.machine.generation, reason="reset", peer=ranks[3, 1])
        job.say((3, 0), suspect)
        job.answer()
    assert job.last("node_lost") == {
        "node": 3,
        "cause": "its connections to node 3 keep failing, and no step is done",
    }
