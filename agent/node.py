"""The node agent: one per machine; starts the workers, relays their messages, dies and comes back as one.

Owns the node's processes and its two kinds of connections: one to the coordinator (WebSocket), one from each worker
(Unix-domain socket). Decides nothing about membership. Must not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import psutil

from resilient.agent.attach import StillLedError, end_orphaned_job
from resilient.agent.journal.inheritance import EndedJobError
from resilient.agent.leadership.knocking import ANSWER_HEARTBEATS, Door, session_for
from resilient.agent.leadership.unled_checkpoints import UnledCheckpoints
from resilient.agent.leadership.vigil import OrphanedError, Vigil
from resilient.agent.membership.parts.context import EXIT_RESUMABLE
from resilient.agent.network.conversation import GOODBYE, Conversation, Hello
from resilient.agent.process import Spawner, SpawnError, start_forkserver
from resilient.agent.whereabouts import Whereabouts
from resilient.agent.workers import WorkerPool, what_is_missing
from resilient.common.framing import frame
from resilient.common.printable import log_printably
from resilient.errors import ControlError, ResilientError
from resilient.observability.worker_logs import Screen, WorkerLogs, signed
from resilient.protocol import fault_injection as faults
from resilient.protocol.alike import installed
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    FromAgentMessage,
    FromWorker,
    Health,
    Injection,
    Kill,
    Leaving,
    ShowStacks,
    Shutdown,
    ToAgentMessage,
    ToWorkers,
    Welcome,
    WorkerExited,
    encode,
)
from resilient.protocol.shown_streams import ShownStreams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """How a node takes part.

    Args:
        coordinator: host:port; or the store that knows it, as ``--store`` names it.
        token: The job's token.
        num_workers: Workers to start.
        spawner_fd: Socket of a spawner that is there already; None to start one.
        max_restarts: How often workers killed by a signal are replaced before the node gives up.
        connect_timeout_s: How long to try to reach a coordinator at first, and the node that ends the job at last;
            between, the job says for how long.
        heartbeat_s: Silence after which the connection to the coordinator counts as broken.
        domain: What this machine fails together with (a zone, a rack); "" when it is not known.
        interface: Of this machine, by name or address: where the others reach it. "" for the address at which it
            reaches the coordinator.
        shown: What of the workers' output is shown; by this process, unless it is a launcher's.
    """

    coordinator: str
    token: str
    num_workers: int = 1
    spawner_fd: int | None = None
    max_restarts: int = 3
    connect_timeout_s: float = 60.0
    heartbeat_s: float = 5.0
    domain: str = ""
    interface: str = ""
    shown: ShownStreams = field(default_factory=ShownStreams)


class NodeAgent:
    """Runs one node until it is told to shut down."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._node: int | None = None
        self._key = secrets.token_hex(16)
        self._conversation = _conversation()
        self._spawner: Spawner | None = None
        self._ended: asyncio.Future[int] | None = None
        self._num_restarts = 0
        self._is_leaving = False
        self._pool: WorkerPool | None = None
        self._starting: asyncio.Task[None] | None = None
        self._welcome: Welcome | None = None
        self._door = Door(options.coordinator, options.heartbeat_s)
        self._vigil = Vigil(
            self._door,
            options.coordinator,
            options.heartbeat_s,
            options.connect_timeout_s,
            self._end_job,
            lambda: self._where.link(self._door.address),
        )
        self._checkpoints: UnledCheckpoints | None = None
        self._term = 0
        self._screen: Screen | None = None
        self._where = Whereabouts(options.token, options.interface, options.heartbeat_s)
        self._nodes: set[int] = set()

    async def run(self) -> int:
        """Take part until told to stop; return the exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        options, on_exit = self._options, self._on_worker_exit
        self._pool = WorkerPool(
            options.token, num_workers=options.num_workers, shown=options.shown, send=self._relay, on_exit=on_exit
        )
        await self._pool.listen()
        connecting = loop.create_task(self._stay_connected())
        connecting.add_done_callback(self._on_task_done)
        try:
            return await self._ended
        finally:
            tasks = [connecting] if self._starting is None else [connecting, self._starting]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._vigil.close()  # the others are told to stop, too
            self._where.close()
            await self._pool.close()
            if self._spawner is not None:
                await self._spawner.close()
            if self._screen is not None:
                await self._screen.close()

    def _end(self, exit_code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(exit_code)

    @property
    def _name(self) -> str:
        return "this node" if self._node is None else f"node {self._node}"

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: %s", self._name, error, exc_info=None if isinstance(error, ResilientError) else error)
            self._end(EXIT_RESUMABLE if isinstance(error, OrphanedError) else 1)

    # ------------------------------------------------------------ coordinator

    async def _stay_connected(self) -> None:
        """Connect, and connect again whenever the connection breaks: the workers train on meanwhile."""
        async with session_for(self._options.token) as session:
            while True:
                async with await self._door.knock(session, self._term, self._wait) as connection:
                    if not self._where.take_in(connection):
                        await asyncio.sleep(self._options.heartbeat_s / 4)  # whoever is about to go still opens
                        continue
                    await self._converse(connection)
                    self._where.break_off(connection)

    def _wait(self, waited_s: float, why: object) -> None:
        self._vigil.wait(waited_s, why, self._welcome, self._where.host)

    async def _end_job(self, welcome: Welcome, reason: str) -> None:
        try:
            await end_orphaned_job(welcome.run_directory, self._where.host, self._term, reason)
        except StillLedError as error:  # which goes on without this node
            logger.error("%s: %s; %s", self._name, error, self._where.link(self._door.address))
            self._end(1)
        except EndedJobError as error:
            logger.error("%s: its job is over (%s); %s", self._name, error.reason, self._where.link(self._door.address))
            self._end(error.exit_code or 1)
        except (ResilientError, OSError, ValueError) as error:
            logger.warning("%s: cannot end the job in an orderly way: %s", self._name, error)

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> None:
        """Go on with the conversation over a new connection, or begin one if the coordinator knows of none."""
        reporting: asyncio.Task[None] | None = None
        try:
            await connection.send_bytes(encode(self._hello()))
            attached = await self._where.answer(connection, ANSWER_HEARTBEATS * self._options.heartbeat_s)
            if self._pool is not None:  # peers reach the workers where they reach this node
                self._pool.told = self._where.told
            if attached.term < self._term:
                raise ControlError(f"its term {attached.term} is over; {self._term} has begun")
            self._term = attached.term
            if attached.is_new:
                if self._is_leaving:  # counted as lost by now: nothing is left to announce
                    self._end(1)
                self._conversation = _conversation()
            self._conversation.connect(connection)
            self._note_led(is_led=True)
            reporting = asyncio.create_task(self._report_health(connection))
            await self._conversation.carry(connection, attached.num_heard, self._obey)
        except (msgspec.DecodeError, ControlError) as error:
            logger.warning("node %s: the coordinator is not to be listened to: %s", self._node, error)
            await asyncio.sleep(self._options.heartbeat_s / 4)  # one that was deposed still opens
        except (aiohttp.ClientError, ConnectionError, TypeError, asyncio.TimeoutError) as error:
            logger.info("node %s: the connection broke: %s", self._node, error)
        except asyncio.CancelledError:
            await connection.close(code=GOODBYE)
            raise
        finally:
            self._note_led(is_led=False)
            if reporting is not None:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
        if self._conversation.is_over:
            self._conversation = _conversation()

    def _note_led(self, *, is_led: bool) -> None:
        if self._checkpoints is not None:
            self._checkpoints.note_led(is_led=is_led)

    def _hello(self) -> Hello:
        return Hello(
            host=socket.gethostname(),
            pid=os.getpid(),
            num_workers=self._options.num_workers,
            key=self._key,
            node=self._node,
            num_heard=self._conversation.num_heard,
            domain=self._options.domain,
            alike=installed(),
            is_guest=self._options.spawner_fd is None,
            term=self._term,
            address=self._where.host,
            bell_port=self._where.bell_port,
            is_chosen=self._where.is_chosen,
        )

    async def _report_health(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> None:
        while True:
            health = Health(cpu_percent=psutil.cpu_percent(), memory_bytes=psutil.virtual_memory().used)
            await connection.send_bytes(encode(health))
            self._where.note_said()
            await asyncio.sleep(self._options.heartbeat_s)

    def _relay(self, message: FromWorker) -> None:
        self._send(message)
        if self._checkpoints is not None:
            self._checkpoints.hear(message.local_rank, message.message)

    def _send(self, message: FromAgentMessage) -> None:
        self._conversation.say(encode(message))

    async def _obey(self, message: ToAgentMessage) -> None:
        assert self._pool is not None
        if isinstance(message, ToWorkers):
            self._pool.deliver(message.local_rank, frame(encode(message.message), MAX_MESSAGE_BYTES))
        elif isinstance(message, Welcome):
            self._begin(message)
        elif isinstance(message, Kill):
            self._strike(message.injection)
        elif isinstance(message, ShowStacks):
            self._show_stacks(message.local_rank)
        else:
            self._shut_down(message)

    def _begin(self, welcome: Welcome) -> None:
        """Start the workers, which may take as long as a script's imports: meanwhile the coordinator is heard."""
        assert self._pool is not None
        self._node, self._welcome = welcome.node, welcome
        self._door.run_directory = welcome.run_directory
        self._checkpoints = UnledCheckpoints(welcome.node, welcome.run_directory)
        if error := what_is_missing(welcome):
            self._send(WorkerExited(local_rank=0, exit_code=1, error=error))
            return
        self._nodes.add(welcome.node)
        if self._screen is None and self._options.spawner_fd is None and self._options.shown.has_any:
            self._screen = Screen(WorkerLogs(Path(welcome.run_directory), self._is_shown, None), _show)
        if self._spawner is None:
            self._spawner = self._make_spawner(welcome.script)
        self._pool.kill(self._spawner)
        loop = asyncio.get_running_loop()
        self._starting = loop.create_task(self._start(self._pool, self._spawner, welcome, self._starting))
        self._starting.add_done_callback(self._on_task_done)

    def _is_shown(self, node: int, local_rank: int) -> tuple[bool, bool]:
        return self._options.shown.logs(local_rank) if node in self._nodes else (False, False)

    @staticmethod
    async def _start(pool: WorkerPool, spawner: Spawner, welcome: Welcome, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
            pool.kill(spawner)  # what that has started
        try:
            await pool.start(spawner, welcome)
        except (SpawnError, OSError) as error:
            raise ResilientError(f"cannot start workers: {error}") from error

    def _make_spawner(self, script: str) -> Spawner:
        assert self._pool is not None
        if self._options.spawner_fd is None:
            return start_forkserver(
                script, on_exit=self._pool.on_process_exit, on_lost=lambda: self._end(1), outlives_us=False
            )
        connection = socket.socket(fileno=self._options.spawner_fd)
        return Spawner(connection, on_exit=self._pool.on_process_exit, on_lost=lambda: self._end(1))

    def _shut_down(self, message: Shutdown) -> None:
        logger.info("%s: %s", self._name, message.reason)
        self._end(message.exit_code)

    # ------------------------------------------------------------ failures

    def _show_stacks(self, local_rank: int) -> None:
        assert self._pool is not None
        assert self._spawner is not None
        self._pool.send_signal(self._spawner, local_rank, signal.SIGUSR1)

    def _strike(self, injection: Injection) -> None:
        assert self._pool is not None
        assert self._spawner is not None
        assert self._welcome is not None
        if injection.worker_only and not 0 <= injection.worker < self._options.num_workers:
            return
        with faults.recorded(injection, self._welcome.run_directory, None, None):
            if injection.worker_only:
                self._pool.send_signal(self._spawner, injection.worker, signal.SIGKILL)
            else:
                faults.strike(injection)

    def _on_worker_exit(self, exited: WorkerExited) -> None:
        """Tell the coordinator; after a signal, begin again as a new node."""
        assert self._pool is not None
        assert self._spawner is not None
        self._send(exited)
        if exited.exit_code >= 0:
            return
        self._pool.kill(self._spawner)
        self._num_restarts += 1
        if self._num_restarts > self._options.max_restarts:
            logger.error("node %s: workers were killed %d times", self._node, self._num_restarts)
            self._end(1)
        else:
            self._conversation.end()

    def _on_signal(self, name: str) -> None:
        """Announce the departure; a second signal ends the node at once."""
        if self._is_leaving or self._pool is None or not self._pool.is_running:
            self._end(1)
        self._is_leaving = True
        self._send(Leaving(reason=name))


def _show(node: int, local_rank: int, line: str) -> None:
    sys.stdout.write(f"{signed(node, local_rank, line)}\n")
    sys.stdout.flush()


def _conversation() -> Conversation[ToAgentMessage]:
    return Conversation(ToAgentMessage)


def main(arguments: list[str]) -> int:
    """Run a node agent; the token is read from RESILIENT_TOKEN. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", required=True, metavar="HOST:PORT")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--heartbeat-s", type=float, default=5.0)
    parser.add_argument("--domain", default="")
    parser.add_argument("--interface", default="")
    parser.add_argument("--tee", default="0")
    parser.add_argument("--redirects", default="3")
    parser.add_argument("--local-ranks-filter", default="")
    parser.add_argument("--spawner-fd", type=int)
    parsed = parser.parse_args(arguments)
    log_printably()
    if os.getpgrp() != os.getpid():
        os.setsid()  # killing this process group must kill this node and nothing else
    options = NodeOptions(
        coordinator=parsed.join,
        token=os.environ["RESILIENT_TOKEN"],
        num_workers=parsed.workers,
        spawner_fd=parsed.spawner_fd,
        heartbeat_s=parsed.heartbeat_s,
        domain=parsed.domain,
        interface=parsed.interface,
        shown=ShownStreams(tee=parsed.tee, redirects=parsed.redirects, local_ranks=parsed.local_ranks_filter),
    )
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(NodeAgent(options).run())
    return 1
