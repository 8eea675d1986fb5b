"""States that devices divide become those of another degree; who divides a stage knows what each layer needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resilient.comm import SingleProcessCommunicator
from resilient.pipeline.stage_sharding import StageSharding
from resilient.runtime.install import gather_states
from resilient.state.peer_copy import copy_states
from resilient.templates.plan import Pipeline, Plan, PlanningProblem, Slot
from resilient.templates.replan.transfer import plan_transfers
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.ranks import as_threads, join
from tests.resilient.runtime.test_install import Member, message
from tests.resilient.small import TiedModel, make_job, make_plan, make_profile


def sharded_pipeline(node: int, degree: int) -> Pipeline:
    """A stage of all layers on the devices of one node."""
    stage = StageSpec(
        first_layer=0, end_layer=6, node_index=0, num_devices=degree, shard=degree, forward_ms=1.0, backward_ms=2.0
    )
    return Pipeline(template=PipelineTemplate(num_nodes=1, stages=(stage,)), nodes=(node,), num_microbatches=4)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (3, 1), (4, 2)])
def test_parts_of_several_peers_become_those_of_another_degree(before: int, after: int, tmp_path: Path) -> None:
    """One node divides the states, another has none of them yet: then both divide them otherwise.

    Of four devices the second has the second quarter, which it sends, while it receives all of the half that it needs.
    """

    def plan_of(*degrees: int) -> Plan:
        return Plan(pipelines=tuple(sharded_pipeline(node, degree) for node, degree in enumerate(degrees)))

    first, second = plan_of(before), plan_of(after, after)
    profile = make_profile(make_job())
    problem = PlanningProblem(profile=profile, num_microbatches=8)
    ranks = {(slot.node, slot.local_rank): slot.rank for slot in second.slots}
    others = [slot for slot in first.slots if (slot.node, slot.local_rank) not in ranks]
    ranks |= {(slot.node, slot.local_rank): len(second.slots) + place for place, slot in enumerate(others)}
    held = {
        state: {ranks[first.slots[rank].node, first.slots[rank].local_rank]: part for rank, part in of.items()}
        for state, of in first.holders(profile).items()
    }
    assert second.redundancy(profile) == 2, "each node has every byte"
    transfers, lost = plan_transfers(problem, second, held, len(others))
    assert lost == ()

    def fill(member: Member, slot: Slot) -> None:
        gather_states(member.context, message(first, slot.rank, ""), slot, SingleProcessCommunicator())
        for state in member.ledger.current.values():
            numbers = [number for start, end in state.held for number in range(start // 8, end // 8)]
            state.buffer.copy_(torch.tensor(numbers, dtype=torch.float64))
        member.ledger.begin_install(0, None)

    def work(rank: int, address: str) -> None:
        member = Member(make_job(), tmp_path)
        member.ledger.begin_install(0, None)
        worker = next(worker for worker, at in ranks.items() if at == rank)
        for slot in first.slots:
            if (slot.node, slot.local_rank) == worker:
                fill(member, slot)
        comm = join(address, rank, len(second.slots), num_sources=len(others))
        told = message(second, rank, address, generation=2, transfers=transfers, source="nowhere")
        if rank >= len(second.slots):
            copy_states(comm, transfers, member.ledger.retained, {})
            return
        slot = second.slots[rank]
        gather_states(member.context, told, slot, comm)
        assert {name: state.held for name, state in member.ledger.current.items()} == slot.intervals(profile)
        for state in member.ledger.current.values():
            numbers = [number for start, end in state.held for number in range(start // 8, end // 8)]
            assert state.buffer.tolist() == numbers

    as_threads(len(second.slots) + len(others), work)


def test_what_is_kept_of_a_plan_is_not_lost_by_what_the_next_one_takes_of_it(tmp_path: Path) -> None:
    """A failure before the first commit may need what only the older plan has here."""
    member, comm = Member(make_job(), tmp_path), SingleProcessCommunicator()
    profile = member.profile
    plan = Plan(pipelines=(sharded_pipeline(0, 2),))
    one, other = (slot.intervals(profile) for slot in plan.slots)
    member.ledger.begin_install(0, None)
    gather_states(member.context, message(plan, 0, ""), plan.slots[0], comm)
    member.ledger.begin_install(0, None)
    gather_states(member.context, message(plan, 1, "", generation=2), plan.slots[1], comm)
    progress = member.ledger.progress()
    assert (progress.current_parts, progress.retained_parts) == (other, one)
    member.ledger.begin_install(0, None)
    assert all(state.held == state.whole for state in member.ledger.retained.values())
    assert member.ledger.progress().retained_parts == {}


def test_layers_need_the_states_they_share_and_differentiate_behind_what_is_trained(tmp_path: Path) -> None:
    member = Member(make_job(model=TiedModel(frozen=["embed", "block.0"])), tmp_path)
    plan = Plan(pipelines=(sharded_pipeline(0, 2),))
    member.ledger.begin_install(0, None)
    gather_states(member.context, message(plan, 0, ""), plan.slots[0], SingleProcessCommunicator())
    layouts, states, comm = member.job.layouts(), member.ledger.current, SingleProcessCommunicator()
    sharding = StageSharding(member.profile, layouts, comm, plan, plan.slots[0], states)
    layers = [sharding.layer(number) for number in range(6)]
    assert [layer.has_backward for layer in layers] == [False, False, True, True, True, True]
    assert [list(layer.trained) for layer in layers] == [[], [], [2], [3], [4], [5]]
    assert layers[5].gathered == [sharding.gathered["head"], sharding.gathered["embed"]]
    assert sharding.arrivals == {2: 1, 3: 1, 4: 1, 5: 1}
    alone = make_plan(((0, 6), 8))
    assert StageSharding(member.profile, layouts, comm, alone, alone.slots[0], states).gathered == {}


def test_gradients_of_a_shared_state_arrive_once_for_each_layer_that_uses_it(tmp_path: Path) -> None:
    member, plan = Member(make_job(), tmp_path), Plan(pipelines=(sharded_pipeline(0, 2),))
    member.ledger.begin_install(0, None)
    comm = SingleProcessCommunicator()
    gather_states(member.context, message(plan, 0, ""), plan.slots[0], comm)
    layouts, states = member.job.layouts(), member.ledger.current
    sharding = StageSharding(member.profile, layouts, comm, plan, plan.slots[0], states)
    assert sharding.arrivals == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert list(sharding.layer(5).trained) == [5, 0], "the last layer's sums come first"
