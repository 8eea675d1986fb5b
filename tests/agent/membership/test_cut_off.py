"""Nodes that are cut off for a moment: who is back in time is no loss, unless its peers have lost it too."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeBack, NodeCutOff, NodeLeaving, NodeLost
from resilient.protocol.messages import Suspect
from tests.agent.membership.simulated import Job, regroups, started


def suspect(job: Job, node: int, other: int | None = None) -> None:
    ranks = {slot.node: slot.rank for slot in job.plan.slots}
    peer = None if other is None else ranks[other]
    job.say((node, 0), Suspect(generation=job.machine.generation, reason="reset", peer=peer))


def test_node_that_is_back_in_time_is_no_loss() -> None:
    job = started()
    job.feed(NodeCutOff(node=2))
    job.feed(NodeBack(node=2))
    job.step(1)
    suspect(job, 0)
    assert job.machine.phase is Phase.AGREEING
    job.answer()
    assert 2 in job.last("generation")["nodes"]
    assert "node_lost" not in job.kinds()


def test_node_that_is_cut_off_for_too_long_is_lost() -> None:
    job = started()
    job.feed(NodeCutOff(node=2))
    assert job.machine.phase is Phase.RUNNING
    job.lose(2)
    assert job.last("detected") == {"nodes": [2], "cause": "node lost", "step": 0}


@pytest.mark.parametrize("named", [None, 2])
def test_node_that_is_cut_off_by_its_peers_too_is_lost_at_once(named: int | None) -> None:
    job = started()
    job.feed(NodeCutOff(node=2))
    suspect(job, 0, named)
    assert job.last("detected") == {"nodes": [2], "cause": "node lost", "step": 0}
    assert job.last("node_lost") == {"node": 2, "cause": "node lost"}


@pytest.mark.parametrize("named", [None, 2])
def test_node_whose_loss_its_peers_were_the_first_to_tell_is_not_waited_for(named: int | None) -> None:
    job = started()
    suspect(job, 0, named)
    job.feed(NodeCutOff(node=2))
    assert job.last("node_lost") == {"node": 2, "cause": "node lost"}
    assert job.kinds().count("detected") == 1


def test_node_that_is_cut_off_while_its_peers_suspect_another_is_waited_for() -> None:
    job = started()
    job.feed(NodeCutOff(node=2))
    suspect(job, 0, 3)
    suspect(job, 1)
    job.feed(NodeBack(node=2))
    job.feed(NodeCutOff(node=2))
    assert "node_lost" not in job.kinds()
    suspect(job, 4, 2)
    assert job.last("node_lost") == {"node": 2, "cause": "node lost"}
    assert job.kinds().count("detected") == 1


def test_node_that_is_cut_off_while_its_peers_suspected_another_takes_part_when_it_is_back() -> None:
    job = started()
    job.feed(NodeCutOff(node=2))
    suspect(job, 0, 3)
    job.feed(NodeBack(node=2))
    job.answer()
    assert job.last("generation")["nodes"] == [0, 1, 2, 3, 4]
    job.feed(NodeCutOff(node=2))
    suspect(job, 0)
    assert job.last("node_lost") == {"node": 2, "cause": "node lost"}


def test_node_that_is_cut_off_while_a_boundary_is_waited_for_is_waited_for() -> None:
    job = started()
    job.feed(NodeLeaving(node=4, reason="drain"))
    job.feed(NodeCutOff(node=2))
    job.feed(NodeBack(node=2))
    job.answer()
    assert 2 in job.last("generation")["nodes"]
    assert len(regroups(job, 2)) == 0, "all were answered"


@pytest.mark.parametrize("happened", [NodeCutOff(node=9), NodeBack(node=9), NodeLost(node=9, cause="node lost")])
def test_node_that_was_let_go_is_of_no_interest(happened: NodeCutOff | NodeBack | NodeLost) -> None:
    job = started()
    assert job.feed(happened) == []
