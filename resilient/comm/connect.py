"""Meeting the other ranks of a generation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.gloo import GlooCommunicator
from resilient.comm.interface import Communicator, Group, SoloCommunicator
from resilient.comm.nccl import NcclCommunicator, gpu_of
from resilient.errors import CommunicationError


class StoreHost:
    """A key-value store in this process, in which the ranks of a generation can meet.

    Every worker hosts one for its lifetime, so that the first survivor always has one at hand; keys carry the
    generation and are never used twice.
    """

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


def connect(
    *,
    generation: int,
    rank: int,
    size: int,
    groups: Sequence[Group],
    store_address: str,
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
        host: Address of this machine that its peers can reach.
        timeout_s: Last resort for an operation nothing else ends.
        interrupted: Anything put in here from another thread ends the wait for the peers.
        device: Where this worker's tensors are. NCCL is used where every rank has a GPU of its own.
        num_sources: Ranks after those that train: they are in no group, and only send.
        pairs: Ranks that are to send each other tensors; the same on every rank. NCCL connects them now.

    Raises:
        CommunicationError: A peer did not come or the wait was interrupted.
    """
    if size + num_sources == 1:
        return SoloCommunicator()
    store_host, _, port = store_address.rpartition(":")

    met: list[NcclCommunicator] = []
    left_behind = threading.Event()

    # A peer that dies while groups connect leaves the constructor waiting for its timeout. So a thread of its own
    # builds; when interrupted it is left behind, and what it still gets done is dropped: its keys are never used again.
    def build() -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            meeting = TCPStore(store_host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            store = PrefixStore(f"g{generation}", meeting)
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
            interrupted.put(on_devices(gloo, store) if gloo.own_gpus else gloo)
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
    reason = (f"{result}".strip() or repr(result)).splitlines()[0]
    raise CommunicationError(f"generation {generation}, rank {rank}: groups were not built: {reason}")
