"""One machine, several nodes: the embedded coordinator and a session of its own for each simulated node.

``launch`` is what ``resilient run`` does; tests and the demo use it as a library.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient.agent.attach import listen_where_it_was, succeed, succeed_without_store
from resilient.agent.coordinator import Coordinator
from resilient.agent.job_control import JobControl
from resilient.agent.journal.term import DeposedError, Term, newest_term
from resilient.agent.launch_options import LaunchOptions
from resilient.agent.leadership.audience import UnheardError
from resilient.agent.leadership.leased_term import LeasedTerm, lease_s
from resilient.agent.membership.parts.context import EXIT_FAILED, Settings
from resilient.agent.network.addresses import check_host
from resilient.agent.nodes_screen import NodesScreen
from resilient.agent.process import Spawner, start_forkserver
from resilient.common.network.etcd_connection import EtcdUnreachableError
from resilient.errors import ArgumentError
from resilient.protocol.forkserver import Spawn
from resilient.state.manifest import read_resumed, resumed_folder
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.devices import network
from resilient.templates.plan import Sharding, tensor_degree

logger = logging.getLogger(__name__)

_LINGER_S = 5.0


class Launcher(JobControl):
    """Runs one job. Call :meth:`run` from the main thread: the processes die with the thread that began them."""

    def __init__(self, options: LaunchOptions) -> None:
        super().__init__(Path(options.run_directory).resolve())
        self._options = options
        self._token = options.token or secrets.token_hex(16)
        self._spawner: Spawner | None = None
        self._nodes: set[int] = set()
        self._screen: NodesScreen | None = None
        self._num_started = self._num_told = 0
        self._nodes_gone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add_node(self) -> None:
        """Start another node, which joins the job; any thread may call this while the job runs."""
        self._call(self._start_node_soon)

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(check_host, self._options.host)
        settings = self._settings()
        self._make_folder()
        try:
            term = await self._first_term(settings)
        except BaseException:
            self._drop_empty_folder()
            raise
        coordinator = self._coordinator = Coordinator(settings, self._token, self._tell, term)
        spawner: Spawner | None = None
        self._screen = NodesScreen(self._run_directory, self._options.shown, self._on_event)
        try:
            await self._listen(coordinator, self._options.host, self._options.port)
            spawner = self._spawner = start_forkserver(
                settings.script, on_exit=self._on_exit, on_lost=self._on_forkserver_lost, outlives_us=True
            )
            for _ in range(self._options.num_nodes if self._options.local_nodes else 0):
                self._start_node_soon()
            exit_code = await self._lead()
            if self._nodes:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._nodes_gone.wait(), _LINGER_S)
            return exit_code
        except DeposedError:
            if spawner is not None:  # its nodes are another coordinator's by now
                spawner.let_go()
            raise
        finally:
            for task in self._tasks:  # they may wait for a forkserver that hangs in an import
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._coordinator.close()
            if spawner is not None:
                await spawner.close()
            await self._screen.close()

    async def _first_term(self, settings: Settings) -> Term:
        if not settings.store:
            return Term.claim(self._run_directory)
        term = await LeasedTerm.win(settings.store, self._run_directory, settings.heartbeat_s)
        if term is None:
            fix = "give a prefix of its own, or wait until the lease of the job before is over"
            raise ArgumentError("store", "have a prefix where nobody leads a job", repr(settings.store), fix)
        return term

    async def _lead(self) -> int:
        """Serve until the job is over. A term that ends for want of the store is followed by another, if possible."""
        assert self._coordinator is not None
        while True:
            wait_s = 0.0
            try:
                return await self._coordinator.wait()
            except DeposedError as error:
                if not self._options.store:
                    raise
                logger.warning("%s", error)
                if isinstance(error, UnheardError):  # nodes that hear each other are of more use to the job
                    wait_s = lease_s(self._options.heartbeat_s)
            await self._coordinator.close()
            await asyncio.sleep(wait_s)
            self._coordinator = await self._succeed_itself(self._coordinator.term)
            await listen_where_it_was(self._coordinator, self._options.host, self._options.port)
            if self._is_signalled and not self._coordinator.is_ending:  # nobody was there to hear it
                self.interrupt("asked to stop")

    async def _succeed_itself(self, term: int) -> Coordinator:
        known = iter(range(self._num_told))

        def on_event(event: dict[str, Any]) -> None:
            if next(known, None) is None:
                self._tell(event)

        give_up_at = time.monotonic() + self._options.orphan_s + _LINGER_S
        why = ""
        while (newest := newest_term(self._run_directory)) == term:
            try:
                coordinator = await succeed(self._run_directory, on_event)
                if coordinator is not None:
                    return coordinator
                why = ""
            except EtcdUnreachableError as error:
                if self._is_signalled:  # to end the job takes no store, as when its nodes do
                    return await succeed_without_store(self._run_directory, on_event, term)
                if time.monotonic() > give_up_at:  # the nodes have not ended the job for want of it, so there are none
                    raise
                why = f"; this one has not led it since, for want of etcd: {error}"
            await asyncio.sleep(self._options.heartbeat_s / 4)
        raise DeposedError(
            f"another coordinator has taken this job over (term {newest} in {self._run_directory}/term, this one's was "
            f"{term}); follow it with: resilient status --run {self._run_directory}{why}"
        )

    def _tell(self, event: dict[str, Any]) -> None:
        self._num_told += 1
        if event["kind"] == "node_refused" and not event["is_guest"] and not event["generation"]:
            self.stop(EXIT_FAILED, event["reason"])  # the job would wait for it
        if self._screen is None or not self._screen.shows(event):
            self._on_event(event)

    def _make_folder(self) -> None:
        if (self._run_directory / "events.jsonl").exists():
            held = f"{self._run_directory}, which holds another run"
            raise ArgumentError("run_directory", "be new", held, "give another")
        try:
            self._run_directory.mkdir(0o700, parents=True, exist_ok=True)
            (self._run_directory / "logs").mkdir(0o700, exist_ok=True)
        except OSError as error:
            got = f"{self._run_directory} ({error.strerror})"
            raise ArgumentError("run_directory", "be a folder that can be written", got, "give another") from error

    def _drop_empty_folder(self) -> None:
        for folder in (self._run_directory / "logs", self._run_directory):
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()

    def _settings(self) -> Settings:
        options = self._options
        resume = None
        if options.resume is not None:
            path = resumed_folder(options.resume).resolve()
            resume = (str(path), read_resumed(path))
        return Settings(
            script=str(Path(options.script).resolve()),
            arguments=options.arguments,
            directory=os.getcwd(),
            run_directory=str(self._run_directory),
            num_nodes=options.num_nodes,
            most_nodes=options.most_nodes,
            has_own_nodes=options.local_nodes,
            options=options.repeated(),
            workers_per_node=options.workers_per_node,
            resume=resume,
            network=Link() if options.network_gbit_s is None else network(options.network_gbit_s),
            failure_interval_s=options.failure_interval_s,
            sharding=Sharding(options.shard),
            tp_degree=tensor_degree(options.tp),
            injections=options.injections,
            heartbeat_s=options.heartbeat_s,
            orphan_s=options.orphan_s,
            grace_s=options.grace_s,
            wait_for_nodes_s=options.wait_for_nodes_s,
            trace=options.trace_steps,
            planner=options.planner,
            schedule=options.schedule,
            tp_chunks=options.tp_chunks or 0,
            allow_different=options.allow_different,
            validate=options.validate,
            store=options.store,
            port_range=options.port_range,
        )

    def _start_node_soon(self) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._start_node())
        self._tasks.add(task)
        task.add_done_callback(self._on_node_started)

    def _on_node_started(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("cannot start a node: %s", error)
            if self._num_started <= self._options.num_nodes:  # the job would wait for it
                self.stop(EXIT_FAILED, f"cannot start a node: {error}")

    async def _start_node(self) -> None:
        assert self._coordinator is not None
        assert self._spawner is not None
        options = self._options
        argv = ["resilient.agent.node", "--join", self._coordinator.address]
        argv += ["--workers", str(options.workers_per_node), "--heartbeat-s", str(options.heartbeat_s)]
        argv += options.shown.options
        if options.domains:
            argv += ["--domain", options.domains[self._num_started % len(options.domains)]]
        self._num_started += 1
        pid = await self._spawner.spawn(
            Spawn(
                kind="node",
                argv=tuple(argv),
                env={**os.environ, **options.environment, "RESILIENT_TOKEN": self._token},
                directory=os.getcwd(),
                log=str(self._run_directory / "logs" / "agents.log"),
            )
        )
        self._nodes.add(pid)
        if self._screen is not None:
            self._screen.take_in(pid)
        self._nodes_gone.clear()

    def _on_exit(self, pid: int, exit_code: int) -> None:
        assert self._coordinator is not None
        self._coordinator.note_agent_ended(pid)
        self._nodes.discard(pid)
        if not self._nodes:
            self._nodes_gone.set()
            # The machine hears of losses by itself; this is for agents that never got as far as to connect.
            self._call(self._stop_without_nodes)

    def _stop_without_nodes(self) -> None:
        assert self._loop is not None
        self._loop.call_later(1.0, self._stop_if_alone)

    def _stop_if_alone(self) -> None:
        assert self._coordinator is not None
        if not self._coordinator.has_nodes and not self._nodes:
            self.stop(EXIT_FAILED, f"all node agents have ended; see {self._run_directory}/logs")

    def _on_forkserver_lost(self) -> None:
        self._nodes.clear()
        self._nodes_gone.set()
        self.stop(EXIT_FAILED, "the process that starts the nodes is gone")


def launch(options: LaunchOptions, *callbacks: Callable[[dict[str, Any]], None]) -> int:
    """Run a job, giving its events to the callbacks; return the exit code (see :meth:`Launcher.run`)."""
    launcher = Launcher(options)
    for callback in callbacks:
        launcher.subscribe(callback)
    return launcher.run()
