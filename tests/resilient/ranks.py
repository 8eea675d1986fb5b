"""Ranks of a generation for tests: as threads of one process or as real processes (some die)."""

from __future__ import annotations

import multiprocessing
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from resilient.comm import Communicator, Group, StoreClient, StoreHost, connect

HOST = "127.0.0.1"
SECRET = b"of this job"
Result = TypeVar("Result")
Started = tuple[BaseProcess, Connection]
_joined: defaultdict[str, list[Communicator]] = defaultdict(list)
"""By store."""


def join(
    address: str,
    rank: int,
    size: int,
    groups: Sequence[Group] = (),
    generation: int = 1,
    num_sources: int = 0,
    store_client: StoreClient | None = None,
    timeout_s: float = 600.0,  # beyond the time limit of a test
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Communicator:
    comm = connect(
        generation=generation,
        rank=rank,
        size=size,
        groups=groups,
        store_address=address,
        store_client=store_client or StoreClient(SECRET),
        host=HOST,
        timeout_s=timeout_s,
        interrupted=queue.SimpleQueue(),
        device=device,
        num_sources=num_sources,
        pairs=[(low, high) for high in range(size) for low in range(high)],
    )
    _joined[address].append(comm)
    return comm


def as_threads(size: int, work: Callable[[int, str], Result]) -> list[Result]:
    """Call ``work(rank, store address)`` on all ranks at once; return the results by rank.

    Where one fails, what the others have got by :func:`join` is aborted, so that they do not wait for it.
    """
    store = StoreHost(HOST, SECRET)
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(work, rank, store.address) for rank in range(size)]
        failed = [each for each in wait(running, return_when=FIRST_EXCEPTION).done if each.exception() is not None]
        for comm in _joined.pop(store.address, []):
            if failed:
                comm.abort()
        return [each.result() for each in [*failed, *running]][len(failed) :]


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "resilient.comm"])


@contextmanager
def processes(target: Callable[..., None], size: int, *arguments: object) -> Iterator[list[Started]]:
    """Start ``target(rank, connection, *arguments)`` in processes of their own; end them all when done."""
    started: list[Started] = []
    try:
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=target, args=(rank, theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        yield started
    finally:
        for process, connection in started:
            process.kill()
            process.join()
            connection.close()
