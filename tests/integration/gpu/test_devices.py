"""What workers do with a device is right on the CPU and on a GPU, which several of them may share.

Every test runs on the CPU; with a GPU those marked ``gpu`` run on it as well (``python benchmarks/gpu.py`` runs them).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from resilient.comm import Communicator
from resilient.data.dataset import stack
from resilient.data.read_ahead import data_processes
from resilient.data.reader import Cell, Microbatch
from resilient.errors import CommunicationError
from resilient.models.layer import LayerSpec
from resilient.optim import AdamW
from resilient.pipeline.stage import Stage, StageLayer
from resilient.pipeline.stage_timer import StageTimer
from resilient.profiling.layer_passes import device_clock
from resilient.state.fingerprint import mixing_sum
from resilient.state.gathered.freeable_buffer import FreeableBuffer
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.peer_copy import copy_states
from resilient.templates.replan.transfer import Transfer
from resilient.testing import train_here
from resilient.trainer import Trainer
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import TiedModel, Tokens, assemble

ON_GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu, id="cuda")
LONGEST_ABORT_S = 20.0
"""Of a machine that does much else; the communication timeout of the tests is ten minutes."""


@pytest.fixture(params=[pytest.param(torch.device("cpu"), id="cpu"), ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test computes."""
    return request.param


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_use(device: torch.device) -> int:
    """Return the bytes that tensors have on a GPU; nobody counts those of the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def long_work(device: torch.device) -> Callable[[], Tensor]:
    """Return what keeps a device busy for some ms, long after a GPU's host has gone on; its result is all ones."""
    size = 4096 if device.type == "cuda" else 256
    average = torch.full((size, size), 1.0 / size, device=device)

    def work() -> Tensor:
        values = torch.ones(size, size, device=device)
        for _ in range(20):
            values = average @ values
        return values[:64, :64].contiguous()

    work()  # libraries are loaded now
    synchronize(device)
    return work


def test_stage_timer_counts_the_devices_work_and_not_how_fast_it_is_given(device: torch.device) -> None:
    work, timer = long_work(device), StageTimer(device)
    began = time.perf_counter()
    for cell in range(2):
        with timer.during(0, cell):
            work()
    synchronize(device)
    took_ms = 1e3 * (time.perf_counter() - began)
    found = timer.end_step(2)
    assert found.keys() == {(0, 0), (0, 1)}
    assert 0.5 * took_ms < sum(found.values()) < 1.05 * took_ms


def test_profilers_clock_waits_for_the_device(device: torch.device) -> None:
    work = long_work(device)
    began = time.perf_counter()
    found_ms = device_clock(device)(work)
    synchronize(device)
    took_ms = 1e3 * (time.perf_counter() - began)
    # on the CPU it is the thread's own time, of which a busy machine gives little
    assert (0.5 * took_ms if device.type == "cuda" else 0.0) < found_ms < 1.05 * took_ms + 1.0


def test_what_is_sent_is_what_the_work_before_will_have_made(device: torch.device) -> None:
    """Without waiting for it: and who has waited for a message may compute with it at once."""
    work = long_work(device)

    def of_rank(rank: int, address: str) -> float:
        comm = join(address, rank, 2, device=device)
        if rank == 0:
            comm.send(work(), 1, 1).wait()
            return 0.0
        received = torch.zeros(64, 64, device=device)
        comm.recv(received, 0, 1).wait()
        return (received + received).mean().item()

    assert as_threads(2, of_rank) == [0.0, pytest.approx(2.0, rel=1e-3)]


def test_workers_that_share_a_device_sum_and_divide_on_it(device: torch.device) -> None:
    everybody = (0, 1, 2)
    sizes = [2, 1, 3]

    def of_rank(rank: int, address: str) -> tuple[bool, list[float], list[float], list[float]]:
        comm = join(address, rank, 3, [everybody], device=device)
        values = torch.full((4,), 10.0**rank, device=device)
        comm.all_reduce(values, everybody).wait()
        gathered = torch.full((6,), float(rank), device=device)
        comm.all_gather(gathered.split(sizes), everybody).wait()
        scattered = torch.arange(6.0, device=device).split(sizes)
        comm.reduce_scatter(scattered, everybody).wait()
        own = scattered[rank]
        assert values.device == gathered.device == own.device == device
        return comm.on_devices, values.tolist(), gathered.tolist(), own.tolist()

    found = as_threads(3, of_rank)
    assert [each[:3] for each in found] == [(False, [111.0] * 4, [0.0, 0.0, 1.0, 2.0, 2.0, 2.0])] * 3
    assert [each[3] for each in found] == [[0.0, 3.0], [6.0], [9.0, 12.0, 15.0]]


def test_abort_ends_a_receipt_on_the_device(device: torch.device) -> None:
    def of_rank(rank: int, address: str) -> float:
        comm = join(address, rank, 2, device=device)
        if rank == 1:
            return 0.0
        return seconds_until_aborted(comm, device)

    assert 0.0 <= as_threads(2, of_rank)[0] < LONGEST_ABORT_S


def seconds_until_aborted(comm: Communicator, device: torch.device) -> float:
    """Wait for what rank 1 never sends, have another thread abort, and return how long that took to be felt."""
    pending = comm.recv(torch.zeros(8, device=device), 1, 1)
    aborted_at: list[float] = []

    def abort() -> None:
        aborted_at.append(time.perf_counter())
        comm.abort()

    def receive() -> None:
        pending.wait()
        timer.join()  # waiting for a device group only orders streams: then the abort shows here
        comm.check()

    timer = threading.Timer(0.1, abort)
    timer.start()
    with pytest.raises(CommunicationError):
        receive()
    synchronize(device)
    felt_at = time.perf_counter()
    timer.join()
    return felt_at - aborted_at[0]


