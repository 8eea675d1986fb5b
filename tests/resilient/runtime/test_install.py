"""Workers take their states from one generation into the next, copy only what they lack, and train on."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilient.comm import SingleProcessCommunicator, StoreClient, StoreHost
from resilient.data.reader import Cell
from resilient.errors import CommunicationError
from resilient.models.layer import WholeModel
from resilient.observability.trace_events import ACTION
from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import INIT, Generation, Injection, Regroup, StepOutcome
from resilient.runtime.batches import Batches
from resilient.runtime.commit import Ballot, Ledger
from resilient.runtime.generation_guard import GenerationGuard
from resilient.runtime.install import (
    Session,
    WorkerContext,
    build_session,
    connect_ranks,
    gather_states,
    install,
    supply,
)
from resilient.runtime.job import Job
from resilient.state import checkpoint
from resilient.state.layer_state import LayerState
from resilient.state.manifest import Manifest, folder, write_manifest
from resilient.state.witnesses import witness
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.transfer import Transfer, plan_transfers
from resilient.templates.schedules.kind import ScheduleKind
from tests.resilient.ranks import HOST, SECRET, as_threads
from tests.resilient.small import (
    CPU,
    TiedModel,
    Tokens,
    all_of,
    assemble,
    make_job,
    make_plan,
    make_profile,
    split_decay,
)

FIRST = make_plan(((0, 3, 6), 3), ((0, 6), 5))
SECOND = make_plan(((0, 2, 6), 8))
"""After the loss of the first generation's rank 1: its ranks 0 and 2 become ranks 1 and 0."""


class Member:
    """One worker: what outlives a generation."""

    def __init__(self, job: Job, path: Path) -> None:
        self.job, self.batches = job, Batches(job)
        layouts = job.layouts()
        self.profile = make_profile(job)
        self.ledger = Ledger(job.optimizer, job.clip_grad_norm)
        self.guard = GenerationGuard()
        self.faults: list[Injection] = []
        faults = Faults(str(path), kill=self.faults.append)
        for phase in ("regroup", "copy"):
            faults.arm(Injection(node=0, at_phase=phase))
        self.context = WorkerContext(
            job=job, profile=self.profile, layouts=layouts, ledger=self.ledger, guard=self.guard, faults=faults,
            host=HOST, ports="", store_client=StoreClient(SECRET),
        )  # fmt: skip

    def reduce(self, session: Session) -> StepOutcome:
        """Train a step up to the barrier, and pass it."""
        step = self.ledger.version + 1
        num_targets = self.batches.num_targets(step)
        loss = session.executor.run(session.steps.work(step, num_targets, partial(self.batches.batch, step)))
        ballot = Ballot(losses=loss, squares=session.gradient_sync.squares, num_targets=num_targets)
        return self.ledger.prepare(session.comm, ballot).outcome

    def leave(self, session: Session) -> None:
        comm = self.guard.release()
        assert comm is not None
        comm.close()
        session.gradient_sync.close()


def message(plan: Plan, rank: int, address: str, source: str = INIT, version: int = 0, **more: Any) -> Generation:
    arguments = {"generation": 1, "roll_forward": None, "transfers": (), **more}
    return Generation(rank=rank, plan=plan, version=version, source=source, store_address=address, **arguments)


def one_process(job: Job, num_steps: int) -> WholeModel:
    whole = assemble(job.model, job.seed, torch.float64)
    optimizer = torch.optim.AdamW(split_decay(whole.parameters(), 0.01), lr=0.01)
    batches = Batches(job)
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        for position in range(8):
            (whole.loss(batches.batch(step, Cell.of_chain(position, 2))) / batches.num_targets(step)).backward()
        optimizer.step()
    return whole


def start_from_files(job: Job, directory: Path) -> str:
    """Ranks that are threads share torch's random state: their initial values come from files."""
    states = [LayerState(job.layer(n), at, job.optimizer.slots, job.dtype, CPU) for n, at in job.layouts().items()]
    for state in states:
        state.initialize(job.seed)
    path = folder(directory, 0)
    write_manifest(path, Manifest(step=0, recipe=job.recipe(), states=checkpoint.save(path, all_of(states))))
    return str(path)


