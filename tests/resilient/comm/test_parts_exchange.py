"""Parts of unequal sizes are gathered and summed by all of a group; a rank that dies ends the wait of the others."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from resilient.comm import SingleProcessCommunicator, StoreHost
from resilient.errors import CommunicationError
from tests.resilient.ranks import HOST, SECRET, as_threads, join, processes

SIZES = [(5, 2, 5), (0, 12, 0), (3, 0, 9)]
"""Of three ranks: some have nothing."""


@pytest.mark.parametrize("sizes", SIZES)
def test_everybody_gets_the_parts_of_all(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(12.0)

    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, 4)
        if rank == 1:  # in no group
            return []
        group = (0, 2, 3)
        found, own = torch.full((14,), -1.0), group.index(rank)
        parts = found[1:-1].split(sizes)
        parts[own].copy_(whole.split(sizes)[own])
        comm.all_gather(parts, group).wait()
        return found.tolist()

    assert [found for found in as_threads(4, work) if found] == [[-1.0, *whole.tolist(), -1.0]] * 3


@pytest.mark.parametrize("sizes", SIZES)
def test_everybody_gets_the_sum_of_its_part(sizes: tuple[int, ...]) -> None:
    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, 3)
        addends = (torch.arange(12, dtype=torch.float64) * 10**rank).split(sizes)
        comm.reduce_scatter(addends, (0, 1, 2)).wait()
        return addends[rank].tolist()

    assert [value for part in as_threads(3, work) for value in part] == [111.0 * number for number in range(12)]


def test_exchanges_of_one_group_may_be_under_way_at_once_beside_messages_and_sums() -> None:
    def work(rank: int, address: str) -> list[float]:
        comm, everybody = join(address, rank, 2), (0, 1)
        tensors = [torch.tensor([float(rank == place) * (number + 1) for place in everybody]) for number in range(5)]
        sums = [torch.full((2,), 10.0**rank) for _ in range(5)]
        received = torch.empty(1)
        pending = [comm.all_gather(tensor.split(1), everybody) for tensor in tensors]
        pending += [comm.recv(received, 1 - rank, 0), comm.send(torch.tensor([7.0]), 1 - rank, 0)]
        pending += [comm.reduce_scatter(each.split(1), everybody) for each in sums]
        total = torch.ones(1)
        comm.all_reduce(total, everybody).wait()
        for each in reversed(pending):
            each.wait()
        return [*(tensor.sum().item() for tensor in tensors), *(each[rank].item() for each in sums), received.item()]

    assert as_threads(2, work) == [[2.0, 4.0, 6.0, 8.0, 10.0, *[11.0] * 5, 7.0]] * 2


def test_sums_come_out_the_same_on_whatever_rank_and_however_often() -> None:
    """Rounding depends on the order of the addends: that is the ranks'."""
    addends = [torch.randn(64, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = (addends[0] + addends[1]) + addends[2]

    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, 3)
        found: list[Tensor] = []
        for owner in range(3):  # each in turn has all of it
            addend = addends[rank].clone()
            comm.reduce_scatter(addend.split([64 * (place == owner) for place in range(3)]), (0, 1, 2)).wait()
            found += [addend] if owner == rank else []
        return found[0].tolist()

    assert as_threads(3, work) == [expected.tolist()] * 3


def test_one_worker_has_all_there_is() -> None:
    comm, tensor = SingleProcessCommunicator(), torch.ones(3)
    comm.all_gather([tensor], (0,)).wait()
    comm.reduce_scatter([tensor], (0,)).wait()
    assert tensor.tolist() == [1.0] * 3
    comm.abort()
    for exchange in (comm.all_gather, comm.reduce_scatter):
        with pytest.raises(CommunicationError):
            exchange([tensor], (0,))


def survivor(rank: int, parent: Connection, operation: str, victim: int) -> None:
    """Exchange parts for ever; tell when that ended, and whom it is blamed on."""
    host = StoreHost(HOST, SECRET)
    parent.send(host.address)
    address = parent.recv()
    comm = join(address, rank, 3)
    num_done = 0
    try:
        while True:
            exchange = comm.all_gather if operation == "all_gather" else comm.reduce_scatter
            exchange(torch.ones(300_000).split(100_000), (0, 1, 2)).wait()
            num_done += 1
            if num_done == 3:
                parent.send("runs")
                if rank == victim:
                    signal.pause()
    except CommunicationError as error:
        parent.send((time.monotonic(), error.peer))
    parent.recv()


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_death_of_one_rank_ends_the_exchange_of_the_others_who_name_it(operation: str) -> None:
    victim = 1
    with processes(survivor, 3, operation, victim) as started:
        addresses = [connection.recv() for _, connection in started]
        for _, connection in started:
            connection.send(addresses[0])
        assert [connection.recv() for _, connection in started] == ["runs"] * 3
        killed_at = time.monotonic()
        started[victim][0].kill()
        told = [connection.recv() for rank, (_, connection) in enumerate(started) if rank != victim]
    assert [peer for _, peer in told] == [victim] * 2
    assert max(at for at, _ in told) - killed_at < 5.0, "not the group's timeout"
