"""Two processes, with a device each or sharing one, that meet as workers of a generation do."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from resilient.comm import Communicator, StoreClient, StoreHost, connect

HOST = "127.0.0.1"
SECRET = b"of this benchmark"
_TIMEOUT_S = 60.0

Work = Callable[[Communicator, torch.device, Connection], Any]
"""What rank 1 does once it is connected; the pipe leads to rank 0."""


def device_of(kind: str, rank: int, num_devices: int) -> torch.device:
    """Return a worker's device: of its own, as far as there are enough."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, rank % num_devices)


@contextmanager
def two_workers(kind: str, num_devices: int, work: Work) -> Iterator[tuple[Communicator, torch.device, Connection]]:
    """Connect this process, rank 0, to one that does ``work`` as rank 1.

    Args:
        kind: "cuda" or "cpu".
        num_devices: That the two may use.
        work: A function of a module.
    """
    context = multiprocessing.get_context("spawn")
    store = StoreHost(HOST, SECRET)
    ours, theirs = context.Pipe()
    other = context.Process(target=_rank_1, args=(theirs, device_of(kind, 1, num_devices), store.address, work))
    other.start()
    theirs.close()
    device = device_of(kind, 0, num_devices)
    comm = _connected(0, device, store.address)
    try:
        yield comm, device, ours
    finally:
        ours.close()
        comm.abort()
        other.join(_TIMEOUT_S)
        comm.close()


def _rank_1(pipe: Connection, device: torch.device, store_address: str, work: Work) -> None:
    torch.set_num_threads(1)
    comm = _connected(1, device, store_address)
    try:
        work(comm, device, pipe)
    finally:
        comm.abort()  # a device group that is there when its process ends may keep it


def _connected(rank: int, device: torch.device, store_address: str) -> Communicator:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return connect(
        generation=1,
        rank=rank,
        size=2,
        groups=[(0, 1)],
        store_address=store_address,
        store_client=StoreClient(SECRET),
        host=HOST,
        timeout_s=_TIMEOUT_S,
        interrupted=queue.SimpleQueue(),
        device=device,
        pairs=[(0, 1)],
    )
