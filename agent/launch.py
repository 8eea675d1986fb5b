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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from resilient.agent.addresses import check_host
from resilient.agent.attach import listen_where_it_was, succeed
from resilient.agent.coordinator import Coordinator
from resilient.agent.job_control import JobControl
from resilient.agent.journal.term import DeposedError, Term, newest_term
from resilient.agent.leadership.leader_store import check_store
from resilient.agent.leadership.leased_term import LeasedTerm
from resilient.agent.membership.parts.context import EXIT_FAILED, Settings
from resilient.agent.process import Spawner, start_forkserver
from resilient.common.etcd_connection import EtcdUnreachableError
from resilient.errors import ArgumentError
from resilient.observability.step_trace import parse_steps
from resilient.protocol.alike import ALLOWABLE
from resilient.protocol.forkserver import Spawn
from resilient.protocol.messages import Injection
from resilient.state.manifest import read_resumed, resumed_folder
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.devices import network

logger = logging.getLogger(__name__)

_LINGER_S = 5.0
_LEAST_TOKEN = 16
_REPEATED = (
    "workers_per_node",
    "host",
    "port",
    "network_gbit_s",
    "failure_interval_s",
    "heartbeat_s",
    "orphan_s",
    "grace_s",
    "wait_for_nodes_s",
    "allow_different",
    "planner",
    "store",
)
"""Options that a job keeps when it is resumed, as they are; a test asks of each new one whether it is such."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to run.

    Args:
        script: The job's script.
        arguments: The script's own arguments.
        num_nodes: Simulated nodes to start.
        most_nodes: Nodes that train at once, however many join: others stand by. None for all.
        local_nodes: Start the nodes here; False for a coordinator alone, which waits for agents of other machines.
        workers_per_node: Workers of each.
        run_directory: Folder of the run; made if it is not there.
        resume: Checkpoint folder to begin from, or folder of a run for its newest sound one.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        network_gbit_s: Between two nodes, for each worker; None where it is too fast to matter.
        failure_interval_s: Expected time between two failures, over which a reconfiguration must pay.
        heartbeat_s: Silence after which a connection to a node counts as broken.
        orphan_s: How long nodes train on without a coordinator, and it waits for all of them when none is heard of.
        grace_s: From the first SIGINT, SIGTERM or SIGHUP to the end; a checkpoint is written meanwhile.
        wait_for_nodes_s: How long a job of which too few nodes are left waits for others to connect, before it stops
            with a checkpoint; 0 for not at all.
        injections: Failures to cause.
        domains: What the simulated nodes fail together with (zones, racks), in turn; empty for each by itself.
        trace_steps: Steps of which workers write down when they did what, as in "10" or "10-12"; "" for none.
        planner: What places the samples of units, instead of what the script asks for; "" for that.
        allow_different: What may differ between nodes: of :data:`resilient.protocol.alike.ALLOWABLE`.
        validate: Check after everything that happens that the membership is consistent; a job of a thousand nodes
            feels it.
        store: etcd and a prefix, ``etcd://HOST[:PORT],.../PREFIX[?ca=FILE&certificate=FILE&key=FILE]``: when the
            coordinator is gone, one of the nodes is elected there to lead the job; "" for none.
        token: That agents have to show; "" for one that nobody can guess, left in the run's ``job.json``.
        environment: Further environment variables for nodes and workers.
    """

    script: str
    arguments: tuple[str, ...] = ()
    num_nodes: int = 1
    most_nodes: int | None = None
    local_nodes: bool = True
    workers_per_node: int = 1
    run_directory: str
    resume: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    network_gbit_s: float | None = None
    failure_interval_s: float = 3600.0
    heartbeat_s: float = 5.0
    orphan_s: float = 600.0
    grace_s: float = 120.0
    wait_for_nodes_s: float = 10.0
    injections: tuple[Injection, ...] = ()
    domains: tuple[str, ...] = ()
    trace_steps: str = ""
    planner: str = ""
    allow_different: tuple[str, ...] = ()
    validate: bool = False
    store: str = ""
    token: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name in ("num_nodes", "workers_per_node"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, "be >= 1", getattr(self, name), "a job has one at least")
        if self.most_nodes is not None and self.most_nodes < self.num_nodes:
            raise ArgumentError("most_nodes", f"be >= {self.num_nodes}, the least", self.most_nodes, "give it no less")
        if self.host in ("0.0.0.0", "::"):
            raise ArgumentError(
                "host",
                "be the address by which the job's machines reach this one",
                repr(self.host),
                "give one of this machine's own addresses",
            )
        if self.token and len(self.token) < _LEAST_TOKEN:
            given = f"one of {len(self.token)} characters"
            raise ArgumentError("token", f"be {_LEAST_TOKEN} characters or more", given, "give a random one")
        if not Path(self.script).is_file():
            raise ArgumentError("script", "be a file", repr(self.script), "give the path of the job's script")
        for name in ("network_gbit_s", "failure_interval_s", "heartbeat_s", "orphan_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(name, "be > 0", f"{value:g}", "leave it out for the default")
        if not self.wait_for_nodes_s >= 0:
            fix = "give 0 for not waiting at all"
            raise ArgumentError("wait_for_nodes_s", "be >= 0", f"{self.wait_for_nodes_s:g}", fix)
        parse_steps(self.trace_steps)
        if self.store:
            check_store(self.store)
        for kind in self.allow_different:
            if kind not in ALLOWABLE:
                fix = "what else differs trains another job"
                raise ArgumentError("allow_different", f"be one of {', '.join(ALLOWABLE)}", repr(kind), fix)

    def repeated(self) -> tuple[str, ...]:
        """Return the options of ``resilient run`` that start the job again as it was, but for nodes and checkpoint."""
        words: list[str] = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in _REPEATED and value != option.default:
                for each in value if isinstance(value, tuple) else (value,):
                    words += [f"--{_dashed(option.name)}", f"{each:g}" if isinstance(each, float) else str(each)]
        words += [] if self.local_nodes else ["--no-local-nodes"]
        return (*words, "--domains", ",".join(self.domains)) if self.domains else tuple(words)


class Launcher(JobControl):
    """Runs one job. Call :meth:`run` from the main thread: the processes die with the thread that began them."""

    def __init__(self, options: LaunchOptions) -> None:
        super().__init__(Path(options.run_directory).resolve())
        self._options = options
        self._token = options.token or secrets.token_hex(16)
        self._spawner: Spawner | None = None
        self._nodes: set[int] = set()
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
        term = await self._first_term(settings)
        coordinator = self._coordinator = Coordinator(settings, self._token, self._tell, term)
        spawner: Spawner | None = None
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
            try:
                return await self._coordinator.wait()
            except DeposedError as error:
                if not self._options.store:
                    raise
                logger.warning("%s", error)
            await self._coordinator.close()
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
        while (newest := newest_term(self._run_directory)) == term:
            try:
                coordinator = await succeed(self._run_directory, on_event)
                if coordinator is not None:
                    return coordinator
            except EtcdUnreachableError:
                if time.monotonic() > give_up_at:  # the nodes have not ended the job for want of it, so there are none
                    raise
            await asyncio.sleep(self._options.heartbeat_s / 4)
        raise DeposedError(
            f"another coordinator has taken this job over (term {newest} in {self._run_directory}/term, this one's was "
            f"{term}); follow it with: resilient status --run {self._run_directory}"
        )

    def _tell(self, event: dict[str, Any]) -> None:
        self._num_told += 1
        self._on_event(event)

    def _make_folder(self) -> None:
        if (self._run_directory / "events.jsonl").exists():
            held = f"{self._run_directory}, which holds another run"
            raise ArgumentError("run_directory", "be new", held, "give another")
        try:
            self._run_directory.mkdir(0o700, parents=True, exist_ok=True)
            (self._run_directory / "logs").mkdir(exist_ok=True)
        except OSError as error:
            got = f"{self._run_directory} ({error.strerror})"
            raise ArgumentError("run_directory", "be a folder that can be written", got, "give another") from error

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
            injections=options.injections,
            heartbeat_s=options.heartbeat_s,
            orphan_s=options.orphan_s,
            grace_s=options.grace_s,
            wait_for_nodes_s=options.wait_for_nodes_s,
            trace=options.trace_steps,
            planner=options.planner,
            allow_different=options.allow_different,
            validate=options.validate,
            store=options.store,
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


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def launch(options: LaunchOptions, *callbacks: Callable[[dict[str, Any]], None]) -> int:
    """Run a job, giving its events to the callbacks; return the exit code (see :meth:`Launcher.run`)."""
    launcher = Launcher(options)
    for callback in callbacks:
        launcher.subscribe(callback)
    return launcher.run()
