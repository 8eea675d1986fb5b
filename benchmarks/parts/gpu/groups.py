"""What needs two GPUs: sums and copies over NCCL, how long its abort takes, and jobs that lose a node."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from benchmarks.parts.gpu.copies import copy_row
from benchmarks.parts.gpu.part import Row, Setting
from benchmarks.parts.gpu.runs import kill_in
from benchmarks.parts.gpu.two_workers import two_workers
from resilient.comm import Communicator
from resilient.errors import CommunicationError

REPEATS = 10
LONGEST_ABORT_MS = 2000.0
_SUM_BYTES, _SUM_BYTES_REHEARSED = 1 << 28, 1 << 20
_COPY_BYTES, _COPY_BYTES_REHEARSED = 1 << 30, 1 << 22
_MOST_NODES = 5
"""Then pipelines of two nodes survive the loss of one, and could survive another."""


def measure(setting: Setting) -> Iterator[Row]:
    """Measure all of it."""
    sum_bytes = _SUM_BYTES_REHEARSED if setting.is_rehearsal else _SUM_BYTES
    copy_bytes = _COPY_BYTES_REHEARSED if setting.is_rehearsal else _COPY_BYTES
    yield from sum_rows(setting.device, setting.num_devices, sum_bytes)
    yield copy_row(setting.device, setting.num_devices, copy_bytes, "two devices")
    num_nodes = min(setting.num_devices, _MOST_NODES)
    phases = ("backward",) if setting.is_rehearsal else ("forward", "reduce", "prepare")
    survivable, pipeline_nodes = int(num_nodes > 2), 2 if num_nodes == _MOST_NODES else 1
    jobs = [[phase] for phase in phases]
    yield from kill_in(setting, jobs, num_nodes=num_nodes, pipeline_nodes=pipeline_nodes, max_failures=survivable)


def sum_rows(kind: str, num_devices: int, num_bytes: int) -> list[Row]:
    """Sum over both some times; then have rank 0 wait for what rank 1 never sends, and abort."""
    with two_workers(kind, num_devices, _take_part) as (comm, device, pipe):
        pipe.send(num_bytes)
        took_s, total = _sums(comm, device, num_bytes)
        pipe.recv()  # that rank 1 is done, and only waits
        missing = torch.zeros(1, device=device)
        pending = comm.recv(missing, 1, 1)
        began = time.perf_counter()
        comm.abort()
        abort_ms = 1e3 * (time.perf_counter() - began)
        fails = _fails(pending.wait)
    over = "NCCL" if comm.on_devices else "gloo"
    expected = float(2 ** (REPEATS + 1))
    late = abort_ms > LONGEST_ABORT_MS
    return [
        Row(
            what="sum over two devices",
            value=num_bytes / statistics.median(took_s[1:]) / 1e9,
            unit="GB/s",
            beside=over,
            wrong="" if total == expected else f"it is {total}, not {expected}",
        ),
        Row(
            what="abort of a receipt that waits",
            value=abort_ms,
            unit="ms",
            beside=over,
            wrong="the receipt ended well" if not fails else "it takes too long" if late else "",
        ),
    ]


def _take_part(comm: Communicator, device: torch.device, pipe: Connection) -> None:
    _sums(comm, device, pipe.recv())
    pipe.send("done")
    pipe.poll(None)


def _sums(comm: Communicator, device: torch.device, num_bytes: int) -> tuple[list[float], float]:
    """Add up ones, each sum of the one before; return the seconds of each, and the last."""
    values = torch.ones(num_bytes // 4, device=device)
    took_s: list[float] = []
    for _ in range(REPEATS + 1):
        comm.all_reduce(torch.zeros(1), (0, 1)).wait()
        began = time.perf_counter()
        comm.all_reduce(values, (0, 1)).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began)
    return took_s, values[-1].item()


def _fails(wait: Callable[[], None]) -> bool:
    try:
        wait()
    except CommunicationError:
        return True
    return False
