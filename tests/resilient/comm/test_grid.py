"""Sums of many ranks: no rank is connected to many, the sums are those of a flat group, and equal on all ranks."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from resilient.comm import Communicator, GlooCommunicator, StoreClient, StoreHost, connect, grid
from resilient.comm.grid import WIDEST, GridLine, grid_lines
from resilient.comm.interface import Group
from resilient.comm.store_client import GenerationStore, StoreConnection
from resilient.comm.store_messages import Answer, Forget, Request
from resilient.errors import CommunicationError
from tests.resilient.ranks import HOST, SECRET, as_threads, join


def added_along(lines: dict[int, list[GridLine]], group: Group) -> list[list[int]]:
    """Return what the ranks have of 7 values after a sum in which each brings ones, by the lines alone."""
    shares = {rank: [torch.ones(7, dtype=torch.int64)] for rank in group}
    ahead = {rank: list(own) for rank, own in lines.items()}
    passed: list[GridLine] = []
    while any(ahead.values()):
        line = next(
            own[0] for own in ahead.values() if own and all(ahead[peer][:1] == own[:1] for peer in own[0].ranks)
        )
        for rank in line.ranks:
            del ahead[rank][0]
        parts = torch.stack([shares[rank][-1] for rank in line.ranks]).sum(dim=0).tensor_split(line.num_parts)
        for place, rank in enumerate(line.ranks):
            shares[rank].append(parts[place].clone() if place < line.num_parts else torch.tensor([]).long())
        passed.append(line)
    for line in reversed(passed):
        whole = torch.cat([shares[rank].pop() for rank in line.ranks])
        for rank in line.ranks:
            shares[rank][-1].copy_(whole)
    return [whole.tolist() for (whole,) in shares.values()]


@pytest.mark.parametrize(
    ("size", "most_connections"), [(2, 1), (32, 31), (33, 10), (64, 14), (170, 25), (1000, 62), (1024, 62), (1025, 28)]
)
def test_rank_of_many_is_connected_to_few(size: int, most_connections: int) -> None:
    group = tuple(range(0, 3 * size, 3))
    lines = {rank: grid_lines(group, rank, WIDEST) for rank in group}
    for rank, own in lines.items():
        for line in own:
            assert rank in line.ranks
            assert all(line in lines[peer] for peer in line.ranks), "all of a line know it alike"
    assert max(sum(len(line.ranks) - 1 for line in own) for own in lines.values()) == most_connections


@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 27, 100])
@pytest.mark.parametrize("widest", [2, 3, 32])
def test_lines_reach_everybody_once(size: int, widest: int) -> None:
    group = tuple(range(size))
    lines = {rank: grid_lines(group, rank, widest) for rank in group}
    assert added_along(lines, group) == [[size] * 7] * size


def values_of(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator)


@pytest.mark.parametrize("size", [5, 11])
def test_sums_along_lines_are_those_of_a_flat_group_and_equal_on_all_ranks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "WIDEST", 3)
    world = tuple(range(size))

    def work(rank: int, address: str) -> list[bytes]:
        comm = join(address, rank, size, [world[1:]])
        found = [values_of(rank, 1000), values_of(rank, 2), torch.full((3, 5), 10**rank)]
        for pending in [comm.all_reduce(each, world) for each in found]:
            pending.wait()
        return [each.numpy().tobytes() for each in found]

    told = as_threads(size, work)
    assert told == [told[0]] * size
    floats, few, whole = told[0]
    expected = torch.stack([values_of(rank, 1000) for rank in world]).sum(dim=0)
    assert torch.allclose(torch.frombuffer(bytearray(floats), dtype=torch.float32), expected, atol=1e-5)
    assert len(few) == 8
    assert torch.frombuffer(bytearray(whole), dtype=torch.int64).tolist() == [sum(10**rank for rank in world)] * 15


def test_sums_of_several_groups_end_in_whatever_order_ranks_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's waiting moves a sum on: ranks that wait for another one first would wait in a circle."""
    monkeypatch.setattr(grid, "WIDEST", 2)
    size = 6
    groups = [(0, 1, 2, 3, 4), (1, 2, 3, 4, 5), (2, 4)]

    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, size, groups)
        values = {group: [torch.tensor([10.0**rank]), torch.ones(4)] for group in groups if rank in group}
        pending = {group: [comm.all_reduce(each, group) for each in both] for group, both in values.items()}
        for group in sorted(pending, reverse=rank % 2 == 0):
            for each in pending[group][:: 1 if rank < 3 else -1]:
                each.wait()
        assert all(both[1].tolist() == [float(len(group))] * 4 for group, both in values.items())
        return [both[0].item() for both in values.values()]

    first, second, third = (float(sum(10**rank for rank in group)) for group in groups)
    assert as_threads(size, work) == [
        [first], [first, second], [first, second, third], [first, second], [first, second, third], [second],
    ]  # fmt: skip


