"""Groups carry what they should; a death or an abort ends every operation, wherever a rank waits, and nothing else."""

from __future__ import annotations

import gc
import json
import queue
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]

from resilient.comm import Communicator, SingleProcessCommunicator, StoreClient, StoreHost, connect, gloo, grid
from resilient.comm.store_client import GenerationStore
from resilient.comm.store_messages import Set
from resilient.errors import CommunicationError
from tests.resilient.ranks import HOST, SECRET, as_threads, join, processes


def test_messages_arrive_by_tag_whatever_the_order_of_receipts() -> None:
    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, 2)
        peer = 1 - rank
        sends = [comm.send(torch.tensor([float(10 * rank + tag)]), peer, tag) for tag in (1, 2, 3)]
        received: list[Tensor] = [torch.empty(1) for _ in range(3)]
        for tag in (3, 1, 2):
            comm.recv(received[tag - 1], peer, tag).wait()
        for send in sends:
            send.wait()
        return [value.item() for value in received]

    assert as_threads(2, work) == [[11.0, 12.0, 13.0], [1.0, 2.0, 3.0]]


def test_sums_cover_their_group_alone() -> None:
    groups = [(0, 1, 2), (1, 3), (0, 2)]

    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, 4, groups)
        everybody = (0, 1, 2, 3)
        values = {group: torch.tensor([10.0**rank]) for group in [*groups, everybody] if rank in group}
        pending = [comm.all_reduce(value, group) for group, value in values.items()]
        for work in pending:
            work.wait()
        return [value.item() for value in values.values()]

    assert as_threads(4, work) == [[111, 101, 1111], [111, 1010, 1111], [111, 101, 1111], [1010, 1111]]


@pytest.mark.parametrize("size", [1, 2])
def test_sources_send_and_are_in_no_sum(size: int) -> None:
    def work(rank: int, address: str) -> tuple[int, float]:
        comm = join(address, rank, size, num_sources=1)
        if rank == size:
            for target in range(size):
                comm.send(torch.tensor([7.0 + target]), target, 1).wait()
            return comm.size, 0.0
        received = torch.empty(1)
        comm.recv(received, size, 1).wait()
        comm.all_reduce(received, tuple(range(comm.size))).wait()
        return comm.size, received.item()

    total = {1: 7.0, 2: 15.0}[size]
    assert as_threads(size + 1, work) == [(size, total)] * size + [(size, 0.0)]


