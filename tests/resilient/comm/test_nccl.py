"""Device groups are connected before they are needed, end together, and call torch's NCCL backend as it is.

No GPU is needed: another backend stands in, which blocks where NCCL would, and meta tensors for those on a device.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import is_nccl_available as nccl_available  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm import GlooCommunicator, Group, StoreClient, connect
from resilient.comm.nccl import SETTINGS, NcclCommunicator, build_nccl, gpu_of
from resilient.comm.store_client import GenerationStore
from resilient.errors import CommunicationError
from tests.resilient.ranks import HOST, SECRET, as_threads, join

META = torch.device("meta")
Result = TypeVar("Result")
needs_nccl = pytest.mark.skipif(not nccl_available(), reason="this build of torch has no NCCL: it is for CPUs alone")


class Work:
    def wait(self) -> bool:
        return True


class Backend:
    """Has a first operation of each set of ranks wait until all of them have issued it, as NCCL has."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.done: list[tuple[str, int]] = []
        self.aborted = 0
        self.over = threading.Event()
        self.connected: set[Group] = set()
        self.may_connect = True
        self._store = store
        self._rank = rank
        self._everybody = tuple(range(size))

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        return self._operate("send", target, (self._rank, target))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self._operate("recv", source, (self._rank, source))

    def allreduce(self, tensors: list[Tensor]) -> Work:
        return self._operate("sum", len(self._everybody), self._everybody)

    def abort(self) -> None:
        self.aborted += 1

    def _operate(self, name: str, peer: int, ranks: Group) -> Work:
        ranks = tuple(sorted(ranks))
        if ranks not in self.connected:
            assert self.may_connect, f"rank {self._rank} would wait in {name} {peer} for {ranks}"
            self._store.set(f"{ranks}/{self._rank}", "")
            self._store.wait([f"{ranks}/{rank}" for rank in ranks], timedelta(seconds=60))
            self.connected.add(ranks)
        self.done.append((name, peer))
        return Work()


def on_ranks(
    size: int,
    work: Callable[[int, NcclCommunicator, list[Any]], Result],
    groups: Sequence[Group] = (),
    backend: type[Backend] = Backend,
) -> list[Result]:
    """Call ``work(rank, communicator, its device groups: up, down, those that sum)``; return the results by rank.

    All ranks are connected before one begins, and stay so until all are done: gloo would tell of what is missing.
    """
    together = threading.Barrier(size)

    def member(rank: int, address: str) -> Result:
        made: list[Any] = []

        def build(store: Store, rank: int, size: int, timeout_s: float) -> Backend:
            made.append(backend(store, rank, size, timeout_s))
            return made[-1]

        gloo = join(address, rank, size)
        assert isinstance(gloo, GlooCommunicator)
        store = GenerationStore(StoreClient(SECRET).take(address, 60.0), 1)
        comm = NcclCommunicator(gloo, store, groups, 1.0, build)
        together.wait(60)
        try:
            return work(rank, comm, made)
        finally:
            together.wait(60)

    return as_threads(size, member)


def test_after_meeting_no_operation_waits_for_its_peer() -> None:
    """Receipts are posted long before their peers send, and two ranks send each other states before they receive."""
    groups = [(0, 3), (1, 2)]
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (3, 0), (2, 0)]

    def work(rank: int, comm: NcclCommunicator, made: list[Any]) -> list[tuple[str, int]]:
        comm.meet(pairs, META)
        for backend in made:
            backend.may_connect = False
            backend.done.clear()
        value = torch.empty(1, device=META)
        peers = sorted({low + high - rank for low, high in pairs if rank in (low, high)})
        for peer in peers:
            comm.recv(value, peer, 1)
        for peer in peers:
            comm.send(value, peer, 1)
        for group in [(0, 1, 2, 3), *groups]:
            if rank in group:
                comm.all_reduce(value, group).wait()
        up, down, *_ = made
        assert all(name == ("send" if peer > rank else "recv") for name, peer in up.done)
        assert all(name == ("recv" if peer > rank else "send") for name, peer in down.done)
        return sorted(up.done + down.done)

    assert on_ranks(4, work, groups) == [
        [(name, peer) for name in ("recv", "send") for peer in peers]
        for peers in ([1, 2, 3], [0, 2], [0, 1, 3], [0, 2])
    ]


def test_host_tensors_go_over_gloo_and_device_tensors_do_not() -> None:
    def work(rank: int, comm: NcclCommunicator, made: list[Any]) -> tuple[float, list[tuple[str, int]]]:
        everybody = (0, 1)
        on_host, on_device = torch.tensor([10.0**rank]), torch.empty(1, device=META)
        comm.all_reduce(on_host, everybody).wait()
        comm.all_reduce(on_device, everybody).wait()
        received = torch.empty(1)
        send = comm.send(on_host, 1 - rank, 1)
        comm.recv(received, 1 - rank, 1).wait()
        send.wait()
        return received.item(), [operation for backend in made for operation in backend.done]

    assert on_ranks(2, work) == [(11.0, [("sum", 2)])] * 2


class EndsTogether(Backend):
    """Has an abort wait until all three groups of the rank are being aborted: they share a device."""

    together = (threading.Barrier(3), threading.Barrier(3))

    def abort(self) -> None:
        self.together[self._rank].wait(60)
        super().abort()
        if self._rank == 1:
            raise RuntimeError("the device does not answer")


