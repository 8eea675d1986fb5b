"""Groups over NCCL for jobs in which every worker has a GPU of its own.

GPU tensors go over NCCL; host tensors (headers, the prepare barrier, checksums) over the generation's gloo groups,
which also carry the abort: NCCL notices a dead peer on its own only after its timeout.

NCCL has no tags, and operations between two ranks run in the order they were issued. So activations and their gradients
have a group each, one per direction: within a direction, both sides issue in the same order, and a receipt that is
posted early never stands in the way of what goes the other way.

torch makes a communicator with the first operation of a group, and one more with the first message of each pair of
ranks; that operation waits on the host until all its ranks have issued it. In a step this would be a deadlock (the
receipt of a gradient is posted long before the gradient is sent), so every group and pair is used once by
:meth:`NcclCommunicator.meet`, before there is anything to wait for.

Checked without GPUs: the calls and the names of the settings with torch 2.15 and NCCL 2.30, and what torch does with
them in its sources.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, is_nccl_available  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.gloo import GlooCommunicator
from resilient.comm.interface import Group, Pending, in_meeting_order, name_of

logger = logging.getLogger(__name__)

Build = Callable[[Store, int, int, float], Any]
"""(store, rank, size, timeout in seconds) -> a backend with torch's ``send``, ``recv``, ``allreduce`` and ``abort``."""

SETTINGS = {
    # A group's watchdog that sees an error or a timeout waits a minute, so long that the group is aborted and replaced
    # by then, and ends the process. Nor may it abort by itself: sums cut short would pass for complete ones.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns the above on again
    # The watchdogs' own watchdog ends the process, too: for a slow watchdog, and for a dump that any rank asks for.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the minute, for which dropping the group would wait
    # A wait orders streams: blocking the host instead would leave the GPU without work.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Environment variables that torch reads when a group is made."""


def build_nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Make one NCCL group; its communicators are made with its first operations, on the device of their tensors."""
    from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]  # not in CPU builds

    os.environ.update(SETTINGS)  # whatever they are, torchrun's for one: survivors must not end
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, size, options)


def gpu_of(device: torch.device) -> str:
    """Return a name of the GPU that is unique in the cluster; empty where there is none, or no NCCL to use it."""
    if device.type != "cuda" or not is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


class _DevicePending:
    def __init__(self, gloo: GlooCommunicator, work: Any) -> None:
        self._gloo = gloo
        self._work = work  # torch keeps the tensors with it: the allocator gives their memory to nobody else

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
        self.on_devices = True
        self._gloo = gloo
        self._store = store
        self._aborting = threading.Lock()
        self._up = build(PrefixStore("device/up", store), self.rank, gloo.num_ranks, timeout_s)
        self._down = build(PrefixStore("device/down", store), self.rank, gloo.num_ranks, timeout_s)
        self._groups = {
            group: build(PrefixStore(f"device/{name_of(group)}", store), group.index(self.rank), len(group), timeout_s)
            for group in dict.fromkeys([tuple(range(self.size)), *groups])
            if self.rank in group
        }

    def meet(self, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
        """Connect the groups, and the pairs in both directions, by using each once.

        Called once on every rank, with its own pairs at least: all go through them in one order, so that nobody waits
        in a circle. Any thread may call it; while it waits for a rank that does not come only :meth:`abort` ends it.

        Args:
            pairs: Ranks that are to send each other tensors.
            device: Of these.

        Raises:
            CommunicationError: A rank is gone or the generation was aborted.
        """
        token = torch.zeros(1, device=device)
        pending = [self.all_reduce(token, group) for group in self._groups]
        for low, high in in_meeting_order(pairs):
            if self.rank == low:
                pending += [self.send(token, high, 0), self.recv(token, high, 0)]
            elif self.rank == high:
                pending += [self.recv(token, low, 0), self.send(token, low, 0)]
        for work in pending:
            work.wait()

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

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        if parts[0].device.type == "cpu":
            return self._gloo.all_gather(parts, group)
        raise AssertionError(
            "stages of several devices do not run over NCCL: who installs plans has gloo for those with some"
        )

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        if parts[0].device.type == "cpu":
            return self._gloo.reduce_scatter(parts, group)
        raise AssertionError(
            "stages of several devices do not run over NCCL: who installs plans has gloo for those with some"
        )

    def check(self) -> None:
        self._gloo.check()

    def abort(self) -> None:
        self._gloo.abort()  # first: whoever comes out of an operation finds the generation aborted
        self._end_groups()

    def close(self) -> None:
        self._end_groups()  # all their operations are done; groups that are merely dropped warn
        self._groups.clear()
        self._gloo.close()

    def _end_groups(self) -> None:
        """Abort the device groups; no kernel of theirs runs any more when this returns.

        All at once: the end of one may have to wait for kernels of another, which end only when that is aborted.
        """
        groups = (self._up, self._down, *self._groups.values())
        with self._aborting, ThreadPoolExecutor(len(groups)) as pool:
            for failed in filter(None, pool.map(_abort, groups)):
                logger.error("a device group could not be aborted: %s", failed)

    def _issue(self, start: Callable[[], Any]) -> Pending:
        self._gloo.check()
        try:
            return _DevicePending(self._gloo, start())
        except RuntimeError as error:
            raise self._gloo.failed(error) from error


def _abort(group: Any) -> RuntimeError | None:
    try:
        group.abort()
    except RuntimeError as error:
        return error
    return None
