"""The coordinator: sockets, files and time around the membership machine.

One port, with TLS: ``GET /agent`` (WebSocket, node agents), ``POST /inject``, ``/leave`` and ``/stop``, ``GET
/status`` and ``/metrics`` (Prometheus), all with the job's token; ``GET /healthz`` without. Holds no training state and
decides nothing: see :mod:`resilient.agent.membership.machine`. Plans are prepared in a thread, so that the event loop
never waits for them. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from resilient.agent.agents import Agents
from resilient.agent.entrance import Entrance, check_live, read_body
from resilient.agent.journal.event_writer import EventWriter
from resilient.agent.journal.inheritance import EndedJobError, inherit
from resilient.agent.journal.stimulus_log import StimulusLog, heard_counts, read_stimuli
from resilient.agent.journal.term import DeposedError, Term
from resilient.agent.leadership.audience import UnheardError
from resilient.agent.leadership.office import Office, write_office
from resilient.agent.membership.machine import Membership, MembershipError
from resilient.agent.membership.parts import events as ev
from resilient.agent.membership.parts.context import EXIT_FAILED, Phase, Settings
from resilient.agent.network.patience import successor_grace_s
from resilient.common.job_certificate import server_context
from resilient.common.memory import Sweeper
from resilient.errors import ArgumentError, CheckpointError
from resilient.observability.metrics import CONTENT_TYPE
from resilient.protocol.messages import Departure, Injection, Shutdown
from resilient.protocol.phases import check_phase
from resilient.state.manifest import write_manifest
from resilient.templates.replan.replan import warm_up
from resilient.templates.replan.schedule_choice import choose_and_prepare

logger = logging.getLogger(__name__)

_FAREWELL_TIMEOUT_S = 10.0
_TICK_S = 0.25
_SWEEP_S = 60.0
_BUSY = (Phase.AGREEING, Phase.INSTALLING, Phase.SAVING)
_HEALTH = "/healthz"
_MAX_BODY_BYTES = 1 << 20


class Coordinator:
    """Serves one job.

    Args:
        settings: The job.
        token: What everybody must present.
        on_event: Called with each event of the log, in the event loop; see ``events.jsonl``.
        term: This coordinator's, which it closes.
        follows: There was another one, whose log is there: :meth:`inherit` it before :meth:`start`.
    """

    def __init__(
        self,
        settings: Settings,
        token: str,
        on_event: Callable[[dict[str, Any]], None],
        term: Term,
        *,
        follows: bool = False,
    ) -> None:
        self.address = ""
        self._settings = settings
        self._token = token
        self._follows = follows
        self._machine = Membership(settings)
        self._term = term
        self._told = Path(settings.run_directory) / "stimuli.jsonl"
        self._stimuli = StimulusLog(self._told, None if follows else settings, term.in_office)
        loop = asyncio.get_running_loop()
        self._events = EventWriter(
            settings, on_event, lambda: self._machine.generation, lambda: loop.call_soon(self._settle)
        )
        self._agents = Agents(
            settings, token, self._machine, self.feed, keep=self._keep, note=self._events.note, term=term.number
        )
        self._unanswered: list[ev.WriteManifest | ev.PreparePlans] = []
        self._clock_ahead_s = 0.0
        self._queue: deque[ev.Stimulus] = deque()
        self._sweeper = Sweeper(_SWEEP_S)
        self._is_pumping = self._is_deposed = False
        self._stopped: asyncio.Future[int] = loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._entrance: Entrance | None = None

    @property
    def term(self) -> int:
        """Its number among the job's coordinators."""
        return self._term.number

    @property
    def has_nodes(self) -> bool:
        """Whether any agent is connected, or may be back."""
        return bool(self._agents.nodes)

    def note_agent_ended(self, pid: int) -> None:
        """Take in that an agent's process on this machine has ended."""
        self._agents.note_ended(pid)

    @property
    def is_ending(self) -> bool:
        """Whether the job is to end before its last step."""
        return self._machine.is_ending

    # ------------------------------------------------------------ life

    async def inherit(self) -> None:
        """Take up the job where the coordinator before left it; its agents are expected back.

        Raises:
            OSError: What it has left cannot be read.
            ValueError: It is not what a coordinator leaves.
            EndedJobError: It is of a job that has ended.
        """
        self._agents.inherit(heard_counts(self._told))
        _, told = read_stimuli(self._told)
        # in a thread, for it takes long, and a lease is kept meanwhile
        inherited = await asyncio.to_thread(inherit, self._machine, told, self._agents)
        if inherited.ended is not None:
            raise EndedJobError(self._told.parent, inherited.ended)
        self._clock_ahead_s = inherited.at - time.monotonic()
        self._unanswered = inherited.unanswered
        self._events.inherit(inherited.records)
        self._agents.wait_for_all(successor_grace_s(self._settings.heartbeat_s))

    async def start(self, host: str, port: int) -> None:
        """Listen, and leave the address where nodes, and other commands on this machine, look for it.

        Raises:
            OSError: Somebody else listens there, or it is no address of this machine.
            DeposedError: Another coordinator has taken the job over.
        """
        app = web.Application(middlewares=[self._authenticate], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/agent", self._agents.serve),
                web.post("/inject", self._serve_inject),
                web.post("/leave", self._serve_leave),
                web.post("/stop", self._serve_stop),
                web.get("/status", self._serve_status),
                web.get("/metrics", self._serve_metrics),
                web.get(_HEALTH, self._serve_health),
            ]
        )
        entrance = Entrance(app, server_context(self._token))
        bound_host, bound_port = await entrance.open(host, port, self._settings.port_range)
        self._entrance = entrance
        self.address = f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"
        with self._term.in_office():
            store, number = self._settings.store, self._term.number
            office = Office(address=self.address, token=self._token, pid=os.getpid(), term=number, store=store)
            write_office(self._settings.run_directory, office)
            if self._follows:
                self._events.note("took_over", {"term": self._term.number, "address": self.address})
        for instruction in self._unanswered:
            self._do(instruction)
        if not ipaddress.ip_address(bound_host).is_loopback:
            self._events.note("listening", {"address": self.address})
        self._spawn(self._tick())
        self._spawn(asyncio.to_thread(warm_up))  # while the workers start, which takes as long
        await self._term.announce(self.address)

    async def wait(self) -> int:
        """Serve until the job is over; return its exit code.

        Raises:
            DeposedError: Another coordinator has taken the job over, which goes on.
        """
        exit_code = await asyncio.shield(self._stopped)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._agents.all_gone(), _FAREWELL_TIMEOUT_S)
        self._events.conclude()
        return exit_code

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._agents.close()
        self._sweeper.close()
        if self._entrance is not None:
            await self._entrance.close()
        self._settle()
        self._term.close()

    def feed(self, event: ev.Stimulus) -> None:
        """Give the machine an event and do what it says. Events that this causes come after it."""
        if self._is_deposed:
            return
        self._queue.append(event)
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._queue:
                self._handle(self._queue.popleft())
        except DeposedError as error:
            self._step_down(error)
        except Exception as error:  # an error of ours must end the job, too, and not leave it waiting
            logger.exception("the coordinator failed")
            self._queue.clear()
            reason = error.reason if isinstance(error, MembershipError) else repr(error)
            self._fail(f"the coordinator failed: {reason}")
        finally:
            self._is_pumping = False

    def _handle(self, event: ev.Stimulus) -> None:
        now = time.monotonic() + self._clock_ahead_s
        node: int | None = getattr(event, "node", None)
        self._stimuli.write(event, now, None if node is None else (node, self._agents.num_heard(node)))
        if isinstance(event, ev.FailureWanted):
            self._events.want(event.injection)
        instructions = self._machine.handle(event, now)
        if self._settings.validate:
            self._machine.validate()
        is_tick = isinstance(event, ev.Tick)
        if is_tick:
            with self._term.in_office():  # who has nothing to write finds out, too
                self._term.show_life()
        if is_tick and not instructions and self._machine.phase is not Phase.STARTING:
            self._stimuli.drop_last()  # of time that passes, the machine remembers nothing but the start
        if is_tick or not all(isinstance(instruction, ev.Record) for instruction in instructions):
            self._stimuli.flush()
        for instruction in instructions:
            self._do(instruction)

    def _keep(self) -> None:
        """Have nothing that was heard get lost.

        Raises:
            ConnectionError: Another coordinator has heard the rest.
        """
        if self._is_deposed:  # of what came since, nothing is in the log, not even what was heard
            raise ConnectionError
        try:
            self._stimuli.flush()
        except DeposedError as error:
            self._step_down(error)
            raise ConnectionError from error

    def _settle(self) -> None:
        """Write what was heard, then what was recorded of it."""
        with contextlib.suppress(ConnectionError):
            self._keep()
            self._events.flush()

    def resign(self, why: DeposedError) -> None:
        """Decide nothing more, so that another coordinator can take over; :meth:`wait` raises why.

        When all steps are done, nothing happens: what is left is to wait for the scripts to end.
        """
        if self._machine.phase not in (Phase.FINISHED, Phase.STOPPED):
            self._step_down(why)

    def _step_down(self, error: DeposedError) -> None:
        self._queue.clear()
        self._is_deposed = True
        if not self._stopped.done():
            self._stopped.set_exception(error)

    def _fail(self, reason: str) -> None:
        """Stop, whatever state the machine is in."""
        try:
            self._handle(ev.StopWanted(exit_code=EXIT_FAILED, reason=reason))
        except Exception:
            logger.exception("the coordinator failed again")
        self._stop(EXIT_FAILED, reason)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.feed(ev.Tick())
            self._sweeper.pass_time(time.monotonic(), is_calm=self._machine.phase not in _BUSY)
            if self._agents.are_out_of_reach(_TICK_S) and self._settings.store and self._machine.generation:
                self.resign(UnheardError(f"no node is heard at {self.address} any more: another may lead this job"))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ instructions

    def _do(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send() | ev.Tell():
                self._agents.tell(instruction)
            case ev.Record():
                self._events.record(instruction)
            case ev.WriteManifest():
                self.feed(_written(instruction))
            case ev.PreparePlans():
                self._spawn(self._prepare(instruction))
            case ev.Stop(exit_code=exit_code, reason=reason):
                self._stop(exit_code, reason)

    def _stop(self, exit_code: int, reason: str) -> None:
        if not self._stopped.done():
            for node in self._agents.nodes:
                self._agents.tell(ev.Tell(node=node, message=Shutdown(exit_code=exit_code, reason=reason)))
            self._stopped.set_result(exit_code)

    async def _prepare(self, wanted: ev.PreparePlans) -> None:
        num_nodes, choice = wanted.num_nodes, None
        try:
            choice = await asyncio.to_thread(choose_and_prepare, wanted.problem, num_nodes, wanted.most_chunks)
        except ValueError:
            pass  # there is no plan: the machine finds that out when it needs one
        except Exception:
            logger.exception("plans for %d nodes could not be prepared", num_nodes)
        self.feed(ev.PlansPrepared(num_nodes=num_nodes, choice=choice))

    # ------------------------------------------------------------ HTTP

    @web.middleware
    async def _authenticate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == _HEALTH:  # tells a stranger no more than that somebody listens does
            return await handler(request)
        presented = request.headers.get("Authorization", "")
        if not hmac.compare_digest(presented.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="the job's token is required")
        if self._entrance is not None:
            self._entrance.admit(request)
        try:
            return await handler(request)
        except ConnectionError:
            raise web.HTTPBadRequest(text="who asked has hung up") from None  # which nobody hears

    async def _serve_status(self, request: web.Request) -> web.Response:
        health = {str(node): msgspec.to_builtins(health) for node, health in self._agents.health.items()}
        return web.json_response({**self._machine.status(), "health": health})

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._events.metrics_text(), headers={"Content-Type": CONTENT_TYPE})

    async def _serve_health(self, request: web.Request) -> web.Response:
        if self._stopped.done():
            raise web.HTTPServiceUnavailable(text="the job is over")
        response = web.Response(text="ok")
        response.force_close()
        return response

    async def _serve_stop(self, request: web.Request) -> web.Response:
        self.feed(ev.Interrupted(reason="asked to stop"))
        return web.json_response({})

    async def _serve_inject(self, request: web.Request) -> web.Response:
        injection = await read_body(request, Injection)
        if injection.at_phase is not None:
            try:
                check_phase(injection.at_phase)
            except ArgumentError as error:
                raise web.HTTPBadRequest(text=str(error)) from None
        check_live(injection.node, self._machine.members, is_over=self._stopped.done())
        num_workers = self._machine.members[injection.node].num_workers
        if injection.worker_only and not 0 <= injection.worker < num_workers:
            there = f"0 to {num_workers - 1} on node {injection.node}"
            raise web.HTTPNotFound(text=f"worker must be {there}, got {injection.worker}")
        self.feed(ev.FailureWanted(injection=injection))
        return web.json_response({})

    async def _serve_leave(self, request: web.Request) -> web.Response:
        departure = await read_body(request, Departure)
        check_live(departure.node, self._machine.members, is_over=self._stopped.done())
        self.feed(ev.NodeLeaving(node=departure.node, reason="asked to leave"))
        return web.json_response({})


def _written(wanted: ev.WriteManifest) -> ev.ManifestWritten | ev.ManifestFailed:
    """Write a manifest; return what came of it."""
    try:
        write_manifest(wanted.path, wanted.manifest, wanted.nodes)
    except CheckpointError as error:
        return ev.ManifestFailed(path=wanted.path, error=str(error), node=error.node)
    return ev.ManifestWritten(path=wanted.path)
