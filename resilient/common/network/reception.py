"""Lets those in who show that they know a secret, where everybody who reaches a port may connect.

Strangers have little: few connections at a time, a moment each. Where more come, who has been there longest goes, and
the others wait in the kernel, where they take none of this process's descriptors: a thousand of a job's own processes
may come at once as well. Used by whatever listens beside the coordinator. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable

from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from resilient.common.processes import allow_many_files

_STRANGERS_AT_ONCE = 64
_LEAST_PATIENCE_S = 0.1
"""For so long no stranger has to make room: those of the job need a moment, too, when they come in a crowd."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""A machine that has lost its power hangs up on nobody: after a minute and a half it is taken to be gone."""
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Before one that was hung up on comes again: in a crowd on a busy machine, who knows the secret makes room, too."""
_SCARCE_S = 0.5
_LET_GO_S = 0.1

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Reception:
    """Serves those who know a secret; both ends show that they do, the other one first.

    Args:
        secret: What they have to know.
        caller: The other end's role (:mod:`resilient.common.handshake`).
        own: This end's.
        address: ``host:port`` at which it listens: who listened where this was cannot pass on what is shown there.
        patience_s: For a stranger to show it.
        serve: Called with each connection of one who has; what it raises of ``OSError``, ``EOFError`` and
            ``TimeoutError`` ends that connection alone. It is closed afterwards in any case.
    """

    def __init__(
        self, secret: bytes, *, caller: bytes, own: bytes, address: str, patience_s: float, serve: Serve
    ) -> None:
        self._secret = secret
        self._caller, self._own = caller, own
        self._address = address.encode()
        self._patience_s = patience_s
        self._serve = serve
        self._strangers: dict[asyncio.Task[None], float] = {}  # since when each is there, the oldest first
        self._writers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._fewer = asyncio.Event()

    def start(self, listening: socket.socket) -> asyncio.Task[None]:
        """Serve who connects; when the task is cancelled, listen no more, and hang up on everybody."""
        serving = asyncio.get_running_loop().create_task(self._run(listening))
        serving.add_done_callback(lambda _: listening.close())  # it may be cancelled before it begins
        return serving

    async def _run(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        allow_many_files()
        try:
            while True:
                await self._have_room()
                try:
                    accepted, _ = await loop.sock_accept(listening)
                    _keep_alive(accepted)
                    reader, writer = await asyncio.open_connection(sock=accepted)
                except OSError as error:
                    if error.errno != errno.ECONNABORTED:  # who has gone before is no loss
                        await asyncio.sleep(_SCARCE_S)  # descriptors
                    continue
                task = loop.create_task(self._receive(reader, writer))
                self._strangers[task] = loop.time()
                self._writers[task] = writer
                task.add_done_callback(self._forget)
        finally:
            listening.close()
            while self._writers:  # until Python 3.12, a task may lose a cancellation in `asyncio.wait_for`
                for task in self._writers:
                    task.cancel()
                await asyncio.wait(self._writers, timeout=_LET_GO_S)

    async def _have_room(self) -> None:
        """Wait until another stranger may come; the one that has been there longest goes if it has to."""
        loop = asyncio.get_running_loop()
        while len(self._strangers) >= _STRANGERS_AT_ONCE:
            self._fewer.clear()
            oldest, since = next(iter(self._strangers.items()))
            wait_s = since + _LEAST_PATIENCE_S - loop.time()
            if wait_s <= 0:
                oldest.cancel()
            timer = loop.call_later(max(wait_s, 0.0) or _LEAST_PATIENCE_S, self._fewer.set)
            await self._fewer.wait()
            timer.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._writers.pop(task).transport.abort()  # it is closed by now, unless the task was cancelled before it began
        self._fewer.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "a connection ended", "exception": error})

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._recognise(reader, writer), self._patience_s)
            this = asyncio.current_task()
            assert this is not None
            self._strangers.pop(this, None)
            self._fewer.set()
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # a stranger, or one that is gone
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Show that this end knows the secret once the other has.

        Raises:
            EOFError: It does not.
        """
        ours = nonce()
        writer.write(ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        said = ours, theirs, self._address
        if not is_proof(await reader.readexactly(PROOF_BYTES), self._secret, self._caller, *said):
            raise EOFError
        writer.write(proof(self._secret, self._own, *said))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
