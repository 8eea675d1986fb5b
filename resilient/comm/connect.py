"""Meets the other ranks of a generation and builds its groups, until it is interrupted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.gloo import GlooCommunicator
from resilient.comm.interface import Communicator, Group, SingleProcessCommunicator
from resilient.comm.nccl import NcclCommunicator, gpu_of
from resilient.errors import CommunicationError


class StoreHost:
    """A key-value store in this process, in which the ranks of a generation can meet.

    Every worker hosts one for its lifetime, so that the first survivor always has one at hand; keys carry the
    generation and are never used twice. Rank 0 drops them when the next generation has met there.
    """

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class StoreClient:
    """This worker's connection to the store of rank 0, kept between generations: rank 0 is mostly the one of before.

    For each new one torch (2.13) asks for the peer's name, at both ends, which takes seconds where no name server
    answers.
    """

    def __init__(self) -> None:
        self._idle: tuple[str, TCPStore] | None = None

    def take(self, address: str, timeout_s: float) -> TCPStore:
        """Return a connection to the store at ``address``, the caller's alone until it is given back.

        Args:
            address: ``host:port``.
            timeout_s: Last resort for a wait that nothing else ends; of a new connection.

        Raises:
            RuntimeError: Nobody answers there.
        """
        idle, self._idle = self._idle, None
        if idle is not None and idle[0] == address:
            return idle[1]
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)

    def give_back(self, address: str, connection: TCPStore) -> None:
        """Keep a connection on which nothing is under way."""
        self._idle = address, connection


def connect(
    *,
    generation: int,
    rank: int,
    size: int,
    groups: Sequence[Group],
    store_address: str,
    store_client: StoreClient,
    host: str,
    timeout_s: float,
    interrupted: queue.SimpleQueue[object],
    device: torch.device,
    num_sources: int = 0,
    pairs: Iterable[tuple[int, int]] = (),
) -> Communicator:
    """Build the groups of a generation together with all its other ranks.

    Args:
        generation: Its number; the store's keys carry it.
        rank: This worker's rank.
        size: Number of ranks that train.
        groups: The sets of ranks that all-reduce; the same list on every rank.
        store_address: ``host:port`` of the store of rank 0.
        store_client: This worker's.
        host: Address of this machine that its peers can reach.
        timeout_s: Last resort for an operation nothing else ends.
        interrupted: Anything put in here from another thread ends the wait for the peers.
        device: Where this worker's tensors are. NCCL is used where every rank has a GPU of its own.
        num_sources: Ranks after those that train: they are in no group, and only send.
        pairs: Ranks that are to send each other tensors, at least this one's. NCCL connects them now.

    Raises:
        CommunicationError: A peer did not come or the wait was interrupted.
    """
    if size + num_sources == 1:
        return SingleProcessCommunicator()

    met: list[NcclCommunicator] = []
    left_behind = threading.Event()

    # A peer that dies while groups connect leaves the constructor waiting for its timeout. So a thread of its own
    # builds; when interrupted it is left behind, and what it still gets done is dropped: its keys are never used again.
    def build() -> None:
        try:
            connection = store_client.take(store_address, timeout_s)
            store = PrefixStore(f"g{generation}", connection)
            gloo = GlooCommunicator(
                generation=generation,
                rank=rank,
                size=size,
                groups=groups,
                store=store,
                host=host,
                timeout_s=timeout_s,
                gpu=gpu_of(device),
                num_sources=num_sources,
            )
            if gloo.own_gpus:
                interrupted.put(on_devices(gloo, store))  # NCCL goes on using the store
            else:
                store_client.give_back(store_address, connection)
                interrupted.put(gloo)
            if rank == 0:
                _forget_before(generation, connection)
        except Exception as error:  # whatever it is: this thread alone can end the wait for it
            interrupted.put(error)

    def on_devices(gloo: GlooCommunicator, store: Store) -> NcclCommunicator:
        comm = NcclCommunicator(gloo, store, groups, timeout_s)
        met.append(comm)
        if not left_behind.is_set():
            comm.meet(pairs, device)
        return comm

    threading.Thread(target=build, name=f"connect-g{generation}", daemon=True).start()
    result = interrupted.get()
    if isinstance(result, GlooCommunicator | NcclCommunicator):
        return result
    left_behind.set()
    for comm in met:  # kernels that wait for a peer would stay on the device
        comm.abort()
    peer = None
    if isinstance(result, CommunicationError):
        peer, result = result.peer, result.__cause__ or result
    reason = (f"{result}".strip() or repr(result)).splitlines()[0]
    raise CommunicationError(f"rank {rank}: groups were not built: {reason}", generation=generation, peer=peer)


def _forget_before(generation: int, store: TCPStore) -> None:
    """Drop the keys of earlier generations, in which nobody is left: gloo's grow with the square of the ranks.

    Before torch 2.10 a store cannot list its keys, and keeps them.
    """
    for key in store.list_keys() if hasattr(store, "list_keys") else ():
        if int(key.removeprefix("g").partition("/")[0]) < generation:
            store.delete_key(key)