def layer_state(device: torch.device, fill: float) -> LayerState:
    """Return a state of 3 MB."""
    spec = LayerSpec(
        name="layer", unit="chain", build=lambda: nn.Linear(512, 512, bias=False), initialize=lambda module: None
    )
    state = LayerState(spec, BufferLayout.of(spec), ("exp_avg", "exp_avg_sq"), torch.float32, device)
    state.buffer.copy_(torch.linspace(-1, 1, state.buffer.numel()) * fill)
    return state


def test_state_is_copied_between_workers_of_one_device(device: torch.device) -> None:
    expected = layer_state(torch.device("cpu"), 2.0).buffer
    transfer = Transfer(state="layer", source=0, target=1, first_byte=0, end_byte=4 * expected.numel())

    def of_rank(rank: int, address: str) -> Tensor:
        comm = join(address, rank, 2, device=device)
        state = layer_state(device, 2.0 - rank)
        held, missing = ({"layer": state}, {}) if rank == 0 else ({}, {"layer": state})
        copy_states(comm, [transfer], held, missing)
        return state.buffer.cpu()

    assert torch.equal(as_threads(2, of_rank)[1], expected)


def test_sum_of_mixed_words_is_that_of_the_host(device: torch.device) -> None:
    for num_bytes in (0, 1, 7, 4096, 1_000_003):
        data = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
        assert mixing_sum(data.to(device)) == mixing_sum(data)


def test_freed_memory_is_given_back_and_taken_anew(device: torch.device) -> None:
    before = in_use(device)
    buffer = FreeableBuffer(1 << 20, device)
    view = buffer.view(0, 1 << 20, torch.float32)
    buffer.free()
    assert (buffer.num_bytes, in_use(device)) == (0, before)
    buffer.allocate()
    buffer.bytes.copy_(torch.ones(1 << 18, device=device).view(torch.uint8))
    assert in_use(device) - before == ((1 << 20) if device.type == "cuda" else 0)
    assert view.sum().item() == 1 << 18


def stage_on(device: torch.device, model: TiedModel) -> Stage:
    """Return all layers of a model as one stage."""
    whole = assemble(model, seed=0, dtype=torch.float64).to(device)
    layers = [StageLayer(index=index, module=module) for index, module in enumerate(whole.stack)]
    return Stage(model, layers, device=device, autocast=None, seed=9)


def batch_on(device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in stack([Tokens()[i] for i in range(3)]).items()}


def test_dropout_is_drawn_by_step_and_microbatch_alone(device: torch.device) -> None:
    stage, batch = stage_on(device, TiedModel(dropout=0.5)), batch_on(device)

    def loss(step: int, position: int) -> float:
        found = stage.forward(0, {}, batch, step=step, position=position, num_targets=15)[1]
        assert found is not None
        stage.forget(0)
        torch.rand(7, device=device)  # whatever else is drawn
        return found.item()

    first = loss(4, 2)
    assert loss(4, 3) != first
    assert loss(5, 2) != first
    assert loss(4, 2) == first


def test_steps_leave_no_memory_behind(device: torch.device) -> None:
    stage, batch = stage_on(device, TiedModel()), batch_on(device)

    def step() -> None:
        stage.begin()
        for number in range(4):
            stage.forward(number, {}, batch, step=1, position=number, num_targets=60)
        for number in range(3):  # the last one is given up
            stage.backward(number, {})
        stage.begin()

    step()
    before = in_use(device)
    for _ in range(3):
        step()
    assert in_use(device) == before


def test_training_equals_that_on_the_host(
    device: torch.device, tmp_path: Path, empty_cache: Path, one_process: None
) -> None:
    def trained(on: torch.device) -> list[float]:
        trainer = Trainer(
            TiedModel(),
            Tokens(),
            optimizer=AdamW(lr=0.01),
            global_batch=8,
            microbatch=2,
            precision="fp64",
            device=on,
            num_workers=0,
        )
        _, losses = train_here(trainer, 4, directory=tmp_path / on.type / "run")
        return list(losses.values())

    expected = trained(torch.device("cpu"))
    assert trained(device) == pytest.approx(expected, rel=1e-9)


@pytest.mark.gpu
def test_no_process_that_reads_samples_is_forked_from_one_that_uses_cuda() -> None:
    torch.zeros(1, device="cuda")

    def load(step: int, cell: Cell, reads: object) -> Microbatch:
        raise AssertionError("nothing is read")

    with data_processes(load, None, Cell.of_chain(0, 1)) as processes:
        assert processes is None


@pytest.mark.gpu
def test_workers_with_a_device_each_talk_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def of_rank(rank: int, address: str) -> tuple[bool, float, float, float]:
        device = torch.device("cuda", rank)
        with torch.cuda.device(device):
            comm = join(address, rank, 2, [(0, 1)], device=device)
            total = torch.full((3,), 10.0**rank, device=device)
            comm.all_reduce(total, (0, 1)).wait()
            mine, other = torch.full((3,), float(rank), device=device), torch.zeros(3, device=device)
            sent, received = comm.send(mine, 1 - rank, 1), comm.recv(other, 1 - rank, 1)
            received.wait()
            sent.wait()
            found = total[0].item(), other[0].item()
            took_s = seconds_until_aborted(comm, device) if rank == 0 else 0.0
            return (comm.on_devices, *found, took_s)

    found = as_threads(2, of_rank)
    assert [each[:3] for each in found] == [(True, 11.0, 1.0), (True, 11.0, 0.0)]
    assert 0.0 <= found[0][3] < LONGEST_ABORT_S
