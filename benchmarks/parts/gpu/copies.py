"""State copies between two workers, in GB/s: of one GPU, through the host's memory, or each of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from benchmarks.parts.gpu.part import Row, Setting
from benchmarks.parts.gpu.two_workers import two_workers
from benchmarks.parts.state_copy import large_state
from resilient.comm import Communicator
from resilient.state.layer_state import LayerState
from resilient.state.peer_copy import copy_states
from resilient.templates.replan.transfer import Transfer

REPEATS = 5
_BYTES, _BYTES_REHEARSED = 1 << 30, 1 << 22


def measure(setting: Setting) -> Iterator[Row]:
    """Copy a state, verified, between workers that share a device; and what a copy to the host takes by itself."""
    num_bytes = _BYTES_REHEARSED if setting.is_rehearsal else _BYTES
    yield copy_row(setting.device, 1, num_bytes, "workers of one device")
    if setting.device == "cuda":
        yield from (_host_row(num_bytes, pinned=pinned) for pinned in (True, False))


def copy_row(kind: str, num_devices: int, num_bytes: int, between: str) -> Row:
    """Copy a state some times from rank 0 to rank 1, which holds other values, and measure it there."""
    with two_workers(kind, num_devices, _receive) as (comm, device, pipe):
        state = large_state(num_bytes, 1.0, device)
        pipe.send(num_bytes)
        for _ in range(REPEATS + 1):
            _copy(comm, state)
        took_s, last_value = pipe.recv()
    rates = sorted(state.bytes.numel() / each / 1e9 for each in took_s[1:])  # the first touches fresh memory
    beside = f"{rates[0]:.2f} to {rates[-1]:.2f}, {'NCCL' if comm.on_devices else 'gloo'}, verified"
    wrong = "" if last_value == 1.0 else f"a copy of 1.0 holds {last_value}"
    what = f"state copy between {between}"
    return Row(what=what, value=statistics.median(rates), unit="GB/s", beside=beside, wrong=wrong)


def _receive(comm: Communicator, device: torch.device, pipe: Connection) -> None:
    state = large_state(pipe.recv(), 0.0, device)
    took_s = [_copy(comm, state) for _ in range(REPEATS + 1)]
    pipe.send((took_s, state.buffer[-1].item()))
    pipe.poll(None)  # until rank 0 is done: a worker that leaves breaks its peer's connections


def _copy(comm: Communicator, state: LayerState) -> float:
    transfer = Transfer(state="layer", source=0, target=1, first_byte=0, end_byte=state.bytes.numel())
    comm.all_reduce(torch.zeros(1), (0, 1)).wait()
    started = time.perf_counter()
    held, missing = ({"layer": state}, {}) if comm.rank == 0 else ({}, {"layer": state})
    copy_states(comm, [transfer], held, missing)
    return time.perf_counter() - started


def _host_row(num_bytes: int, *, pinned: bool) -> Row:
    """Copy from the device to the host and back: what staging cannot be faster than."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    rates: list[float] = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        here.copy_(there)
        there.copy_(here)
        torch.cuda.synchronize()
        rates.append(2 * num_bytes / (time.perf_counter() - started) / 1e9)
    return Row(
        what=f"to the host and back, {'pinned' if pinned else 'pageable'}",
        value=statistics.median(rates[1:]),
        unit="GB/s",
        beside="of one process",
    )
