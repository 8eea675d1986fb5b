"""Groups over NCCL for jobs in which every worker has a GPU of its own.

GPU tensors go over NCCL; host tensors (headers, the prepare barrier, checksums) over the generation's gloo groups,
which also carry the abort: NCCL notices a dead peer on its own only after its timeout.

NCCL has no tags, and operations between two ranks run in the order they were issued. So carries and their gradients
have a group each, one per direction: within a direction, both sides issue in the same order, and a receipt that is
posted early never stands in the way of what goes the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.gloo import GlooCommunicator
from resilient.comm.interface import Group, Pending

Build = Callable[[Store, int, int, float], Any]
"""(store, rank, size, timeout in seconds) -> a backend with torch's ``send``, ``recv``, ``allreduce`` and ``abort``."""


def build_nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Make one NCCL group on the current device."""
    from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]  # not in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, size, options)


def gpu_of(device: torch.device) -> str:
    """Return a name of the GPU that is unique in the cluster; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class _DevicePending:
    def __init__(self, gloo: GlooCommunicator, work: Any) -> None:
        self._gloo = gloo
        self._work = work

    def wait(self) -> None:
        self._gloo.check()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._gloo.failed(error) from error
        self._gloo.check()


class NcclCommunicator:
    """GPU tensors over device groups, everything else over gloo.

    Waiting for an operation orders the current stream after it. Whether it went well shows at the next
    synchronisation: the prepare barrier reads the gradient norms first, and then checks for an abort.

    Args:
        gloo: The generation's host groups.
        store: Of the generation.
        groups: The sets of ranks that all-reduce.
        timeout_s: Last resort.
        build: Makes a device group; the tests put another backend here.
    """

    def __init__(
        self,
        gloo: GlooCommunicator,
        store: Store,
        groups: Sequence[Group],
        timeout_s: float,
        build: Build = build_nccl,
    ) -> None:
        self.rank = gloo.rank
        self.size = gloo.size
        self._gloo = gloo
        self._up = build(PrefixStore("device/up", store), self.rank, gloo.num_ranks, timeout_s)
        self._down = build(PrefixStore("device/down", store), self.rank, gloo.num_ranks, timeout_s)
        self._groups = {
            group: build(
                PrefixStore("device/" + "-".join(map(str, group)), store), group.index(self.rank), len(group), timeout_s
            )
            for group in dict.fromkeys([tuple(range(self.size)), *groups])
            if self.rank in group
        }

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        if tensor.device.type == "cpu":
            return self._gloo.send(tensor, target, tag)
        group = self._up if target > self.rank else self._down
        return self._issue(lambda: group.send([tensor], target, 0))

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        if tensor.device.type == "cpu":
            return self._gloo.recv(tensor, source, tag)
        group = self._up if source < self.rank else self._down
        return self._issue(lambda: group.recv([tensor], source, 0))

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        if tensor.device.type == "cpu":
            return self._gloo.all_reduce(tensor, group)
        return self._issue(lambda: self._groups[group].allreduce([tensor]))

    def check(self) -> None:
        self._gloo.check()

    def abort(self) -> None:
        self._gloo.abort()
        for group in (self._up, self._down, *self._groups.values()):
            group.abort()

    def close(self) -> None:
        self._groups.clear()
        self._gloo.close()

    def _issue(self, start: Callable[[], Any]) -> Pending:
        self._gloo.check()
        try:
            return _DevicePending(self._gloo, start())
        except RuntimeError as error:
            raise self._gloo.failed(error) from error