@pytest.mark.parametrize("rolled", [False, True], ids=["everybody committed", "one rolls forward"])
def test_survivors_train_on_as_if_nothing_had_happened(rolled: bool, tmp_path: Path) -> None:
    job = make_job()
    start = start_from_files(job, tmp_path)
    store, barrier = StoreHost(HOST, SECRET), threading.Barrier(2)
    held: dict[str, dict[int, ByteIntervals]] = {}
    plan_lock = threading.Lock()

    def work(rank: int, address: str) -> tuple[int, dict[str, LayerState], list[str | None]]:
        member = Member(job, tmp_path)
        session, _ = install(member.context, message(FIRST, rank, address, start))
        outcome = member.reduce(session)
        member.ledger.apply(outcome)
        outcome = member.reduce(session)
        if not (rolled and rank == 2):
            member.ledger.apply(outcome)
        member.leave(session)
        if rank == 1:
            return 0, {}, []
        survivor = 0 if rank == 2 else 1
        with plan_lock:
            for name, state in member.ledger.current.items():
                held.setdefault(name, {})[survivor] = state.held
        barrier.wait()
        problem = PlanningProblem(profile=member.profile, num_microbatches=8, max_failures=0)
        transfers, lost = plan_transfers(problem, SECOND, held)
        assert lost == ()
        session, installed = install(
            member.context,
            message(
                SECOND, survivor, store.address, version=2, generation=2, roll_forward=outcome, transfers=transfers
            ),
        )
        outcome = member.reduce(session)
        member.ledger.apply(outcome)
        member.leave(session)
        return installed.bytes_copied, member.ledger.current, [fault.at_phase for fault in member.faults]

    results = as_threads(3, work)
    expected = one_process(job, 3)
    copied = {rank: num_bytes for rank, (num_bytes, _, _) in enumerate(results)}
    layouts = job.layouts()
    lacking = sum(layouts[name].numel(2) * 8 for name in ("block.2", "block.3", "head"))
    assert copied == {0: lacking, 1: 0, 2: 0}, "rank 0 lacked the later layers, rank 2 held everything"
    assert [faults for _, _, faults in results] == [["regroup", "copy"], [], ["regroup", "copy"]]
    names = {name for _, states, _ in results for name in states}
    assert names == set(layouts)
    for _, states, _ in results:
        for name, state in states.items():
            for entry in state.layout.entries:
                wanted = expected.layer(name).get_parameter(entry.name)
                torch.testing.assert_close(state.parameters[entry.name], wanted, rtol=1e-8, atol=1e-10)


def test_first_generation_starts_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient.runtime.install.time", SimpleNamespace(time=count(1).__next__))
    job = make_job()
    member = Member(job, tmp_path)
    session, installed = install(member.context, message(make_plan(((0, 6), 8)), 0, ""))
    assert installed.bytes_copied == 0
    assert (installed.started_at, installed.regrouped_at, installed.installed_at) == (1, 2, 3)
    whole = assemble(job.model, job.seed, torch.float64)
    for name, state in member.ledger.current.items():
        for entry in state.layout.entries:
            assert torch.equal(state.parameters[entry.name], whole.layer(name).get_parameter(entry.name))
    assert session.slot.rank == 0


def test_generation_that_is_over_is_not_entered_and_states_stay(tmp_path: Path) -> None:
    member = Member(make_job(), tmp_path)
    install(member.context, message(make_plan(((0, 6), 8)), 0, ""))
    before = member.ledger.progress()
    member.guard.announce(Regroup(generation=9))
    with pytest.raises(CommunicationError, match=r"^the generation ended, 9 is being formed \(generation 8\)$"):
        install(member.context, message(make_plan(((0, 6), 8)), 0, "", generation=8))
    after = member.ledger.progress()
    assert after.version == before.version == 0
    assert set(after.current + after.retained) == set(before.current)


@pytest.mark.parametrize(("rank", "exchanging"), [(0, {(0, 1)}), (1, {(0, 1), (1, 2)}), (3, {(3, 4)})])
def test_ranks_that_will_send_each_other_tensors_are_named_when_groups_are_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, exchanging: set[tuple[int, int]]
) -> None:
    """Neighbours in a rank's pipeline, and the ends of copies."""
    asked: list[tuple[torch.device, set[tuple[int, int]]]] = []

    def connect(**arguments: Any) -> None:
        asked.append((arguments["device"], set(arguments["pairs"])))
        raise CommunicationError("far enough")

    monkeypatch.setattr("resilient.runtime.install.connect", connect)
    plan = make_plan(((0, 2, 4, 6), 3), ((0, 3, 6), 5))
    transfers = tuple(Transfer(state="head", source=5, target=rank, first_byte=0, end_byte=8) for rank in (2, 4))
    job = make_job(device=torch.device("meta"))
    with pytest.raises(CommunicationError, match=r"^far enough$"):
        install(Member(job, tmp_path).context, message(plan, rank, "", transfers=transfers, num_sources=1))
    assert asked == [(torch.device("meta"), {*exchanging, (5, 2), (5, 4)})]


