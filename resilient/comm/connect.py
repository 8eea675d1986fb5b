"""Meets the other ranks of a generation and builds its groups, until it is interrupted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from resilient.comm.gloo import GlooCommunicator
from resilient.comm.interface import Communicator, Group, SingleProcessCommunicator
from resilient.comm.nccl import NcclCommunicator, gpu_of
from resilient.comm.store_client import GenerationStore, StoreClient
from resilient.comm.store_messages import Forget
from resilient.errors import CommunicationError


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
    pairs: Sequence[tuple[int, int]] = (),
    ports: str = "",
    on_group: Callable[[], None] = lambda: None,
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
        pairs: Ranks that may send each other tensors, at least this one's. NCCL connects them now.
        ports: The range to listen in where that can be chosen, "" for any port.
        on_group: Called, in another thread, before each group is made.

    Raises:
        CommunicationError: A peer did not come or the wait was interrupted.
    """
    if size + num_sources == 1:
        return SingleProcessCommunicator()

    met: list[NcclCommunicator] = []
    left_behind = threading.Event()

    # A peer that dies while groups connect leaves the constructor waiting for its timeout. So a thread of its own
    # builds; when interrupted it is left behind, and what it still gets done is dropped: its keys are never used again.
    # A first sum, of ranks that are not all connected, it gives up.
    def build() -> None:
        try:
            connection = store_client.take(store_address, timeout_s)
            store = GenerationStore(connection, generation)
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
                pairs=pairs,
                ports=ports,
                on_group=on_group,
                aborted=left_behind,
            )
            if gloo.own_gpus:
                interrupted.put(on_devices(gloo, store))  # NCCL goes on using the store
            else:
                store_client.give_back(connection)
                interrupted.put(gloo)
            if rank == 0:
                connection.ask(Forget(generation))  # of many ranks they are megabytes
        except Exception as error:  # whatever it is: this thread alone can end the wait for it
            interrupted.put(error)

    def on_devices(gloo: GlooCommunicator, store: GenerationStore) -> NcclCommunicator:
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
