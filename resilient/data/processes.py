"""Processes that read cells ahead of time, forked from the worker before it is connected to anything.

A process of its own protocol instead of :class:`concurrent.futures.ProcessPoolExecutor`: no thread is started here, so
that none can be lost in a fork; a process that dies is known, and how; and its tensors need no room in ``/dev/shm``.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from itertools import groupby

import msgspec
import torch

from resilient.common.places import place_of
from resilient.common.processes import allow_open_files, die_with_parent, open_files_anew, signal_name
from resilient.data import shared
from resilient.data.reader import Cell, Microbatch, Reads
from resilient.errors import DataProcessError

Load = Callable[[int, Cell, Reads], Microbatch]

_MOST_ASKED, _MOST_ASKED_BYTES = 32, 32 << 10
"""Of one process: what is sent to it, and by it, always fits the sockets, so that nobody waits to send."""

_REQUEST_BYTES = 64 << 10
_ANSWER = struct.Struct("<QQ")
_FORGET = b"forget"
_WAIT_S = 0.01


class RemoteTracebackError(Exception):
    """Where in a data process an error was raised.

    Args:
        text: The traceback.
        place: Its line of code (:func:`resilient.common.places.place_of`).
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.place = place

    def __str__(self) -> str:
        return f"in a data process:\n{self.args[0]}"


class _Request(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    step: int
    unit: str
    lane: int
    samples: tuple[tuple[int, int], ...]  # of those that follow one another, the first and their number
    reads: tuple[str, ...] | None

    @property
    def cell(self) -> Cell:
        samples = (sample for first, count in self.samples for sample in range(first, first + count))
        return Cell(self.unit, tuple(samples), self.lane)


_decode = msgspec.msgpack.Decoder(_Request).decode


class DataProcesses:
    """Reads cells in processes of its own, each of which answers in the order it is asked.

    They end with this process. Whoever makes this closes it.

    Args:
        load: Reads a cell; forked with all that it refers to, nothing is pickled.
        num_processes: How many to start.
    """

    def __init__(self, load: Load, num_processes: int) -> None:
        self._load = load
        self._processes: list[_Process] = []
        self._num_asked = 0
        self.add(num_processes)

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, num_processes: int) -> None:
        """Start more processes."""
        for _ in range(num_processes):
            self._processes.append(_Process(self._load, self._processes))

    @property
    def has_room(self) -> bool:
        """Whether more may be asked of the process whose turn it is, before what was asked of it is taken."""
        return self._of(self._num_asked).has_room

    def ask(self, step: int, cell: Cell, reads: Reads) -> int:
        """Have a cell read; return the ticket for it.

        Raises:
            DataProcessError: The process whose turn it is is gone.
        """
        ticket, self._num_asked = self._num_asked, self._num_asked + 1
        wanted = None if reads is None else tuple(sorted(reads))
        self._of(ticket).ask(
            _Request(
                ticket=ticket, step=step, unit=cell.unit, lane=cell.lane, samples=_runs(cell.samples), reads=wanted
            )
        )
        return ticket

    def take(self, ticket: int) -> Microbatch:
        """Return what was asked for, once it is there.

        Raises:
            DataProcessError: Its process is gone.
            Exception: What reading raised, from the data process's traceback.
        """
        answer = self._of(ticket).take(ticket)
        if isinstance(answer, shared.Raised):
            raise answer.error from RemoteTracebackError(answer.traceback, answer.place)
        return answer

    def forget(self) -> None:
        """Drop all that was asked for and not taken."""
        for process in self._processes:
            process.forget()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._processes.clear()

    def _of(self, ticket: int) -> _Process:
        return self._processes[ticket % len(self._processes)]


