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
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm import grid
from resilient.comm.channels import Channels
from resilient.comm.interface import Group, Pending, name_of
from resilient.comm.own_sockets import let_nobody_else_in, listeners, shut_down_connections
from resilient.comm.parts_exchange import PartsExchange
from resilient.comm.store_client import GenerationStore, GroupStore
from resilient.common.handshake import PROOF_BYTES, is_proof, nonce, proof
from resilient.errors import CommunicationError

_creating_device = threading.Lock()
_SLICE = timedelta(milliseconds=50)
_DROP_S = 0.1
_TIMED_OUT = "Timed out"
_RECOGNISE = 0
_FIRST_EXCHANGE = 1 << 30
"""Tags from here on are those of exchanges of parts; gloo's have 31 bits, and no step or copy counts as far as this."""
_TAGS_OF_A_GROUP = 1 << 31
"""Of a group's sums along lines; the first are those of tensors that are sent."""
_RECOGNISE_TIME = timedelta(seconds=30)
_ADDRESS = re.compile(r"\[(?P<host>\S+)\]:(?P<port>\d+)")
"""As gloo writes those of sockets in its errors."""


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
        # texts: an error would keep, by its traceback, all that the waiting thread holds
        self._results: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_serve_waits, args=(self._works, self._results), name="gloo-wait", daemon=True).start()
        # nobody closes groups that were left behind half built
        weakref.finalize(self, self._works.put, None).atexit = False

    def wait(self, work: Any) -> None:
        """Wait for the work to end, or for :meth:`give_up`."""
        self._works.put(work)
        reason = self._results.get()
        if reason is not None:
            raise RuntimeError(reason)

    def give_up(self) -> None:
        """End a wait, the one under way or the next."""
        self._results.put(None)

    def close(self) -> None:
        """End the thread, when it gets there."""
        self._works.put(None)


def _serve_waits(works: queue.SimpleQueue[Any], results: queue.SimpleQueue[str | None]) -> None:
    while (work := works.get()) is not None:
        result = None
        try:
            work.wait()
        except RuntimeError as error:
            result = str(error)
        del work  # its tensors are the caller's to keep
        results.put(result)