def test_abort_reaches_all_groups_at_once_even_if_some_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does anything else go over them afterwards; closing ends groups that nobody aborted, too."""

    def work(rank: int, comm: NcclCommunicator, made: list[Any]) -> None:
        value = torch.empty(1, device=META)
        pending = comm._issue(Work)
        comm.abort()
        for attempt in (
            pending.wait,
            lambda: comm.send(value, 1 - rank, 1),
            lambda: comm.recv(value, 1 - rank, 1),
            lambda: comm.all_reduce(value, (0, 1)),
            comm.check,
        ):
            with pytest.raises(CommunicationError, match=r"^the generation was aborted \(generation 1\)$"):
                attempt()
        assert [backend.aborted for backend in made] == [1, 1, 1]
        comm.close()

    on_ranks(2, work, backend=EndsTogether)
    said = {record.getMessage() for record in caplog.records if record.name == "resilient.comm.nccl"}
    assert said == {"a device group could not be aborted: the device does not answer"}


def test_close_ends_the_groups() -> None:
    def work(rank: int, comm: NcclCommunicator, made: list[Any]) -> list[int]:
        comm.meet([(0, 1)], META)
        comm.close()
        return [backend.aborted for backend in made]

    assert on_ranks(2, work, [(0, 1)]) == [[1, 1, 1]] * 2


def test_errors_of_a_group_are_communication_errors() -> None:
    class Broken(Backend):
        def allreduce(self, tensors: list[Tensor]) -> Work:
            raise RuntimeError("NCCL error: remote process exited\nlater lines")

    class Fails(Work):
        def wait(self) -> bool:
            raise RuntimeError("NCCL error: unhandled system error")

    def work(rank: int, comm: NcclCommunicator, made: list[Any]) -> None:
        begins = f"^rank {rank}: NCCL error: "
        with pytest.raises(CommunicationError, match=begins + r"remote process exited \(generation 1\)$"):
            comm.all_reduce(torch.empty(1, device=META), (0, 1))
        pending = comm._issue(Fails)
        with pytest.raises(CommunicationError, match=begins + r"unhandled system error \(generation 1\)$"):
            pending.wait()

    on_ranks(2, work, backend=Broken)


def test_interrupted_while_groups_connect_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of the device groups never come; the wait ends, and what was begun is aborted."""
    made: list[Backend] = []
    waiting = [threading.Event(), threading.Event()]

    class Alone(Backend):
        def allreduce(self, tensors: list[Tensor]) -> Work:
            waiting[self._rank].set()
            self.over.wait(60)
            raise RuntimeError("NCCL error: aborted")

        def abort(self) -> None:
            super().abort()
            self.over.set()

    class OnMeta(NcclCommunicator):
        def __init__(self, gloo: GlooCommunicator, store: Store, groups: list[Group], timeout_s: float) -> None:
            def build(*arguments: Any) -> Backend:
                made.append(Alone(*arguments))
                return made[-1]

            super().__init__(gloo, store, groups, timeout_s, build)

    module = sys.modules[connect.__module__]
    monkeypatch.setattr(module, "NcclCommunicator", OnMeta)
    monkeypatch.setattr(module, "gpu_of", lambda device: f"GPU of {threading.get_ident()}")

    def work(rank: int, address: str) -> None:
        interrupted: queue.SimpleQueue[object] = queue.SimpleQueue()

        def interrupt() -> None:
            for event in waiting:  # before, a rank would miss the other in the making of the host groups
                event.wait(60)
            interrupted.put("membership changed")

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(CommunicationError) as error:
            connect(
                generation=7, rank=rank, size=2, groups=[], store_address=address,
                store_client=StoreClient(SECRET), host=HOST, timeout_s=600.0, interrupted=interrupted, device=META,
            )  # fmt: skip
        interrupter.join()
        assert str(error.value) == f"rank {rank}: groups were not built: membership changed (generation 7)"

    as_threads(2, work)
    assert [backend.aborted for backend in made] == [1] * 6


def test_workers_without_a_gpu_have_no_name_for_one() -> None:
    assert gpu_of(torch.device("cpu")) == ""


@needs_nccl
def test_torch_has_what_is_called_of_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor is called up to where it asks for a GPU; without one, methods are known by their signatures."""
    from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]

    for name in SETTINGS:
        monkeypatch.setenv(name, "1")
    if torch.cuda.is_available():
        build_nccl(HashStore(), 0, 1, 60.0).abort()
    else:
        with pytest.raises(ValueError, match=r"^ProcessGroupNCCL is only supported with GPUs, no GPUs found!"):
            build_nccl(HashStore(), 0, 1, 60.0)
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=7)
    assert options._timeout == timedelta(seconds=7)
    signatures = {
        "send": r"send\(self: \S+, tensors: [^)]*\[torch\.Tensor\], dstRank: [^,]+, tag: [^,]+\)",
        "recv": r"recv\(self: \S+, tensors: [^)]*\[torch\.Tensor\], srcRank: [^,]+, tag: [^,]+\)",
        "allreduce": r"allreduce\(self: \S+, tensors: [^)]*\[torch\.Tensor\], opts: [^=]+ = ",
        "abort": r"abort\(self: \S+\) -> None",
    }
    for name, signature in signatures.items():
        assert re.search(signature, getattr(ProcessGroupNCCL, name).__doc__), name


@needs_nccl
def test_torch_tells_gpus_apart() -> None:
    assert isinstance(torch._C._CudaDeviceProperties.uuid, property)
