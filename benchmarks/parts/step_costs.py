"""What a step costs on the CPU beside its layers' computations, each part measured by itself and not in a run.

Computations are timed by their own processor time, which what else runs on the machine hardly changes; messages and
sums, between two processes, by the least of many.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import torch

from resilient.comm import Communicator, SingleProcessCommunicator, StoreClient, StoreHost, connect
from resilient.data.reader import Cell
from resilient.pipeline.gradient_sync import GradientSync
from resilient.protocol.messages import StepOutcome
from resilient.runtime.batches import Batches
from resilient.runtime.commit import Ledger
from resilient.runtime.job import Job
from resilient.state.layer_state import LayerState
from resilient.templates.common.byte_intervals import Piece

HOST = "127.0.0.1"
SECRET = b"of this benchmark"
LOADS, STEPS, ROUNDS = 16, 7, 200


@dataclass(frozen=True, kw_only=True)
class Network:
    """Two workers of this machine. Keys are bytes.

    Args:
        send_ms: How long the sender is busy with a message.
        message_ms: From when it begins to send until the receiver has it.
        sum_ms: A gradient sum, from when both ask for it until both have it.
    """

    send_ms: dict[int, float]
    message_ms: dict[int, float]
    sum_ms: dict[int, float]


def load_ms(job: Job) -> float:
    """Return what loading a microbatch takes, as in steps whose samples were not seen before."""
    batches, per_step = Batches(job), job.global_batch // job.microbatch
    places = [(1 + i // per_step, Cell.of_chain(i % per_step, job.microbatch)) for i in range(LOADS)]
    return median(_processor_ms(lambda place=place: batches.batch(*place)) for place in places)


def commit_ms(job: Job, names: Sequence[str]) -> float:
    """Return what a worker does once a step for the states it holds: gradients zeroed, their norms, the optimizer."""
    layouts, ledger = job.layouts(), Ledger(job.optimizer, job.clip_grad_norm)
    for name in names:
        state = LayerState(job.layer(name), layouts[name], job.optimizer.slots, job.dtype, job.device)
        state.initialize(job.seed)
        ledger.current[name] = state
    trained = {i: state for i, state in enumerate(ledger.current.values()) if state.layout.num_trainable}
    sync = GradientSync(
        SingleProcessCommunicator(), trained, {index: [Piece((0,), state.held)] for index, state in trained.items()}
    )
    ledger.version = 0
    ledger.start()

    def step() -> None:
        sync.begin()
        for index in sorted(trained, reverse=True):
            sync.wait(index)
        ledger.apply(StepOutcome(step=ledger.version + 1, loss=1.0, grad_norm=1.0))

    return median([_processor_ms(step) for _ in range(STEPS)][1:])  # the first makes the optimizer's own state


def network(message_bytes: Sequence[int], sum_bytes: Sequence[int]) -> Network:
    """Measure messages and sums of these sizes between two processes."""
    store = StoreHost(HOST, SECRET)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    sizes = (sorted(set(message_bytes)), sorted({*sum_bytes}))
    peers = [context.Process(target=_peer, args=(rank, store.address, theirs, *sizes)) for rank in range(2)]
    for peer in peers:
        peer.start()
    measured = ours.recv()
    for peer in peers:
        peer.join()
    return measured


def _peer(rank: int, address: str, result: Connection, message_bytes: Sequence[int], sum_bytes: Sequence[int]) -> None:
    """Be one of the two; rank 0 reports."""
    torch.set_num_threads(1)
    comm = connect(
        generation=1,
        rank=rank,
        size=2,
        groups=[],
        store_address=address,
        store_client=StoreClient(SECRET),
        host=HOST,
        timeout_s=120.0,
        interrupted=queue.SimpleQueue(),
        device=torch.device("cpu"),
    )
    measured = Network(send_ms={}, message_ms={}, sum_ms={})
    for size in message_bytes:
        rounds = [_there_and_back(comm, size, tag) for tag in range(ROUNDS)]
        measured.send_ms[size] = min(send_ms for send_ms, _ in rounds)
        measured.message_ms[size] = min(round_ms for _, round_ms in rounds) / 2
    for size in sum_bytes:
        measured.sum_ms[size] = min(_sum_ms(comm, size) for _ in range(ROUNDS // 4))
    if rank == 0:
        result.send(measured)


def _there_and_back(comm: Communicator, num_bytes: int, tag: int) -> tuple[float, float]:
    """Return how long the sender is busy with a message, and how long it takes there and another one back."""
    out, back = torch.zeros((2, num_bytes), dtype=torch.uint8)
    started, started_busy = time.perf_counter(), time.thread_time()
    if comm.rank == 1:
        comm.recv(out, 0, 2 * tag).wait()
    sending = comm.send((out, back)[comm.rank], 1 - comm.rank, 2 * tag + comm.rank)
    busy = time.thread_time() - started_busy
    if comm.rank == 0:
        comm.recv(back, 1, 2 * tag + 1).wait()
    taken = time.perf_counter() - started
    sending.wait()
    return 1e3 * busy, 1e3 * taken


def _sum_ms(comm: Communicator, num_bytes: int) -> float:
    numbers = torch.zeros(num_bytes // 4)
    comm.all_reduce(torch.zeros(1), (0, 1)).wait()  # both begin together
    started = time.perf_counter()
    comm.all_reduce(numbers, (0, 1)).wait()
    return 1e3 * (time.perf_counter() - started)


def _processor_ms(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - started)
