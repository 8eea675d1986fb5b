"""Measures what exchanges between the devices of a node take: their latency and bandwidth.

Two ranks in threads of this process exchange parts as tensor-parallel workers do, by the host: gloo, and copies from
and to a GPU that several workers share. GPUs of which each worker has its own would exchange by NCCL, which one process
does not try.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from resilient.comm import Communicator, StoreClient, StoreHost, connect
from resilient.common.handshake import nonce
from resilient.errors import CommunicationError
from resilient.templates.inputs.cluster import Link

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_RANKS = (0, 1)
_TIMEOUT_S = 30.0
_FEW_BYTES, _MANY_BYTES = 64, 1 << 20
_ROUNDS, _EXCHANGES = 20, 3
"""Exchanges of a round come one after the other: a single one is short where the other rank was ahead."""


@cache
def measured_link(device: torch.device) -> Link:
    """Return what a message takes from one worker of this node to another.

    The shortest round counts: what else the machine does makes the others longer, but not what is measured of layers.
    What cannot be measured is told of in the log, and takes no time.

    Args:
        device: This worker's.
    """
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        logger.warning("exchanges between several GPUs are not measured: planners take them to need no time")
        return Link()
    try:
        secret = nonce()
        store = StoreHost(_HOST, secret)
        with ThreadPoolExecutor(len(_RANKS)) as pool:
            ranks = [pool.submit(_measure, rank, store.address, secret, device) for rank in _RANKS]
            few_ms, many_ms = ranks[0].result()
            ranks[1].result()
    except (CommunicationError, OSError) as error:
        logger.warning("exchanges are not measured, planners take them to need no time: %s", error)
        return Link()
    latency_ms = min(few_ms, many_ms)
    per_byte_ms = (many_ms - latency_ms) / _MANY_BYTES
    return Link(latency_ms=latency_ms, bytes_per_s=1e3 / per_byte_ms if per_byte_ms else None)


def _measure(rank: int, address: str, secret: bytes, device: torch.device) -> tuple[float, float]:
    """Return the shortest time, in ms, in which two ranks send each other few bytes, and many."""
    comm = connect(
        generation=0,
        rank=rank,
        size=len(_RANKS),
        groups=(),
        store_address=address,
        store_client=StoreClient(secret),
        host=_HOST,
        timeout_s=_TIMEOUT_S,
        interrupted=queue.SimpleQueue(),
        device=device,
    )
    few, many = (
        list(torch.zeros((len(_RANKS), size), dtype=torch.uint8, device=device)) for size in (_FEW_BYTES, _MANY_BYTES)
    )
    try:
        rounds_ms = [(_round_ms(comm, few), _round_ms(comm, many)) for _ in range(_ROUNDS)]
    finally:
        comm.close()
    return min(each for each, _ in rounds_ms), min(each for _, each in rounds_ms)


def _round_ms(comm: Communicator, parts: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    for _ in range(_EXCHANGES):
        comm.all_gather(parts, _RANKS).wait()
    return 1e3 * (time.perf_counter() - started) / _EXCHANGES
