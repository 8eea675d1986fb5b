"""State copy between two workers against a plain socket copy of the same bytes, on this machine.

    python benchmarks/parts/state_copy.py [--megabytes 256] [--repeats 7]

Both ways move the same number of bytes between two processes over loopback, in turns; the state copy also verifies what
arrived. Prints the medians and their ratio. Then what the fingerprint takes by which copies are compared later, in
processor time, against the optimizer's step over the state: a step of training takes longer than that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import time
from multiprocessing.connection import Connection

import torch
from rich.console import Console
from torch import nn

from resilient.cli.shared.printing import plain_table
from resilient.comm import StoreClient, StoreHost, connect
from resilient.models.layer import LayerSpec
from resilient.optim import AdamW
from resilient.protocol.job_config import JobConfig
from resilient.state.fingerprint import fingerprint
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.peer_copy import copy_states
from resilient.templates.replan.transfer import Transfer

SECRET = b"of this benchmark"
CPU = torch.device("cpu")


def large_state(num_bytes: int, fill: float, device: torch.device = CPU) -> LayerState:
    """Make a layer state (parameters and two AdamW slots) of about that size."""
    width = int((num_bytes / 12) ** 0.5)
    spec = LayerSpec(
        name="layer", unit="chain", build=lambda: nn.Linear(width, width, bias=False), initialize=lambda module: None
    )
    state = LayerState(spec, BufferLayout.of(spec), ("exp_avg", "exp_avg_sq"), torch.float32, device)
    state.buffer.fill_(fill)
    return state


def copy_once(rank: int, state: LayerState, generation: int, store_address: str) -> float:
    """Copy the state from rank 0 to rank 1 over a new generation's groups; return the seconds it took here.

    The receiver verifies what it has, and so has waited for its device.
    """
    comm = connect(
        generation=generation,
        rank=rank,
        size=2,
        groups=[],
        store_address=store_address,
        store_client=StoreClient(SECRET),
        host="127.0.0.1",
        timeout_s=60,
        interrupted=queue.SimpleQueue(),
        device=state.bytes.device,
        pairs=[(0, 1)],
    )
    end = state.bytes.numel()
    transfer = Transfer(state="layer", source=0, target=1, first_byte=0, end_byte=end)
    comm.all_reduce(torch.zeros(1), (0, 1)).wait()
    started = time.perf_counter()
    held, missing = ({"layer": state}, {}) if rank == 0 else ({}, {"layer": state})
    copy_states(comm, [transfer], held, missing)
    took = time.perf_counter() - started
    comm.all_reduce(torch.zeros(1), (0, 1)).wait()
    comm.close()
    return took


def socket_copy(rank: int, data: memoryview, address: tuple[str, int] | None, pipe: Connection) -> float:
    """Send the bytes through one TCP connection; return the seconds until the last one was here."""
    if rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname())
            connection, _ = server.accept()
        with connection:
            started = time.perf_counter()
            received = 0
            while received < len(data):
                received += connection.recv_into(data[received:])
            return time.perf_counter() - started
    assert address is not None
    with socket.create_connection(address) as connection:
        started = time.perf_counter()
        connection.sendall(data)
        return time.perf_counter() - started


def receiver(pipe: Connection, num_bytes: int, repeats: int, store_address: str) -> None:
    """Rank 1: receive in turns, report seconds."""
    torch.set_num_threads(1)
    state = large_state(num_bytes, 0.0)
    data = state.bytes.numpy().data
    for repeat in range(repeats):
        pipe.send(copy_once(1, state, repeat + 1, store_address))
        pipe.send(socket_copy(1, data, None, pipe))


def print_comparison(state: LayerState, repeats: int) -> None:
    """Measure the fingerprint and the optimizer's step."""
    optimizer = AdamW(lr=1e-3).build([state], 0)
    calls = {"fingerprint": lambda: fingerprint(state.bytes), "optimizer's step": optimizer.step}
    seconds: dict[str, float] = {}
    for name, call in calls.items():
        times: list[float] = []
        for _ in range(repeats):
            started = time.process_time()
            call()
            times.append(time.process_time() - started)
        seconds[name] = statistics.median(times)
    every = JobConfig(global_batch=1, microbatch=1).compare_replicas_every
    table = plain_table("what", "ms", left=("what",), title=f"{state.bytes.numel() / 1e6:.0f} MB of state, one core")
    for name, took in seconds.items():
        table.add_row(name, f"{1e3 * took:.1f}")
    share = seconds["fingerprint"] / every / seconds["optimizer's step"]
    Console().print(table, f"in every {every}th step: {share:.2%} of the optimizer's time")


def main() -> None:
    """Run both ways in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = StoreHost("127.0.0.1", SECRET)
    num_bytes = options.megabytes << 20
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=receiver, args=(theirs, num_bytes, options.repeats + 1, store.address)
    )
    process.start()
    state = large_state(num_bytes, 1.0)
    data = state.bytes.numpy().data
    copies: list[float] = []
    plain: list[float] = []
    for repeat in range(options.repeats + 1):
        copy_once(0, state, repeat + 1, store.address)
        copies.append(len(data) / ours.recv() / 1e9)
        address = ours.recv()
        socket_copy(0, data, address, ours)
        plain.append(len(data) / ours.recv() / 1e9)
    process.join()
    copies, plain = copies[1:], plain[1:]  # the first of each touches fresh memory
    ratios = [a / b for a, b in zip(copies, plain, strict=True)]
    title = f"copy of {len(data) / 1e6:.0f} MB between two processes, median of {options.repeats}"
    table = plain_table("way", "GB/s", "least", "most", left=("way",), title=title)
    for name, values in (("plain socket", plain), ("state copy, verified", copies), ("ratio", ratios)):
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    Console().print(table)
    print_comparison(state, options.repeats)


if __name__ == "__main__":
    main()
