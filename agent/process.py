"""Starting processes through a forkserver, from asyncio.

Owns the asking end of the forkserver's socket. Used by the launcher (for nodes) and by node agents (for workers).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable

import msgspec

from resilient.common.processes import command_for
from resilient.errors import ResilientError
from resilient.protocol.forkserver import MAX_PACKET_BYTES, Signal, Spawn, Started, decode_reply


class SpawnError(ResilientError):
    """A process could not be started."""


class Spawner:
    """Asks a forkserver for processes.

    Args:
        connection: The socket to the forkserver.
        on_exit: Called with pid and exit code (negative for a signal) of every child that ends.
        on_lost: Called when the forkserver is gone; its children are then gone too.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_exit: Callable[[int, int], None],
        on_lost: Callable[[], None],
        forkserver: subprocess.Popen[bytes] | None = None,
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._forkserver = forkserver
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def spawn(self, request: Spawn) -> int:
        """Start a process and return its pid.

        Raises:
            SpawnError: It could not be forked, or the forkserver is gone.
        """
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        packet = msgspec.json.encode(request)
        if len(packet) > MAX_PACKET_BYTES:
            raise SpawnError(f"arguments and environment must fit {MAX_PACKET_BYTES} bytes, got {len(packet)}")
        self._waiting.append(answer)
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, packet)
        except OSError as error:
            raise SpawnError(f"the forkserver is gone: {error}") from error
        return await answer

    def send_signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a child, if it still runs."""
        self._connection.send(msgspec.json.encode(Signal(pid=pid, number=number)))

    def let_go(self) -> None:
        """Leave the forkserver and its children to themselves: :meth:`close` ends them no more."""
        self._forkserver = None

    async def close(self) -> None:
        """End the forkserver, and its children with it."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._connection.close()
        if self._forkserver is not None:
            self._forkserver.kill()
            self._forkserver.wait()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(self._connection, MAX_PACKET_BYTES):
                reply = decode_reply(packet)
                if not isinstance(reply, Started):
                    self._on_exit(reply.pid, reply.exit_code)
                elif reply.pid:
                    self._waiting.popleft().set_result(reply.pid)
                else:
                    self._waiting.popleft().set_exception(SpawnError(reply.error))
        except OSError:
            pass  # a reset connection is a closed one
        for answer in self._waiting:
            answer.set_exception(SpawnError("the forkserver is gone"))
        self._on_lost()


def start_forkserver(
    script: str,
    *,
    on_exit: Callable[[int, int], None],
    on_lost: Callable[[], None],
    outlives_us: bool,
) -> Spawner:
    """Start a forkserver that is warm for ``script``.

    Args:
        script: The job's script; what it imports is imported once.
        on_exit: See :class:`Spawner`.
        on_lost: See :class:`Spawner`.
        outlives_us: Whether the forkserver leaves this process group and goes on until its children have ended, even
            when this process is killed (the launcher's does: its nodes wait for another coordinator, and Ctrl-C does
            not reach it; a node agent's does not, so that killing the group kills the node).
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = command_for("resilient.protocol.forkserver", "--fd", str(theirs.fileno()))
    command += [] if outlives_us else ["--parent", str(os.getpid())]
    command += ["--preload", script]
    forkserver = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=_forkserver_environment(), start_new_session=outlives_us
    )
    theirs.close()
    return Spawner(ours, on_exit=on_exit, on_lost=on_lost, forkserver=forkserver)


def _forkserver_environment() -> dict[str, str]:
    """No thread pools before the fork, and no CUDA: asking NVML for devices leaves the driver alone.

    Sets of texts are gone through in the same order on all nodes: what a script makes of them is to be the same. The
    job's token is not there: of the first environment, what is forked keeps a copy in ``/proc`` for good.
    """
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    inherited = {name: value for name, value in os.environ.items() if name != "RESILIENT_TOKEN"}
    return {"PYTHONHASHSEED": "0", **inherited, **single, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
