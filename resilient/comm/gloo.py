"""Groups over gloo that any thread may abort. Tried on torch 2.13.

Why abort() works on sockets: gloo has no working abort. A rank that waits for a live rank which itself waits for a
dead one sits there until the group's timeout. Shutting down the connected sockets of a generation makes every
operation on it, here and one hop further at the peers, end with an error within milliseconds.

All but those that gloo forgets: a transfer that has begun when its connection breaks is in none of the lists that gloo
tells of the error, and waits for the group's timeout. So nothing here waits for gloo without looking up: a collective
is waited for in slices, a point-to-point operation (where an expired wait would close the group) in another thread,
and the groups of an aborted generation are dropped in a third.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.interface import Group, Pending
from resilient.errors import CommunicationError

_creating_device = threading.Lock()
_SLICE = timedelta(milliseconds=50)
_DROP_S = 0.1


class _GlooPending:
    """Waits for a gloo work; ``landing`` is where a tensor staged in host memory goes afterwards."""

    def __init__(self, wait: Callable[[Any], None], work: Any, staged: Tensor, landing: Tensor | None) -> None:
        self._wait = wait
        self._work = work
        self._staged = staged
        self._landing = landing

    def wait(self) -> None:
        self._wait(self._work)
        if self._landing is not None:
            self._landing.copy_(self._staged)


class _Waiter:
    """Waits for works in a thread of its own, one after another, so that the wait for a lost one can be given up."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        threading.Thread(target=_serve_waits, args=(self._works, self._results), name="gloo-wait", daemon=True).start()
        # nobody closes groups that were left behind half built
        weakref.finalize(self, self._works.put, None).atexit = False

    def wait(self, work: Any) -> None:
        """Wait for the work to end, or for :meth:`give_up`."""
        self._works.put(work)
        error = self._results.get()
        if error is not None:
            raise error

    def give_up(self) -> None:
        """End a wait, the one under way or the next."""
        self._results.put(None)

    def close(self) -> None:
        """End the thread, when it gets there."""
        self._works.put(None)


def _serve_waits(works: queue.SimpleQueue[Any], results: queue.SimpleQueue[RuntimeError | None]) -> None:
    while (work := works.get()) is not None:
        result = None
        try:
            work.wait()
        except RuntimeError as error:
            result = error
        del work  # its tensors are the caller's to keep
        results.put(result)


class GlooCommunicator:
    """Groups over gloo: one over all ranks (point-to-point, copies), one over those that train, one per further set.

    Tensors on other devices are staged through host memory, so that several workers may share one GPU.

    Args:
        generation: Its number, for messages.
        rank: This worker's rank.
        size: Number of ranks that train.
        groups: The sets of ranks that all-reduce; the same list on every rank.
        store: Of the generation.
        host: Address of this machine that its peers can reach.
        timeout_s: Last resort for an operation nothing else ends.
        gpu: Name of this worker's GPU, if it has one; ``own_gpus`` tells whether all ranks have, each its own.
        num_sources: Ranks after those that train.
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
        num_sources: int = 0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.on_devices = False
        self.num_ranks = size + num_sources
        self._generation = generation
        self._aborted = threading.Event()
        self._waiter = _Waiter()
        with _creating_device:  # the connect thread of a generation that is over may be here too
            listeners = _listeners()
            self._device = ProcessGroupGloo.create_device(hostname=host)
            (self._address,) = _listeners() - listeners
        store.set(f"rank/{rank}", f"{self._address} {gpu}")
        self._world = tuple(range(self.num_ranks))
        self._groups = {
            group: self._build(PrefixStore("-".join(map(str, group)), store), group, timeout_s)
            for group in dict.fromkeys([self._world, tuple(range(size)), *groups])
            if rank in group
        }
        known = [store.get(f"rank/{peer}").decode().partition(" ") for peer in self._world]
        self._peers = {address for peer, (address, _, _) in enumerate(known) if peer != rank}
        gpus = {name for _, _, name in known}
        self.own_gpus = "" not in gpus and len(gpus) == self.num_ranks

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
            raise CommunicationError("the generation was aborted", generation=self._generation)

    def failed(self, error: RuntimeError) -> CommunicationError:
        """Turn a backend's error into ours."""
        reason = str(error).strip().splitlines()
        what = f"rank {self.rank}: {reason[0] if reason else 'failed'}"
        return CommunicationError(what, generation=self._generation)

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        staged = tensor.cpu()
        work = self._issue(lambda: self._group(self._world).send([staged], target, tag))
        return _GlooPending(self._wait_for_transfer, work, staged, None)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        staged = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        landing = None if staged is tensor else tensor
        work = self._issue(lambda: self._group(self._world).recv([staged], source, tag))
        return _GlooPending(self._wait_for_transfer, work, staged, landing)

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        staged = tensor.cpu()
        landing = None if staged is tensor else tensor
        work = self._issue(lambda: self._group(group).allreduce([staged]))
        return _GlooPending(self._wait_for_collective, work, staged, landing)

    def _issue(self, start: Callable[[], object]) -> object:
        self.check()
        try:
            return start()
        except RuntimeError as error:
            raise self.failed(error) from error

    def _wait_for_transfer(self, work: Any) -> None:
        self.check()
        try:
            self._waiter.wait(work)
        except RuntimeError as error:
            raise self.failed(error) from error
        self.check()

    def _wait_for_collective(self, work: Any) -> None:
        self.check()
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # it failed, which is asked below, or the slice is over
                work.wait(_SLICE)
            self.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failed(error) from error
        # a collective of an aborted generation can end without error on some ranks: its result must not count
        self.check()

    def abort(self) -> None:
        self._aborted.set()
        _shut_down_connections(self._address, self._peers)
        self._waiter.give_up()

    def close(self) -> None:
        self._waiter.close()
        groups = list(self._groups.values())
        self._groups.clear()
        # Their destructors wait for what is under way. What still is after this time is lost and touches no tensor.
        dropping = threading.Thread(target=groups.clear, name="gloo-drop", daemon=True)
        dropping.start()
        dropping.join(_DROP_S)


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


def _listeners() -> set[str]:
    """Return the addresses this process listens on, as ``ip:port``."""
    found: set[str] = set()
    for sock in _sockets():
        with sock:
            if _is_tcp(sock) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_text(sock.getsockname()))
    return found


def _shut_down_connections(own: str, peers: set[str]) -> None:
    """Shut down connections accepted on ``own`` or made to ``peers``; never a listener: that kills gloo."""
    for sock in _sockets():
        with sock:
            try:
                if not _is_tcp(sock) or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if _text(sock.getsockname()) == own or _text(sock.getpeername()) in peers:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected (any more)


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _text(address: tuple[Any, ...]) -> str:
    return f"{address[0]}:{address[1]}"