def test_only_ranks_that_are_to_send_each_other_tensors_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "WIDEST", 2)

    def work(rank: int, address: str) -> tuple[float, str]:
        store = GenerationStore(StoreClient(SECRET).take(address, 60.0), 1)
        comm = GlooCommunicator(
            generation=1, rank=rank, size=4, groups=[], store=store, host=HOST, timeout_s=60.0, num_sources=1,
            pairs=[(4, 0), (0, 3), (3, 1)],
        )  # fmt: skip
        value = torch.tensor([float(rank)])
        peers = {4: 0, 0: 4, 1: 3, 3: 1}
        if rank in (4, 1):
            comm.send(value, peers[rank], 7).wait()
        elif rank in (0, 3):
            comm.recv(value, peers[rank], 7).wait()
        refused = ""
        if rank == 2:
            with pytest.raises(AssertionError) as error:
                comm.send(value, 4, 7)
            refused = str(error.value)
        return value.item(), refused

    sent = as_threads(5, work)
    assert [value for value, _ in sent] == [4.0, 1.0, 2.0, 1.0, 4.0]
    assert sent[2][1] == "ranks (2, 4) send each other tensors, of which neither was told"


@pytest.mark.parametrize(("gpus", "own"), [("abcd", True), ("abca", False), ("ab-d", False), ("----", False)])
def test_ranks_find_out_whether_each_has_a_gpu_of_its_own(
    gpus: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "WIDEST", 3)

    def work(rank: int, address: str) -> bool:
        store = GenerationStore(StoreClient(SECRET).take(address, 60.0), 1)
        return GlooCommunicator(
            generation=1, rank=rank, size=4, groups=[], store=store, host=HOST, timeout_s=60.0,
            gpu=gpus[rank].strip("-"), pairs=[],
        ).own_gpus  # fmt: skip

    assert as_threads(4, work) == [own] * 4


def test_what_a_rank_asks_of_the_store_and_whom_it_knows_does_not_grow_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grid, "WIDEST", 3)
    asked: Counter[type[Request]] = Counter()
    ask = StoreConnection.ask

    def ask_and_count(self: StoreConnection, request: Request) -> Answer:
        asked[type(request)] += 1
        return ask(self, request)

    monkeypatch.setattr(StoreConnection, "ask", ask_and_count)

    def work(rank: int, address: str) -> Communicator:
        store = GenerationStore(StoreClient(SECRET).take(address, 60.0), 1)
        return GlooCommunicator(
            generation=1, rank=rank, size=9, groups=[], store=store, host=HOST, timeout_s=60.0, pairs=[]
        )

    comms = as_threads(9, work)
    assert [len(comm.peers) for comm in comms if isinstance(comm, GlooCommunicator)] == [4] * 9
    del asked[Forget]
    assert sum(asked.values()) == 9 * 2, "to say where it is, to ask where its peers are"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_failed_sum_keeps_no_groups_and_threads_without_the_collector(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is under way then: of a long message a part may have come."""
    monkeypatch.setattr(grid, "WIDEST", 2)
    world = (0, 1, 2, 3, 4)

    def work(rank: int, address: str) -> weakref.ref[Communicator]:
        store = GenerationStore(StoreClient(SECRET).take(address, 60.0), 1)
        comm = GlooCommunicator(generation=1, rank=rank, size=5, groups=[], store=store, host=HOST, timeout_s=600.0)
        values = torch.ones(size)

        def sum_until_it_fails() -> None:
            while True:
                comm.all_reduce(values, world).wait()

        if rank == 2:
            comm.all_reduce(values, world)
            while size > 1 and values[0] == 1 and values[-1] == 1:
                time.sleep(0.0001)
            comm.abort()
        with pytest.raises(CommunicationError):
            sum_until_it_fails()
        comm.abort()
        comm.close()
        return weakref.ref(comm)

    assert [kept() for kept in as_threads(5, work)] == [None] * 5
    for thread in threading.enumerate():
        if thread.name in ("channels", "gloo-sums"):
            thread.join(timeout=60)
            assert not thread.is_alive(), thread.name


def test_interrupted_connect_ends_in_its_first_sum_and_so_do_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hangs up: the last rank has met all, and stands still before it sums."""
    monkeypatch.setattr(grid, "WIDEST", 2)
    host, add_up, goes_on = StoreHost(HOST, SECRET), GlooCommunicator._sum, threading.Event()
    interrupted: list[queue.SimpleQueue[object]] = [queue.SimpleQueue() for _ in range(3)]
    building: queue.SimpleQueue[tuple[int, threading.Thread]] = queue.SimpleQueue()

    def stand_still_or_add_up(comm: GlooCommunicator, value: float) -> float:
        building.put((comm.rank, threading.current_thread()))
        if comm.rank == 2:
            goes_on.wait()
        return add_up(comm, value)

    monkeypatch.setattr(GlooCommunicator, "_sum", stand_still_or_add_up)

    def meet(rank: int) -> str:
        with pytest.raises(CommunicationError) as error:
            connect(
                generation=7, rank=rank, size=3, groups=[], store_address=host.address,
                store_client=StoreClient(SECRET), host=HOST, timeout_s=600.0, interrupted=interrupted[rank],
                device=torch.device("cpu"),
            )  # fmt: skip
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        meeting = [pool.submit(meet, rank) for rank in range(3)]
        threads = dict(building.get() for _ in range(3))
        for wanted in interrupted:
            wanted.put("membership changed")
        for rank, told in enumerate(meeting):
            assert told.result() == f"rank {rank}: groups were not built: membership changed (generation 7)"
    for rank in (0, 1):
        threads[rank].join(timeout=60)
    still = [rank for rank in (0, 1) if threads[rank].is_alive()]
    goes_on.set()
    assert still == []