class _Process:
    """One data process, as the worker sees it."""

    def __init__(self, load: Load, older: list[_Process]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._number = len(older) + 1
        self._asked: dict[int, int] = {}  # the bytes of each request, by ticket
        self._answers: dict[int, Microbatch | shared.Raised] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads of numpy's BLAS, which knows of forks
            self.pid = os.fork()
        if self.pid == 0:
            _become(load, theirs, parent, [self._connection, *(process._connection for process in older)])
        theirs.close()

    @property
    def has_room(self) -> bool:
        return len(self._asked) < _MOST_ASKED and sum(self._asked.values()) < _MOST_ASKED_BYTES

    def ask(self, request: _Request) -> None:
        packet = msgspec.msgpack.encode(request)
        assert len(packet) <= _REQUEST_BYTES, "cells have a few thousand samples"
        self._send(packet)
        self._asked[request.ticket] = len(packet)

    def take(self, ticket: int) -> Microbatch | shared.Raised:
        while ticket not in self._answers:
            self._receive()
        return self._answers.pop(ticket)

    def forget(self) -> None:
        if self._asked:
            self._send(_FORGET)
        self._asked.clear()
        self._answers.clear()

    def kill(self) -> None:
        """End the process; does nothing where it is gone and was waited for."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self._connection.close()

    def _send(self, packet: bytes) -> None:
        try:
            self._connection.send(packet)
        except (BrokenPipeError, ConnectionResetError):
            self._tell_end()

    def _receive(self) -> None:
        try:
            packet, memories, _, _ = socket.recv_fds(self._connection, _ANSWER.size, 1)
        except ConnectionResetError:
            packet, memories = b"", []
        if not packet:
            self._tell_end()
        ticket, end = _ANSWER.unpack(packet)
        answer = shared.mapped(memories[0], end)
        if self._asked.pop(ticket, None) is not None:
            self._answers[ticket] = answer

    def _tell_end(self) -> None:
        pid, self.pid = self.pid, 0
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        raise DataProcessError(
            f"data process {self._number} (pid {pid}), which reads samples, must live as long as its worker, got "
            f"{how}; if memory ran out, lower num_workers or the microbatch, else see the worker's log"
        )


def _runs(samples: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive numbers, each its first and how many they are."""
    runs = (list(run) for _, run in groupby(enumerate(samples), lambda each: each[1] - each[0]))
    return tuple((run[0][1], len(run)) for run in runs)


def _become(load: Load, connection: socket.socket, parent: int, inherited: list[socket.socket]) -> None:
    """Be a data process; never returns."""
    exit_code = 1
    try:
        die_with_parent(parent)
        # the worker decides when training ends, and reads until then
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for each in inherited:
            each.close()
        open_files_anew()  # a data set that keeps a file open seeks and reads in all processes at once
        allow_open_files()  # their number limits that of answers, of all this user's, that are not taken yet
        gc.freeze()  # collections leave the pages alone that are shared with the worker
        torch.set_num_threads(1)
        _serve(load, connection)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _serve(load: Load, connection: socket.socket) -> None:
    """Answer until the worker has closed the connection."""
    asked: deque[_Request] = deque()
    while True:
        try:
            packet = connection.recv(_REQUEST_BYTES, socket.MSG_DONTWAIT if asked else 0)
        except BlockingIOError:
            request = asked.popleft()
            _answer(connection, request.ticket, _read(load, request))
            continue
        if not packet:
            return
        if packet == _FORGET:
            asked.clear()
        else:
            asked.append(_decode(packet))


def _read(load: Load, request: _Request) -> Microbatch | shared.Raised:
    try:
        return load(request.step, request.cell, None if request.reads is None else frozenset(request.reads))
    except Exception as error:
        return shared.Raised(_told_as(error), traceback.format_exc(), place_of(error))


def _told_as(error: Exception) -> Exception:
    """Return the error, or, where another process could not make it again, one with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _answer(connection: socket.socket, ticket: int, read: Microbatch | shared.Raised) -> None:
    memory, end = shared.write(read)
    try:
        while True:
            try:
                socket.send_fds(connection, [_ANSWER.pack(ticket, end)], [memory])
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:  # of all processes of the user; some are taken in a moment
                    raise
                time.sleep(_WAIT_S)
            else:
                return
    finally:
        os.close(memory)
