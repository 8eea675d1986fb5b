"""The workers of one node as their agent sees them: processes, connections, exits."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilient.agent.membership.next_generation.members import log_path
from resilient.agent.process import Spawner
from resilient.common.framing import HEADER_BYTES, frame_size
from resilient.common.handshake import secret_for
from resilient.errors import ControlError
from resilient.protocol.agent_client import decode_attach, socket_address, user_at_other_end
from resilient.protocol.forkserver import Spawn
from resilient.protocol.messages import MAX_MESSAGE_BYTES, FromWorker, Welcome, WorkerExited, decode_from_worker
from resilient.protocol.shown_streams import STDERR, STDOUT, ShownStreams
from resilient.templates.plan import degree_text

logger = logging.getLogger(__name__)


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorFile(msgspec.Struct):
    message: _ErrorText


@dataclass(frozen=True, kw_only=True)
class WorkersPlace:
    """Where workers are.

    Args:
        host: Address of this machine, where others reach them.
        ports: The range that they listen in, "" for any port.
        coordinator: Address of the coordinator's machine.
    """

    host: str = "127.0.0.1"
    ports: str = ""
    coordinator: str = "127.0.0.1"


class WorkerPool:
    """Starts the workers, serves their socket, and turns away those of earlier incarnations.

    Args:
        job_token: Of which workers are given what they know those of other nodes by.
        num_workers: Workers of the node.
        shown: What is shown of them: where that is one of a worker's streams, stdout has a log of its own.
        send: Called with every message of a worker.
        on_exit: Called when a worker process of the present incarnation ends.
    """

    def __init__(
        self,
        job_token: str,
        *,
        num_workers: int,
        shown: ShownStreams | None = None,
        send: Callable[[FromWorker], None],
        on_exit: Callable[[WorkerExited], None],
    ) -> None:
        self._socket_name = f"resilient-{secrets.token_hex(8)}"
        self._token = secrets.token_hex(16)  # of the present incarnation's workers alone
        self._num_workers = num_workers
        self._shown = shown or ShownStreams()
        self._secret = secret_for(job_token, "workers")
        self._send = send
        self._on_exit = on_exit
        self.told = WorkersPlace()
        self._incarnation = 0
        self._pids: dict[int, int] = {}  # pid -> local rank
        self._early_exits: dict[int, int] = {}
        self._logs = Path()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._has_refused = False

    @property
    def is_running(self) -> bool:
        """Whether there are workers; one may speak before the spawner has said that it was started."""
        return bool(self._pids or self._writers)

    async def listen(self) -> None:
        """Begin to serve the socket."""
        self._server = await asyncio.start_unix_server(self._serve, socket_address(self._socket_name))

    async def close(self) -> None:
        """Stop serving; workers that are still connected die of it."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def start(self, spawner: Spawner, welcome: Welcome) -> None:
        """Start one process for each local rank.

        Raises:
            SpawnError: A process could not be started.
        """
        self._early_exits.clear()
        self._logs = Path(welcome.run_directory) / "logs" / f"node-{welcome.node}"
        self._logs.mkdir(0o700, parents=True, exist_ok=True)
        for local_rank in range(self._num_workers):
            log = log_path(welcome.run_directory, (welcome.node, local_rank))
            is_apart = self._shown.of(local_rank) in (STDOUT, STDERR)
            pid = await spawner.spawn(
                Spawn(
                    kind="worker",
                    argv=(welcome.script, *welcome.arguments),
                    env=self._environment(welcome, local_rank),
                    directory=welcome.directory,
                    log=str(log),
                    stdout_log=str(log.with_suffix(".stdout.log")) if is_apart else "",
                )
            )
            self._pids[pid] = local_rank
        for pid, exit_code in list(self._early_exits.items()):
            self.on_process_exit(pid, exit_code)

    def kill(self, spawner: Spawner) -> None:
        """Kill all workers and ignore whatever still comes from them."""
        self._incarnation += 1
        self._token = secrets.token_hex(16)
        for pid in self._pids:
            spawner.send_signal(pid, signal.SIGKILL)
        self._pids.clear()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def send_signal(self, spawner: Spawner, local_rank: int, number: signal.Signals) -> None:
        """Send a signal to one worker."""
        for pid, rank in self._pids.items():
            if rank == local_rank:
                spawner.send_signal(pid, number)

    def deliver(self, local_rank: int | None, data: bytes) -> None:
        """Send a frame to one worker, or to all."""
        ranks = list(self._writers) if local_rank is None else [local_rank]
        for rank in ranks:
            if (writer := self._writers.get(rank)) is not None:
                writer.write(data)

    def on_process_exit(self, pid: int, exit_code: int) -> None:
        """Take note of a process's end; processes of earlier incarnations do not matter."""
        local_rank = self._pids.pop(pid, None)
        if local_rank is None:
            self._early_exits[pid] = exit_code
            return
        error = self._error_of(local_rank) if exit_code > 0 else ""
        self._on_exit(WorkerExited(local_rank=local_rank, exit_code=exit_code, error=error))

    def _environment(self, welcome: Welcome, local_rank: int) -> dict[str, str]:
        """The names torchrun's users know, and what the worker's client needs."""
        num_workers = self._num_workers
        error_file = self._error_file(local_rank)
        error_file.unlink(missing_ok=True)
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # of what it starts itself; its own is that of its forkserver
            **os.environ,
            "RANK": str(welcome.node * num_workers + local_rank),
            "WORLD_SIZE": str(max(welcome.num_nodes, welcome.node + 1) * num_workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "GROUP_RANK": str(welcome.node),
            "MASTER_ADDR": self.told.coordinator,
            "TORCHELASTIC_RUN_ID": Path(welcome.run_directory).name,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "RESILIENT_AGENT": self._socket_name,
            "RESILIENT_HOST": self.told.host,
            "RESILIENT_PORT_RANGE": self.told.ports,
            "RESILIENT_TOKEN": self._token,
            "RESILIENT_SECRET": self._secret.hex(),
            "RESILIENT_NODE": str(welcome.node),
            "RESILIENT_RUN_DIR": welcome.run_directory,
            "RESILIENT_TRACE": welcome.trace,
            "RESILIENT_PLANNER": welcome.planner,
            "RESILIENT_SCHEDULE": welcome.schedule,
            "RESILIENT_TP_CHUNKS": str(welcome.tp_chunks),
            "RESILIENT_NETWORK": msgspec.json.encode(welcome.network).decode(),
            "RESILIENT_TP": degree_text(welcome.tp_degree),
            "RESILIENT_SHARD": welcome.sharding.value,
            "RESILIENT_PLANNED": "1" if welcome.is_planned else "",
        }

    def _error_file(self, local_rank: int) -> Path:
        return self._logs / f"worker-{local_rank}.error.json"

    def _error_of(self, local_rank: int) -> str:
        """Return what a worker died of, and where it says more."""
        try:
            text = msgspec.json.decode(self._error_file(local_rank).read_bytes(), type=_ErrorFile).message.message
        except (OSError, msgspec.DecodeError):
            return ""
        return f"{text} (the traceback is in {self._logs / f'worker-{local_rank}.log'})"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one worker's connection."""
        incarnation = self._incarnation
        local_rank: int | None = None
        try:
            if (user := user_at_other_end(writer.get_extra_info("socket"))) != os.geteuid():
                self._refuse(user)
                return
            attach = decode_attach(await _read_frame(reader))
            known = hmac.compare_digest(attach.token, self._token) and 0 <= attach.local_rank < self._num_workers
            if not known or attach.local_rank in self._writers:
                raise ControlError("a worker must be one that was not killed, with a local rank of its own")
            local_rank = attach.local_rank
            self._writers[local_rank] = writer
            while True:
                message = decode_from_worker(await _read_frame(reader))
                if incarnation != self._incarnation:
                    return
                self._send(FromWorker(local_rank=local_rank, message=message))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process's end is reported by the spawner
        except (ControlError, msgspec.DecodeError) as error:
            logger.warning("closed a worker's connection: %s", error)
        finally:
            if local_rank is not None and self._writers.get(local_rank) is writer:
                del self._writers[local_rank]
            writer.close()

    def _refuse(self, user: int) -> None:
        """Tell of it once: others may come as often as they like."""
        if not self._has_refused:
            logger.warning("closed a connection of user %d: a worker must be of the agent's own user", user)
        self._has_refused = True


def what_is_missing(welcome: Welcome) -> str:
    """Say what of the job this machine lacks; "" when nothing."""
    if not os.path.isfile(welcome.script):
        missing = f"the script must be at the same path on every node, got no file {welcome.script}"
    elif not os.path.isdir(welcome.directory):
        missing = f"the working folder must be at the same path on every node, got no folder {welcome.directory}"
    else:
        return ""
    return f"{missing} on {socket.gethostname()}; copy it there"


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(frame_size(await reader.readexactly(HEADER_BYTES), MAX_MESSAGE_BYTES))
