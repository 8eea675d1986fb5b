"""The process groups of one generation, which any thread may abort.

Owns all use of torch's backends. They are built directly, not through ``torch.distributed``'s global state, because a
job has a new set of groups at every change of membership. Tried on torch 2.13 (gloo on CPU tensors).

Why abort() works on sockets: gloo has no working abort. A rank that waits for a live rank which itself waits for a
dead one sits there until the group's timeout. Shutting down the connected sockets of a generation makes every
operation on it, here and one hop further at the peers, end with an error within milliseconds.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from resilient.errors import CommunicationError

Group = tuple[int, ...]
"""Ascending global ranks of a generation."""


class Pending(Protocol):
    """An operation under way; its tensors must stay untouched until ``wait`` has returned."""

    def wait(self) -> None:
        """Block until the operation is done.

        Raises:
            CommunicationError: A peer is gone or the generation was aborted; nothing more can be done in it.
        """
        ...


class Communicator(Protocol):
    """What the executor needs of a generation's groups. Only ``abort`` may be called from other threads."""

    rank: int
    size: int

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        """Send a contiguous tensor; the target receives with the same tag and the same number of bytes."""
        ...

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Receive into a contiguous tensor."""
        ...

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        """Sum in place over ``group``; its members call this in the same order."""
        ...

    def abort(self) -> None:
        """Make all operations, running and future, fail on this rank and, through broken connections, at its peers."""
        ...

    def close(self) -> None:
        """Drop the groups; the generation ended in good order."""
        ...


class StoreHost:
    """A key-value store in this process, in which the ranks of a generation can meet.

    Every worker hosts one for its lifetime, so that the first survivor always has one at hand; keys carry the
    generation and are never used twice.
    """

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()


class SoloCommunicator:
    """The communicator of a job with one worker: there is nobody to talk to."""

    rank = 0
    size = 1

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        raise AssertionError("a single worker has no peer to send to")

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        raise AssertionError("a single worker has no peer to receive from")

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        return DONE

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None


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
    ) -> None:
        self.rank = rank
        self.size = size
        self._generation = generation
        self._aborted = threading.Event()
        listeners = _listening_ports()
        self._device = ProcessGroupGloo.create_device(hostname=host)
        (self._port,) = _listening_ports() - listeners
        store.set(f"port/{rank}", str(self._port))
        self._world = tuple(range(size))
        self._groups = {
            group: self._build(PrefixStore("-".join(map(str, group)), store), group, timeout_s)
            for group in dict.fromkeys([self._world, *groups])
            if rank in group
        }
        self._peer_ports = {int(store.get(f"port/{peer}")) for peer in range(size) if peer != rank}

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


def connect(
    *,
    generation: int,
    rank: int,
    size: int,
    groups: Sequence[Group],
    store_address: str,
    host: str,
    timeout_s: float,
    interrupted: queue.SimpleQueue[object],
) -> Communicator:
    """Build the groups of a generation together with all its other ranks.

    Args:
        generation: Its number; the store's keys carry it.
        rank: This worker's rank.
        size: Number of ranks.
        groups: The sets of ranks that all-reduce; the same list on every rank.
        store_address: ``host:port`` of the store of rank 0.
        host: Address of this machine that its peers can reach.
        timeout_s: Last resort for an operation nothing else ends.
        interrupted: Anything put in here from another thread ends the wait for the peers.

    Raises:
        CommunicationError: A peer did not come or the wait was interrupted.
    """
    if size == 1:
        return SoloCommunicator()
    store_host, _, port = store_address.rpartition(":")

    # A peer that dies while groups connect leaves the constructor waiting for its timeout. So a thread of its own
    # builds; when interrupted it is left behind, and what it still gets done is dropped: its keys are never used again.
    def build() -> None:
        try:
            store = TCPStore(
                store_host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
            communicator = GlooCommunicator(
                generation=generation,
                rank=rank,
                size=size,
                groups=groups,
                store=PrefixStore(f"g{generation}", store),
                host=host,
                timeout_s=timeout_s,
            )
        except RuntimeError as error:
            interrupted.put(error)
        else:
            interrupted.put(communicator)

    threading.Thread(target=build, name=f"connect-g{generation}", daemon=True).start()
    result = interrupted.get()
    if isinstance(result, GlooCommunicator):
        return result
    reason = str(result).strip().splitlines()[0] if isinstance(result, Exception) else "membership changed"
    raise CommunicationError(f"generation {generation}, rank {rank}: groups were not built: {reason}")


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