class GlooCommunicator:
    """Groups over gloo: one over all ranks (point-to-point, copies), one over those that train, one per further set.

    Of more than ``grid.WIDEST`` ranks not all are connected to each other: sums of as many go along the lines of a grid
    (:mod:`resilient.comm.grid`), and tensors are sent without gloo (:mod:`resilient.comm.channels`).

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
        pairs: Ranks that may send each other tensors, at least this one's.
        ports: The range that channels listen in, "" for any port; gloo itself cannot be told.
        on_group: Called before each group is made.
        aborted: Set once nobody wants this any more, also while it is being built; by :meth:`abort`, or by others.
    """

    def __init__(
        self,
        *,
        generation: int,
        rank: int,
        size: int,
        groups: Sequence[Group],
        store: GenerationStore,
        host: str,
        timeout_s: float,
        gpu: str = "",
        num_sources: int = 0,
        pairs: Iterable[tuple[int, int]] = (),
        ports: str = "",
        on_group: Callable[[], None] = lambda: None,
        aborted: threading.Event | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.on_devices = False
        self.num_ranks = size + num_sources
        self._generation = generation
        self._aborted = aborted or threading.Event()
        self._waiter = _Waiter()
        self._exchanges: dict[Group, int] = {}
        # torch reads it with the first group of the process: its record of the last 2000 operations, and of every group
        # there ever was, is megabytes
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        self._world = tuple(range(self.num_ranks))
        groups = list(dict.fromkeys([self._world, tuple(range(size)), *groups]))
        connections = grid.connections_of(rank, self._world, groups, pairs)
        with _creating_device:  # the connect thread of a generation that is over may be here too
            self._channels = Channels(rank, host, timeout_s, ports) if connections.peers else None
            before = listeners()
            self._device = ProcessGroupGloo.create_device(hostname=host)
            (self._address,) = listeners() - before
        told = self._channels.told if self._channels else "-"
        store.set(f"rank/{rank}", f"{self._address} {nonce().hex()} {told} {gpu}")
        self._stores: list[Store] = [store]
        answers = store.multi_get([f"rank/{peer}" for peer in connections.ranks])
        known = {peer: each.decode().split(" ", 3) for peer, each in zip(connections.ranks, answers, strict=True)}
        self.peers = {address: peer for peer, (address, _, _, _) in known.items() if peer != rank}
        try:
            self._groups: dict[Group, ProcessGroupGloo] = {}
            for group in connections.groups:
                on_group()
                self._groups[group] = self._build(store, group, timeout_s)
            nonces = {peer: bytes.fromhex(number) for peer, (_, number, _, _) in known.items()}
            for group in self._groups:
                self._recognise(group, nonces)
            let_nobody_else_in(self._address)
        except RuntimeError as error:
            raise self.failed(error) from error
        self._sums: dict[Group, grid.GridSums] = {}
        if self._channels is None:
            gpus = {name for _, _, _, name in known.values()}
            self.own_gpus = "" not in gpus and len(gpus) == self.num_ranks
            return
        self._channels.meet({peer: known[peer][2] for peer in connections.peers})
        for number, group in enumerate(groups):
            if rank in group and group not in self._groups:
                lines = grid.grid_lines(group, rank, grid.WIDEST)
                self._sums[group] = grid.GridSums(lines, self._channels, (number + 1) * _TAGS_OF_A_GROUP)
        self.own_gpus = self._all_have_own(gpu, store)

    def _build(self, store: GenerationStore, group: Group, timeout_s: float) -> ProcessGroupGloo:
        index, size = group.index(self.rank), len(group)
        own_store = GroupStore(store, name_of(group), index, size)
        self._stores.append(own_store)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupGloo(own_store, index, size, options)

    def _all_have_own(self, gpu: str, store: GenerationStore) -> bool:
        """Return whether all ranks have a GPU, each its own, where none knows all others."""
        if gpu:
            store.set(f"gpu/{gpu}", str(self.rank))  # the last one of several stays
        num_have = self._sum(bool(gpu))  # now all have said so
        is_own = num_have == self.num_ranks and int(store.get(f"gpu/{gpu}")) == self.rank
        return self._sum(is_own) == self.num_ranks

    def _sum(self, value: float) -> float:
        total = torch.tensor([float(value)], dtype=torch.float64)
        self.all_reduce(total, self._world).wait()
        return total.item()

    def _recognise(self, group: Group, nonces: Mapping[int, bytes]) -> None:
        """Have all of a group show each other that they have read in the store what only ranks can read.

        Gloo takes whoever connects first for a rank: who did is known once this has returned.

        Args:
            group: Of this rank, just connected.
            nonces: Of its ranks.

        Raises:
            CommunicationError: Somebody else than the rank answers.
            RuntimeError: Nobody does.
        """
        backend: Any = self._groups[group]
        peers = [(peer, index) for index, peer in enumerate(group) if peer != self.rank]
        shown = {peer: torch.zeros(PROOF_BYTES, dtype=torch.uint8) for peer, _ in peers}
        works = [backend.recv([shown[peer]], index, _RECOGNISE) for peer, index in peers]
        for peer, index in peers:
            ours = proof(nonces[peer], str(self.rank).encode(), str(group).encode())
            work = backend.send([torch.tensor(list(ours), dtype=torch.uint8)], index, _RECOGNISE)
            works.append(work)
        for work in works:
            work.wait(_RECOGNISE_TIME)
        for peer, theirs in shown.items():
            if not is_proof(bytes(theirs.tolist()), nonces[self.rank], str(peer).encode(), str(group).encode()):
                what = f"rank {self.rank}: who connected as rank {peer} is somebody else"
                raise CommunicationError(what, generation=self._generation)

    def _group(self, group: Group) -> Any:  # torch's stubs leave out the operations of a backend used by itself
        return self._groups[group]

    def check(self) -> None:
        """Raise when the generation was aborted."""
        if self._aborted.is_set():
            raise CommunicationError("the generation was aborted", generation=self._generation)

    def failed(self, error: RuntimeError, group: Group = ()) -> CommunicationError:
        """Turn a backend's error into ours, which names the peer whose connection broke, if that can be known.

        Args:
            error: The backend's.
            group: Who took part.
        """
        text = str(error).strip()
        what = f"rank {self.rank}: {text.splitlines()[0] if text else 'failed'}"
        others = [peer for peer in group if peer != self.rank]
        peer = others[0] if len(others) == 1 else self._named(text)
        # who is waited for too long may itself wait for another; who has left says nothing of connections
        is_known = _TIMED_OUT not in text and not self._aborted.is_set()
        return CommunicationError(what, generation=self._generation, peer=peer if is_known else None)

    def _named(self, text: str) -> int | None:
        """Return the rank whose listener an error of gloo names, at whatever end the connection was made."""
        for found in _ADDRESS.finditer(text):
            port = int(found["port"])
            swapped = int.from_bytes(port.to_bytes(2, "big"), "little")  # gloo 2.13 writes them as they are sent
            for number in (port, swapped):
                if (peer := self.peers.get(f"{found['host']}:{number}")) is not None:
                    return peer
        return None

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        staged = tensor.cpu()
        if (channels := self._channels) is not None:
            wait = self._wait_for_message
            work = self._issue(lambda: channels.send(staged, target, tag), (target,))
        else:
            wait = self._wait_for_transfer
            work = self._issue(lambda: self._group(self._world).send([staged], target, tag), (target,))
        return _GlooPending(partial(wait, target), work, staged, None)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        staged = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        landing = None if staged is tensor else tensor
        if (channels := self._channels) is not None:
            wait = self._wait_for_message
            work = self._issue(lambda: channels.recv(staged, source, tag), (source,))
        else:
            wait = self._wait_for_transfer
            work = self._issue(lambda: self._group(self._world).recv([staged], source, tag), (source,))
        return _GlooPending(partial(wait, source), work, staged, landing)

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        staged = tensor.cpu()
        landing = None if staged is tensor else tensor
        if (sums := self._sums.get(group)) is not None:
            self.check()
            return _GlooPending(partial(self._wait_for_sum, group), sums.start(staged), staged, landing)
        work = self._issue(lambda: self._group(group).allreduce([staged]), group)
        return _GlooPending(partial(self._wait_for_collective, group), work, staged, landing)

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        return PartsExchange(self, parts, group, self._next_exchange(group)).all_gather()

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        return PartsExchange(self, parts, group, self._next_exchange(group)).reduce_scatter()

    def _next_exchange(self, group: Group) -> int:
        """Return the tag of a group's next exchange of parts; all its ranks count alike."""
        number = self._exchanges[group] = self._exchanges.get(group, -1) + 1
        return _FIRST_EXCHANGE + number % _FIRST_EXCHANGE

    def _issue(self, start: Callable[[], object], group: Group) -> object:
        self.check()
        try:
            return start()
        except RuntimeError as error:
            raise self.failed(error, group) from error

    def _wait_for_transfer(self, peer: int, work: Any) -> None:
        self.check()
        try:
            self._waiter.wait(work)
        except RuntimeError as error:
            raise self.failed(error, (peer,)) from error
        self.check()

    def _wait_for_message(self, peer: int, message: Any) -> None:
        self.check()
        try:
            message.wait()
        except CommunicationError as error:
            self.check()
            raise self.failed(RuntimeError(str(error)), (peer,)) from error
        self.check()

    def _wait_for_collective(self, group: Group, work: Any) -> None:
        self.check()
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # it failed, which is asked below, or the slice is over
                work.wait(_SLICE)
            self.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failed(error, group) from error
        # a collective of an aborted generation can end without error on some ranks: its result must not count
        self.check()

    def _wait_for_sum(self, group: Group, done: Future[None]) -> None:
        self.check()
        while not wait([done], _SLICE.total_seconds()).done:
            self.check()
        # not raised: by its traceback it would keep this frame, which keeps it, and so all groups
        error = done.exception()
        if error is not None:
            peer = error.peer if isinstance(error, CommunicationError) else None
            raise self.failed(RuntimeError(str(error)), group if peer is None else (peer,))
        self.check()

    def abort(self) -> None:
        self._aborted.set()
        shut_down_connections(self._address, self.peers.keys())
        if self._channels is not None:
            self._channels.abort()
        self._waiter.give_up()

    def close(self) -> None:
        self._waiter.close()
        groups = list(self._groups.values())
        self._groups.clear()
        self._sums.clear()
        if self._channels is not None:
            self._channels.close()
        # Their destructors wait for what is under way. What still is after this time is lost, and touches no tensor.
        # (gloo 2.13 may forget a send whose connection breaks: nobody waits for it, its group goes with its timeout.)
        dropping = threading.Thread(target=groups.clear, name="gloo-drop", daemon=True)
        dropping.start()
        dropping.join(_DROP_S)