def connections(address: str) -> set[int]:
    """Return this process's ports that are connected to the store."""
    port = int(address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return {
        each.laddr.port for each in found if each.raddr and each.raddr.port == port and each.status == "ESTABLISHED"
    }


def test_connection_to_the_store_lasts_from_generation_to_generation() -> None:
    seen: list[set[int]] = []
    together = threading.Barrier(2, timeout=100)

    def work(rank: int, address: str) -> None:
        client = StoreClient(SECRET)
        for generation in (1, 2):
            comm = join(address, rank, 2, generation=generation, store_client=client)
            together.wait()
            seen.append(connections(address))
            together.wait()
            comm.abort()

    as_threads(2, work)
    assert len(seen[0]) == 2, "each rank's"
    assert seen == [seen[0]] * 4


def test_connection_to_the_store_of_another_rank_is_a_new_one() -> None:
    one, other = StoreHost(HOST, SECRET), StoreHost(HOST, SECRET)
    client = StoreClient(SECRET)
    client.give_back(client.take(one.address, 100.0))
    before = connections(one.address)
    connection = client.take(other.address, 100.0)
    connection.ask(Set({"g1/key": b"value"}))
    assert len(connections(other.address)) == 1, "this"
    assert connections(one.address) < before, "that of a store where nobody meets any more is closed"


def test_store_keeps_only_the_keys_of_the_generation_that_met_last() -> None:
    together = threading.Barrier(2, timeout=100)

    def work(rank: int, address: str) -> list[bool]:
        client = StoreClient(SECRET)
        for generation in (1, 2, 10):
            comm = join(address, rank, 2, generation=generation, store_client=client)
            together.wait()
            comm.abort()
        for thread in threading.enumerate():
            if thread.name.startswith("connect-g"):
                thread.join()  # whoever builds the groups of rank 0 drops the keys
        return [
            GenerationStore(client.take(address, 100.0), generation).check([f"rank/{rank}"])
            for generation in (1, 2, 10)
        ]

    assert as_threads(2, work) == [[False, False, True]] * 2


def teller(rank: int, connection: Connection, address: str) -> None:
    join(address, rank, 2).all_reduce(torch.ones(1), (0, 1)).wait()
    connection.send(json.loads(_dump_fr_trace_json(True, False)))


def test_torch_keeps_no_record_of_groups_and_operations() -> None:
    store = StoreHost(HOST, SECRET)
    with processes(teller, 2, store.address) as started:
        for record in [connection.recv() for _, connection in started]:
            assert not record.get("entries"), record
            assert not record["pg_config"], record
            assert not record["pg_status"], record


def test_one_worker_needs_no_store() -> None:
    comm = connect(
        generation=1, rank=0, size=1, groups=[], store_address="", store_client=StoreClient(SECRET), host=HOST,
        timeout_s=1.0, interrupted=queue.SimpleQueue(), device=torch.device("cpu"),
    )  # fmt: skip
    assert isinstance(comm, SingleProcessCommunicator)
    value = torch.ones(2)
    comm.all_reduce(value, (0,)).wait()
    assert value.tolist() == [1.0, 1.0]
    comm.abort()
    for give_up in (comm.check, lambda: comm.all_reduce(value, (0,))):
        with pytest.raises(CommunicationError, match=r"^the generation was aborted$"):
            give_up()


def test_interrupted_connect_ends_while_it_waits_for_a_peer() -> None:
    host = StoreHost(HOST, SECRET)
    interrupted: queue.SimpleQueue[object] = queue.SimpleQueue()
    raised: list[str] = []

    def wait_for_a_peer_that_never_comes() -> None:
        with pytest.raises(CommunicationError) as error:
            connect(
                generation=7, rank=0, size=2, groups=[], store_address=host.address,
                store_client=StoreClient(SECRET), host=HOST, timeout_s=600.0, interrupted=interrupted,
                device=torch.device("cpu"),
            )  # fmt: skip
        raised.append(str(error.value))

    thread = threading.Thread(target=wait_for_a_peer_that_never_comes)
    thread.start()
    published = GenerationStore(StoreClient(SECRET).take(host.address, 100.0), 7)
    published.get("rank/0")  # blocks until the rank has published where it listens
    interrupted.put("membership changed")
    thread.join()
    assert raised == ["rank 0: groups were not built: membership changed (generation 7)"]


def test_thread_that_waits_for_groups_ends_with_them_though_nobody_closed_them() -> None:
    before = set(threading.enumerate())
    waiter = gloo._Waiter()
    (thread,) = set(threading.enumerate()) - before
    del waiter
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_connect_ends_whatever_goes_wrong_in_it() -> None:
    with pytest.raises(
        CommunicationError, match=r"^rank 0: groups were not built: invalid literal.* \(generation 1\)$"
    ):
        join("host:no-port", 0, 2)


def survivor(rank: int, parent: Connection, operation: str) -> None:
    """Wait for something that a death makes impossible; then take part in the next generation."""
    if operation.endswith("along lines"):
        grid.WIDEST = 2
    host = StoreHost(HOST, SECRET)
    parent.send(host.address)
    address, size, victim = parent.recv()
    everybody = tuple(range(size))
    comm = join(address, rank, size)
    value = torch.ones(300_000)
    comm.all_reduce(value, everybody).wait()
    parent.send(f"sum {value[-1].item()}")
    if rank == victim:
        signal.pause()
    try:
        if operation.startswith("recv"):  # from the next rank, which waits too: all but one wait for a live rank
            comm.recv(value, (rank + 1) % size, 1).wait()
        else:
            while True:
                value = torch.ones(300_000)
                comm.all_reduce(value, everybody).wait()
                assert value.eq(size).all(), "a sum that ended without an error is complete"
    except CommunicationError:
        comm.abort()
        comm.close()
        parent.send("CommunicationError")
    del comm
    address, rank, size = parent.recv()
    comm = join(address, rank, size, generation=2)
    value = torch.ones(300_000)
    comm.all_reduce(value, tuple(range(size))).wait()
    parent.send(f"sum {value.min().item()}")
    parent.recv()


@pytest.mark.parametrize(
    ("operation", "victim"),
    [
        ("recv", 4),
        ("recv", 0),
        ("all_reduce", 2),
        ("all_reduce", 0),
        ("recv along lines", 4),
        ("all_reduce along lines", 3),
        ("all_reduce along lines", 0),
    ],
)
def test_death_of_one_rank_reaches_all_and_the_others_go_on(operation: str, victim: int) -> None:
    with processes(survivor, 5, operation) as started:
        addresses = [connection.recv() for _, connection in started]
        for _, connection in started:
            connection.send((addresses[0], 5, victim))
        assert [connection.recv() for _, connection in started] == ["sum 5.0"] * 5
        started[victim][0].kill()
        alive = [connection for rank, (_, connection) in enumerate(started) if rank != victim]
        assert [connection.recv() for connection in alive] == ["CommunicationError"] * 4
        first = min(set(range(5)) - {victim})
        for rank, connection in enumerate(alive):
            connection.send((addresses[first], rank, 4))
        assert [connection.recv() for connection in alive] == ["sum 4.0"] * 4


def aborter(rank: int, parent: Connection) -> None:
    """Rank 1 aborts from another thread while it waits; rank 0 waits for rank 1."""
    host = StoreHost(HOST, SECRET)
    parent.send(host.address)
    comm = join(parent.recv(), rank, 2)
    listener = socket.create_server((HOST, 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    pending = comm.recv(torch.empty(1), 1 - rank, 1)
    parent.send("waiting")
    parent.recv()
    if rank == 1:
        threading.Thread(target=comm.abort).start()
    failures = [_failure(pending.wait)]
    comm.abort()
    failures += [_failure(attempt) for attempt in _attempts(comm, 1 - rank)]
    near.sendall(b"still")
    parent.send((failures, far.recv(5)))
    parent.recv()


def _attempts(comm: Communicator, peer: int) -> list:
    value = torch.ones(1)
    return [
        lambda: comm.send(value, peer, 2),
        lambda: comm.recv(value, peer, 2),
        lambda: comm.all_reduce(value, (0, 1)),
    ]


def _failure(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except CommunicationError as error:
        return str(error)
    return ""


def test_abort_ends_running_and_future_operations_and_spares_other_connections() -> None:
    with processes(aborter, 2) as started:
        connections = [connection for _, connection in started]
        addresses = [connection.recv() for connection in connections]
        for connection in connections:
            connection.send(addresses[0])
        assert [connection.recv() for connection in connections] == ["waiting"] * 2
        for connection in connections:
            connection.send("go")
        for rank, connection in enumerate(connections):
            failures, received = connection.recv()
            assert re.fullmatch(r"(rank \d: .*|the generation was aborted) \(generation 1\)", failures[0]), (
                rank,
                failures,
            )
            assert failures[1:] == ["the generation was aborted (generation 1)"] * 3
            assert received == b"still"


def accuser(rank: int, parent: Connection, operation: str) -> None:
    """Tell whose connection broke, after rank 2 has died or, where it is only late, at the timeout."""
    host = StoreHost(HOST, SECRET)
    parent.send(host.address)
    comm = join(parent.recv(), rank, 3, groups=[(0, 2)], timeout_s=1.0 if operation == "late" else 600.0)
    everybody = (0, 1, 2)
    comm.all_reduce(torch.ones(1), everybody).wait()
    parent.send("met")
    if rank == 2 or (rank == 1 and operation == "pair"):
        signal.pause()
    value = torch.ones(1)
    waits = {
        "recv": lambda: comm.recv(value, 2, 1),
        "late": lambda: comm.recv(value, 2, 1),
        "pair": lambda: comm.all_reduce(value, (0, 2)),
    }
    with pytest.raises(CommunicationError) as error:
        waits[operation]().wait()
    parent.send(error.value.peer)
    parent.recv()


@pytest.mark.parametrize(("operation", "peers"), [("recv", [2, 2]), ("pair", [2]), ("late", [None, None])])
def test_broken_connection_names_the_peer_and_a_long_wait_does_not(operation: str, peers: list[int | None]) -> None:
    with processes(accuser, 3, operation) as started:
        connections = [connection for _, connection in started]
        addresses = [connection.recv() for connection in connections]
        for connection in connections:
            connection.send(addresses[0])
        assert [connection.recv() for connection in connections] == ["met"] * 3
        if operation != "late":
            started[2][0].kill()
        assert [connection.recv() for connection in connections[: len(peers)]] == peers


def test_address_in_an_error_of_gloo_names_the_peer_that_listens_there() -> None:
    """gloo 2.13 writes ports with their bytes swapped; who could not be connected to is in no group yet."""

    def work(rank: int, address: str) -> list[int | None]:
        comm = join(address, rank, 3)
        assert isinstance(comm, gloo.GlooCommunicator)
        named: list[int | None] = []
        for peer in sorted(comm.peers, key=lambda each: comm.peers[each]):
            port = int(peer.rpartition(":")[2])
            for number in (port, port % 256 * 256 + port // 256):
                refused = f"timed out connecting: SO_ERROR: Connection refused, remote=[{HOST}]:{number}${rank}"
                named.append(comm.failed(RuntimeError(refused)).peer)
        return [*named, comm.failed(RuntimeError(f"Connection closed by peer [{HOST}]:1")).peer]

    assert as_threads(3, work) == [[1, 1, 2, 2, None], [0, 0, 2, 2, None], [0, 0, 1, 1, None]]


class LostWork:
    """An operation whose peer is gone."""

    def wait(self) -> None:
        raise RuntimeError("the peer is gone")


def test_failed_wait_keeps_nothing_alive_without_the_collector() -> None:
    waiter = gloo._Waiter()

    def wait(work: LostWork) -> str:
        try:
            waiter.wait(work)
        except RuntimeError as error:
            return str(error)
        return ""

    gc.disable()
    try:
        work = LostWork()
        reference = weakref.ref(work)
        assert wait(work) == "the peer is gone"
        del work
        assert reference() is None
    finally:
        gc.enable()
        waiter.close()
