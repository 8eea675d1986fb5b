"""Groups over gloo that any thread may abort. Tried on torch 2.13.

Why abort() works on sockets: gloo has no working abort. A rank that waits for a live rank which itself waits for a
dead one sits there until the group's timeout. Shutting down the connected sockets of a generation makes every
operation on it, here and one hop further at the peers, end with an error within milliseconds.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.interface import Group, Pending
from resilient.errors import CommunicationError

_creating_device = threading.Lock()


class _GlooPending:
    """Waits for a gloo work; ``landing`` is where a tensor staged in host memory goes afterwards."""

    def __init__(self, owner: GlooCommunicator, work: object, staged: Tensor, landing: Tensor | None) -> None:
        self._owner = owner
        self._work = work
        self._staged = staged
        self._landing = landing

    def wait(self) -> None:
        self._owner.check()
        try:
            self._work.wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._owner.failed(error) from error
        # a collective of an aborted generation can end without error on some ranks: its result must not count
        self._owner.check()
        if self._landing is not None:
            self._landing.copy_(self._staged)


class GlooCommunicator:
    """Groups over gloo: one over all ranks (point-to-point, barriers, copies), one per further set of ranks.

    Tensors on other devices are staged through host memory, so that several workers may share one GPU.

    Args:
        generation: Its number, for messages.
        rank: This worker's rank.
        size: Number of ranks.
        groups: The sets of ranks that all-reduce; the same list on every rank.
        store: Of the generation.
        host: Address of this machine that its peers can reach.
        timeout_s: Last resort for an operation nothing else ends.
        gpu: Name of this worker's GPU, if it has one; ``own_gpus`` tells whether all ranks have, each its own.
    """

    def __init__(
        self,
        *,
        generation: int,
        rank: int,
        size: int,
        groups: Sequence[Group],
        store: Store,
        host: str,
        timeout_s: float,
        gpu: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self._generation = generation
        self._aborted = threading.Event()
        with _creating_device:  # the connect thread of a generation that is over may be here too
            listeners = _listening_ports()
            self._device = ProcessGroupGloo.create_device(hostname=host)
            (self._port,) = _listening_ports() - listeners
        store.set(f"rank/{rank}", f"{self._port} {gpu}")
        self._world = tuple(range(size))
        self._groups = {
            group: self._build(PrefixStore("-".join(map(str, group)), store), group, timeout_s)
            for group in dict.fromkeys([self._world, *groups])
            if rank in group
        }
        known = [store.get(f"rank/{peer}").decode().partition(" ") for peer in range(size)]
        self._peer_ports = {int(port) for peer, (port, _, _) in enumerate(known) if peer != rank}
        gpus = {name for _, _, name in known}
        self.own_gpus = "" not in gpus and len(gpus) == size

    def _build(self, store: Store, group: Group, timeout_s: float) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupGloo(store, group.index(self.rank), len(group), options)

    def _group(self, group: Group) -> Any:  # torch's stubs leave out the operations of a backend used by itself
        return self._groups[group]

    def check(self) -> None:
        """Raise when the generation was aborted."""
        if self._aborted.is_set():
            raise CommunicationError(f"generation {self._generation} was aborted")

    def failed(self, error: RuntimeError) -> CommunicationError:
        """Turn a backend's error into ours."""
        reason = str(error).strip().splitlines()
        return CommunicationError(
            f"generation {self._generation}, rank {self.rank}: {reason[0] if reason else 'failed'}"
        )

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        staged = tensor.cpu()
        return self._issue(lambda: self._group(self._world).send([staged], target, tag), staged, None)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        staged = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        landing = None if staged is tensor else tensor
        return self._issue(lambda: self._group(self._world).recv([staged], source, tag), staged, landing)

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        staged = tensor.cpu()
        landing = None if staged is tensor else tensor
        return self._issue(lambda: self._group(group).allreduce([staged]), staged, landing)

    def _issue(self, start: Callable[[], object], staged: Tensor, landing: Tensor | None) -> Pending:
        self.check()
        try:
            return _GlooPending(self, start(), staged, landing)
        except RuntimeError as error:
            raise self.failed(error) from error

    def abort(self) -> None:
        self._aborted.set()
        _shut_down_connections(self._port, self._peer_ports)

    def close(self) -> None:
        self._groups.clear()


def _sockets() -> list[socket.socket]:
    """Duplicate every socket of this process; the copies are the caller's to close."""
    found: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(socket.socket(fileno=os.dup(int(name))))
        except OSError:
            continue  # closed since the listing
    return found


def _listening_ports() -> set[int]:
    ports: set[int] = set()
    for sock in _sockets():
        with sock:
            inet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if inet and sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(sock.getsockname()[1])
    return ports


def _shut_down_connections(own_port: int, peer_ports: set[int]) -> None:
    """Shut down connections accepted on ``own_port`` or made to ``peer_ports``; never a listener: that kills gloo."""
    for sock in _sockets():
        with sock:
            try:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if sock.getsockname()[1] == own_port or sock.getpeername()[1] in peer_ports:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected (any more)
