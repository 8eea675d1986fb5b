"""State copy between two workers against a plain socket copy of the same bytes, on this machine.

    python benchmarks/parts/state_copy.py [--megabytes 256] [--repeats 7]

and over a link of 10 Gbit/s instead of loopback at its full speed, by root:

    unshare -n sh -c "ip link set lo up; tc qdisc add dev lo root tbf rate 10gbit burst 4mb latency 50ms;
        python benchmarks/parts/state_copy.py"

All ways move the same number of bytes between two processes, in turns. The state copy also verifies what
arrived, so the socket is measured twice: alone, and with a thread beside it at each end that reads all bytes as
verifying does, which is what a machine with no more than two cores can do. Prints medians and ratios.

Then what the fingerprint takes by which copies are compared later, in processor time, against the optimizer's step over
the state: a step of training takes longer than that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
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
from resilient.state.peer_copy import CHUNK_BYTES, copy_states
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


def socket_copy(
    rank: int, state: LayerState, address: tuple[str, int] | None, pipe: Connection, *, is_verified: bool
) -> float:
    """Send the bytes through one TCP connection; return the seconds until they were here.

    Where they are verified, each end has a thread for the connection and one that takes pieces' fingerprints.
    """
    if rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname())
            connection, _ = server.accept()
    else:
        assert address is not None
        connection = socket.create_connection(address)
    move = receive_all if rank == 1 else socket.socket.sendall
    with connection:
        started = time.perf_counter()
        if is_verified:
            with ThreadPoolExecutor(1) as beside:  # its end waits for all that was submitted
                for piece in state.bytes.split(CHUNK_BYTES):
                    move(connection, piece.numpy().data)
                    beside.submit(fingerprint, piece)
        else:
            move(connection, state.bytes.numpy().data)
        return time.perf_counter() - started


def receive_all(connection: socket.socket, space: memoryview) -> None:
    """Receive as many bytes as there is space for."""
    received = 0
    while received < len(space):
        received += connection.recv_into(space[received:])


def receiver(pipe: Connection, num_bytes: int, repeats: int, store_address: str) -> None:
    """Rank 1: receive in turns, report seconds."""
    torch.set_num_threads(1)
    state = large_state(num_bytes, 0.0)
    for repeat in range(repeats):
        pipe.send(copy_once(1, state, repeat + 1, store_address))
        for is_verified in (False, True):
            pipe.send(socket_copy(1, state, None, pipe, is_verified=is_verified))


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
    num_bytes = state.bytes.numel()
    rates: list[tuple[float, float, float]] = []
    for repeat in range(options.repeats + 1):
        copy_once(0, state, repeat + 1, store.address)
        seconds = [ours.recv()]
        for is_verified in (False, True):
            socket_copy(0, state, ours.recv(), ours, is_verified=is_verified)
            seconds.append(ours.recv())
        copy, plain, verified = (num_bytes / took / 1e9 for took in seconds)
        rates.append((copy, plain, verified))
    process.join()
    copies, plains, verifieds = zip(*rates[1:], strict=True)  # the first of each touches fresh memory
    title = f"copy of {num_bytes / 1e6:.0f} MB between two processes, median of {options.repeats}"
    table = plain_table("way", "GB/s", "least", "most", left=("way",), title=title)
    for name, values in (
        ("plain socket", plains),
        ("plain socket, fingerprints beside", verifieds),
        ("state copy, verified", copies),
        ("ratio to the first", [copy / plain for copy, plain in zip(copies, plains, strict=True)]),
        ("ratio to the second", [copy / plain for copy, plain in zip(copies, verifieds, strict=True)]),
    ):
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    Console().print(table)
    print_comparison(state, options.repeats)


if __name__ == "__main__":
    main()