def test_copies_come_from_states_the_new_plan_does_not_give_the_sender(tmp_path: Path) -> None:
    job = make_job(model=TiedModel(num_blocks=1), dataset=Tokens())
    start, store = start_from_files(job, tmp_path), StoreHost(HOST, SECRET)
    before, after = make_plan(((0, 3), 8)), make_plan(((0, 1, 3), 8))

    def work(rank: int, address: str) -> tuple[list[str], list[str]]:
        member = Member(job, tmp_path)
        if rank == 0:
            session, _ = install(member.context, message(before, 0, address, start))
            member.leave(session)
        transfers = tuple(
            Transfer(state=name, source=0, target=1, first_byte=0, end_byte=job.layouts()[name].numel(2) * 8)
            for name in ("embed", "block.0", "head")
        )
        install(member.context, message(after, rank, store.address, generation=2, transfers=transfers))
        progress = member.ledger.progress()
        return sorted(progress.current), sorted(progress.retained)

    assert as_threads(2, work) == [(["embed"], ["block.0", "head"]), (["block.0", "embed", "head"], [])]


def test_copy_replaces_what_its_receiver_holds_and_is_no_witness_of_its_own(tmp_path: Path) -> None:
    """Its holder had not heard that its copy was odd."""
    job = make_job(model=TiedModel(num_blocks=1), dataset=Tokens())
    start, store = start_from_files(job, tmp_path), StoreHost(HOST, SECRET)
    plan = make_plan(((0, 3), 4), ((0, 3), 4))
    num_bytes = job.layouts()["embed"].numel(2) * 8
    transfers = (Transfer(state="embed", source=0, target=1, first_byte=0, end_byte=num_bytes),)

    def work(rank: int, address: str) -> tuple[list[float], dict[str, int]]:
        member = Member(job, tmp_path)
        session, _ = install(member.context, message(plan, rank, address, start))
        member.leave(session)
        member.ledger.current["embed"].buffer.fill_(rank)
        session, _ = install(member.context, message(plan, rank, store.address, generation=2, transfers=transfers))
        member.leave(session)
        states = member.ledger.current
        return states["embed"].buffer.unique().tolist(), {name: state.origin for name, state in states.items()}

    first, second = (witness(slot.node, slot.local_rank) for slot in plan.slots)
    assert as_threads(2, work) == [
        ([0.0], {"embed": first, "block.0": first, "head": first}),
        ([0.0], {"embed": first, "block.0": second, "head": second}),
    ]


def test_worker_without_a_place_sends_what_it_holds_and_is_not_needed_any_more(tmp_path: Path) -> None:
    job = make_job()
    start, store = start_from_files(job, tmp_path), StoreHost(HOST, SECRET)
    installed_everywhere, source_is_gone = threading.Barrier(3), threading.Barrier(3)
    plan = make_plan(((0, 3, 6), 8))
    holders = plan.holders(make_profile(job))
    transfers = tuple(
        Transfer(state=name, source=2, target=rank, first_byte=0, end_byte=job.layouts()[name].numel(2) * 8)
        for name, ranks in holders.items()
        for rank in ranks
    )

    def work(rank: int, address: str) -> tuple[int, list[str], list[str]]:
        member = Member(job, tmp_path)
        announced = message(plan, rank, store.address, generation=2, transfers=transfers, num_sources=1)
        if rank == 2:
            session, _ = install(member.context, message(make_plan(((0, 6), 8)), 0, address, start))
            member.leave(session)
            num_bytes = supply(member.context, announced).bytes_copied
            installed_everywhere.wait()
            comm = member.guard.release()
            assert comm is not None
            comm.close()
            source_is_gone.wait()
        else:
            session, installed = install(member.context, announced)
            num_bytes = installed.bytes_copied
            installed_everywhere.wait()
            source_is_gone.wait()
            outcome = member.reduce(session)
            member.ledger.apply(outcome)
            member.leave(session)
        progress = member.ledger.progress()
        return num_bytes, sorted(progress.current), sorted(progress.retained)

    everything = sorted(job.layouts())
    results = as_threads(3, work)
    assert results[2] == (0, [], everything)
    for rank, (num_bytes, current, retained) in enumerate(results[:2]):
        needed = [name for name, ranks in holders.items() if rank in ranks]
        assert (current, retained) == (sorted(needed), [])
        assert num_bytes == sum(t.end_byte for t in transfers if t.target == rank)


def test_gathering_takes_what_is_here_and_makes_the_rest(tmp_path: Path) -> None:
    member, comm = Member(make_job(), tmp_path), SingleProcessCommunicator()
    member.ledger.begin_install(0, None)
    first, second = message(make_plan(((0, 2, 6), 8)), 0, ""), message(make_plan(((0, 6), 8)), 0, "", generation=2)
    assert gather_states(member.context, first, first.plan.slots[0], comm) == 0
    assert set(member.ledger.current) == {"embed", "block.0"}
    kept = member.ledger.current["embed"]
    member.ledger.begin_install(0, None)
    gather_states(member.context, second, second.plan.slots[0], comm)
    assert set(member.ledger.current) == set(member.job.layouts())
    assert member.ledger.current["embed"] is kept


def test_gathering_takes_what_is_here_of_a_state_of_which_another_part_is_needed(tmp_path: Path) -> None:
    member, comm = Member(make_job(), tmp_path), SingleProcessCommunicator()
    whole = message(make_plan(((0, 6), 8)), 0, "")
    (slot,) = whole.plan.slots
    shared = replace(slot, shard_index=1, stages=(replace(slot.stages[0], num_devices=2),))
    needed = shared.intervals(member.profile)
    member.ledger.begin_install(0, None)
    gather_states(member.context, whole, slot, comm)
    for state in member.ledger.current.values():
        state.buffer.copy_(torch.arange(state.buffer.numel()))
    member.ledger.begin_install(0, None)
    assert gather_states(member.context, message(whole.plan, 0, "", source="nowhere"), shared, comm) == 0
    for name, state in member.ledger.current.items():
        assert state.held == needed[name]
        numbers = [number for start, end in state.held for number in range(start // 8, end // 8)]
        assert state.buffer.tolist() == numbers, "not made anew"


def test_odd_copy_is_not_held_any_more_when_membership_changes_before_it_is_replaced(tmp_path: Path) -> None:
    member, plan = Member(make_job(), tmp_path), make_plan(((0, 6), 8))
    member.ledger.begin_install(0, None)
    gather_states(member.context, message(plan, 0, ""), plan.slots[0], SingleProcessCommunicator())
    member.ledger.begin_install(0, None)
    num_bytes = member.ledger.retained["embed"].held.size
    copy = Transfer(state="embed", source=1, target=0, first_byte=0, end_byte=num_bytes)
    again = message(plan, 0, "", generation=2, transfers=(copy,))
    member.guard.announce(Regroup(generation=3))
    with pytest.raises(CommunicationError):
        connect_ranks(member.context, again, plan.pieces(member.profile))
    progress = member.ledger.progress()
    assert {*progress.current, *progress.retained} == member.job.layouts().keys() - {"embed"}


def test_connecting_puts_the_groups_under_the_guard(tmp_path: Path) -> None:
    member, alone = Member(make_job(), tmp_path), message(make_plan(((0, 6), 8)), 0, "")
    comm = connect_ranks(member.context, alone, alone.plan.pieces(member.profile))
    assert [fault.at_phase for fault in member.faults] == ["regroup"]
    comm.check()
    member.guard.announce(Regroup(generation=2))
    with pytest.raises(CommunicationError, match=r"^the generation was aborted$"):
        comm.check()
    assert member.guard.release() is comm


def test_session_runs_what_the_plan_says_of_its_pipeline(tmp_path: Path) -> None:
    plan = replace(make_plan(((0, 6), 8)), schedule_kind=ScheduleKind.ZB_H2)
    member, alone = Member(make_job(schedule="gpipe"), tmp_path), message(plan, 0, "")
    comm = SingleProcessCommunicator()
    member.ledger.begin_install(0, None)
    gather_states(member.context, alone, plan.slots[0], comm)
    session = build_session(member.context, alone, plan.slots[0], comm, plan.pieces(member.profile))
    member.ledger.start()
    member.reduce(session)
    ran = [name for category, name, *_ in session.executor.span_recorder.spans() if category == ACTION]
    assert ran == str(plan.schedule(0, [range(6)])).split()
