"""The node agents as the coordinator sees them: who is connected, cut off, back or gone.

A connection that breaks is not yet a node that is lost: its agent comes back with the same conversation, or is given
up when :mod:`resilient.agent.network.patience` is over. Owns the agents' WebSockets. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from resilient.agent.entrance import num_strangers
from resilient.agent.leadership.audience import Audience
from resilient.agent.leadership.leased_term import lease_s
from resilient.agent.membership.machine import Membership
from resilient.agent.membership.parts import events as ev
from resilient.agent.membership.parts.context import Phase, Settings
from resilient.agent.network.conversation import GOODBYE, Attached, Conversation, Heard, Hello, decode_hello
from resilient.agent.network.dialect import REFUSED, SPOKEN, why_misunderstood
from resilient.agent.network.doorbell import joined
from resilient.agent.network.introductions import (
    INTRODUCTION_S,
    Introduce,
    chosen_peers,
    decode_introduced,
    why_refused,
)
from resilient.agent.network.known_agent import LOST, KnownAgent, digest
from resilient.agent.network.patience import Patience
from resilient.common.printable import printable
from resilient.errors import ControlError
from resilient.protocol.generation_packing import GenerationPacker
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    FromAgentMessage,
    FromWorker,
    Generation,
    Health,
    Leaving,
    Shutdown,
    StepDone,
    ToAgentMessage,
    ToWorkers,
    WorkerExited,
    encode,
)
from resilient.protocol.repeated_jobs import JobReader

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0


class Agents:
    """Serves the agents' connections and tells the machine what comes of them.

    Args:
        settings: Of the job.
        token: Of the job.
        machine: Says which nodes it counts on.
        feed: Gives the machine a stimulus.
        keep: Called before agents are told what they need not keep.
        note: Writes an event: its kind, its fields.
        term: Of this coordinator.
    """

    def __init__(
        self,
        settings: Settings,
        token: str,
        machine: Membership,
        feed: Callable[[ev.Stimulus], None],
        keep: Callable[[], None],
        note: Callable[[str, dict[str, Any]], None],
        term: int,
    ) -> None:
        self._heartbeat_s = settings.heartbeat_s
        self._patience = Patience(settings.heartbeat_s, settings.orphan_s, machine.takes_part)
        self._feed = feed
        self._machine = machine
        self._keep = keep
        self._note = note
        self._term = term
        self._token = token
        self._ports = settings.port_range
        self._packer = GenerationPacker()
        self._reader = JobReader(FromAgentMessage | Heard)
        self._heard_before: Mapping[int, int] = {}
        self._agents: dict[int, KnownAgent] = {}
        self._num_seen = 0
        self._introducing: set[web.WebSocketResponse] = set()
        self._health: dict[int, Health] = {}
        self._misunderstood: set[str] = set()
        self._audience = Audience(lease_s(settings.heartbeat_s))
        self._is_over = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of all that are not gone."""
        return tuple(self._agents)

    @property
    def health(self) -> Mapping[int, Health]:
        """What each said last of its machine."""
        return self._health

    def are_out_of_reach(self, passed_s: float) -> bool:
        """Take in that time has passed; return whether none of them was heard for as long as a leader's lease."""
        return self._audience.is_gone(passed_s, has_nodes=bool(self._agents))

    def tell(self, instruction: ev.Send | ev.Tell) -> None:
        """Have a message sent, now or when the agent is back; to one that is gone, none is."""
        agent = self._agents.get(instruction.node)
        if agent is None:
            return
        message: ToAgentMessage
        if isinstance(instruction, ev.Tell):
            message = instruction.message
        else:
            sent, local_rank = instruction.message, instruction.local_rank
            if isinstance(sent, Generation):
                sent = self._packer.pack(sent, agent.note_told(local_rank, sent.generation))
            message = ToWorkers(message=sent, local_rank=local_rank)
        agent.conversation.say(encode(message))

    def num_heard(self, node: int) -> int:
        """Return how many messages of an agent were heard; 0 of one that is gone."""
        agent = self._agents.get(node)
        return 0 if agent is None else agent.conversation.num_heard

    def inherit(self, num_heard: Mapping[int, int]) -> None:
        """Take in how many messages of each agent the coordinator before has heard, before any :meth:`expect_back`."""
        self._heard_before = num_heard

    def expect_back(self, connected: ev.NodeConnected) -> None:
        """Take in that there was an agent when the coordinator before was there."""
        self._num_seen = max(self._num_seen, connected.node + 1)
        conversation = self._conversation(self._heard_before.get(connected.node, 0))
        self._agents[connected.node] = KnownAgent(connected, conversation)

    def forget(self, node: int) -> None:
        """Take in that an agent was gone when the coordinator before was there."""
        self._agents.pop(node, None)

    def wait_for_all(self, wait_s: float) -> None:
        """Give up those that are not back after so many seconds; sooner or later than others, as patience has it."""
        for agent in self._agents.values():
            self._patience.cut_off(agent.node, _now(), is_silent=False)
            self._wait_for(agent, wait_s)

    def _conversation(self, num_heard: int = 0) -> Conversation[FromAgentMessage]:
        return Conversation(FromAgentMessage, num_heard=num_heard, keep=self._keep, decode=self._reader.decode)

    def note_ended(self, pid: int) -> None:
        """Take in that a process of this machine has ended: if it was an agent, it does not come back."""
        for agent in list(self._agents.values()):
            if agent.runs_here_as(pid):
                agent.has_ended = True
                if agent.lost_soon is not None:
                    self._drop(agent, LOST)

    async def all_gone(self) -> None:
        """Wait until all that are there now are gone; those who are cut off are waited for no longer."""
        self._is_over = True
        await asyncio.gather(*(agent.gone.wait() for agent in self._agents.values()))

    def close(self) -> None:
        """Wait for nobody any more."""
        for agent in self._agents.values():
            agent.stop_waiting()

    # ------------------------------------------------------------ connections

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one connection of an agent, from its ``Hello`` on.

        Raises:
            web.HTTPUpgradeRequired: It would not understand what is said to it, or is not to be understood.
        """
        if reason := why_misunderstood(request.headers.get(SPOKEN, "")):
            self._note_misunderstood(request.remote or "", reason)
            raise web.HTTPUpgradeRequired(text=reason, headers={REFUSED: reason})
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=self._heartbeat_s)
        self._introducing.add(socket)
        try:
            await self._serve(request, socket)
        finally:
            self._introducing.discard(socket)
        return socket

    async def _serve(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        await socket.prepare(request)
        try:
            hello = decode_hello(await socket.receive_bytes(timeout=_HELLO_TIMEOUT_S))
        except (msgspec.DecodeError, TypeError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            why = "it hung up" if socket.closed else printable(str(error))
            logger.warning("an agent at %s did not introduce itself: %s", _other_end(request), why)
            await socket.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION)
            return
        await self._converse(request, socket, hello)
        await socket.close()

    def _note_misunderstood(self, host: str, reason: str) -> None:
        """Tell it of each machine once: an agent may try again and again."""
        if host not in self._misunderstood:
            self._misunderstood.add(host)
            self._note("node_refused", {"host": host, "address": "", "is_guest": True, "reason": reason})

    async def _converse(self, request: web.Request, socket: web.WebSocketResponse, hello: Hello) -> None:
        if hello.term > self._term:
            return  # it has heard of another coordinator, as this one will
        agent = self._agents.get(hello.node) if hello.node is not None else None
        if agent is not None and not agent.is_known_by(hello.key):
            agent = None  # somebody else, who has the token: a node like any other that comes for the first time
        is_new = agent is None or hello.num_heard == 0 or agent.node not in self._machine.members
        if agent is None or is_new:
            if agent is not None:  # it begins anew: what it was before is gone in any case
                self._drop(agent, LOST)
            met = await self._introduce(socket, hello)
            if met is None:
                return
            hello = met
            agent = self._begin(hello, num_behind=len(self._introducing) - 1 + num_strangers(request))
        self._introducing.discard(socket)
        agent.bell = joined(hello.address, hello.bell_port) if hello.bell_port else ""
        agent.socket = socket
        agent.conversation.connect(socket)
        self._patience.hear(agent.node, _now())
        self._audience.hear()
        if agent.stop_waiting():
            self._feed(ev.NodeBack(node=agent.node))
        cause = ""
        try:
            self._keep()
            num_heard = agent.conversation.num_heard
            await socket.send_bytes(encode(Attached(is_new=is_new, num_heard=num_heard, term=self._term)))
            num_heard_there = 0 if is_new else hello.num_heard
            await agent.conversation.carry(socket, num_heard_there, lambda said: self._hear(agent, said))
        except ConnectionError:
            pass
        except msgspec.DecodeError as error:
            cause = self._cause_of_nonsense(agent, agent.conversation.num_heard, error)
        except ControlError as error:
            logger.warning("node %d: %s", agent.node, error)
            cause = LOST
        if agent.socket is not socket or self._agents.get(agent.node) is not agent:
            return  # it is back over another connection, or gone
        if socket.close_code == GOODBYE or agent.has_ended:
            cause = LOST
        if cause:
            self._drop(agent, cause)
        else:
            self._cut_off(agent, is_silent=isinstance(socket.exception(), asyncio.TimeoutError))

    async def _introduce(self, socket: web.WebSocketResponse, hello: Hello) -> Hello | None:
        """Have a node and others try whether they reach each other.

        Returns:
            What it said, with where its doorbell is; None if it is refused, or does not answer.
        """
        if not hello.address:
            return hello
        near = [agent for agent in self._agents.values() if agent.bell and agent.lost_soon is None]
        at_work = [agent for agent in near if self._machine.takes_part(agent.node)]  # others may tell any address
        asked = Introduce(peers=chosen_peers([agent.bell for agent in at_work or near]), ports=self._ports)
        try:
            await socket.send_bytes(encode(asked))
            told = decode_introduced(await socket.receive_bytes(timeout=INTRODUCTION_S))
        except (msgspec.DecodeError, TypeError, asyncio.TimeoutError, ConnectionError, aiohttp.ClientError) as error:
            logger.warning("an agent on %r does not say whether it reaches others: %r", hello.host, error)
            return None
        reason = await why_refused(asked, told, hello.address, self._token, is_chosen=hello.is_chosen)
        if reason and self._machine.phase not in (Phase.FINISHED, Phase.STOPPED):  # in these, whom it misses is gone
            refused = {"host": hello.host, "address": hello.address, "is_guest": hello.is_guest, "reason": reason}
            self._note("node_refused", refused)
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(encode(Shutdown(exit_code=1, reason=reason)))
            return None
        return msgspec.structs.replace(hello, bell_port=told.port)

    def _begin(self, hello: Hello, num_behind: int) -> KnownAgent:
        connected = ev.NodeConnected(
            node=self._num_seen,
            host=hello.host,
            pid=hello.pid,
            num_workers=hello.num_workers,
            domain=hello.domain,
            alike=hello.alike,
            is_guest=hello.is_guest,
            known_by=digest(hello.key),
            num_behind=num_behind,
        )
        self._num_seen += 1
        agent = self._agents[connected.node] = KnownAgent(connected, self._conversation())
        self._feed(connected)
        return agent

    def _cause_of_nonsense(self, agent: KnownAgent, num_heard: int, error: msgspec.DecodeError) -> str:
        """Return why to do without the agent, "" if it may say it again: it can have been damaged on its way."""
        logger.warning("node %d sent nonsense: %s", agent.node, printable(str(error)))
        is_same, agent.num_heard_before_nonsense = agent.num_heard_before_nonsense == num_heard, num_heard
        return LOST if is_same else ""

    async def _hear(self, agent: KnownAgent, said: FromAgentMessage) -> None:
        node = agent.node
        self._patience.hear(node, _now())
        self._audience.hear()
        if isinstance(said, FromWorker | WorkerExited) and not 0 <= said.local_rank < agent.num_workers:
            raise ControlError(f"local ranks must be below {agent.num_workers}, got {said.local_rank}")
        match said:
            case Health():
                self._health[node] = said
            case FromWorker(local_rank=local_rank, message=message):
                if isinstance(message, StepDone):
                    self._patience.note_step(_now())
                self._feed(ev.WorkerSaid(node=node, local_rank=local_rank, message=message))
            case Leaving(reason=reason):
                self._feed(ev.NodeLeaving(node=node, reason=reason))
            case WorkerExited(local_rank=local_rank, exit_code=exit_code, error=error):
                self._feed(ev.WorkerEnded(node=node, local_rank=local_rank, exit_code=exit_code, error=error))

    def _cut_off(self, agent: KnownAgent, *, is_silent: bool) -> None:
        self._patience.cut_off(agent.node, _now(), is_silent=is_silent)
        agent.why_lost = "heartbeat missed" if is_silent else LOST
        if is_silent and self._patience.is_over(agent.node, _now()):
            self._drop(agent, agent.why_lost)
        else:
            self._wait_for(agent, self._heartbeat_s)
            self._feed(ev.NodeCutOff(node=agent.node))

    def _wait_for(self, agent: KnownAgent, wait_s: float) -> None:
        agent.lost_soon = asyncio.get_running_loop().call_later(wait_s, self._give_up_or_wait, agent)

    def _give_up_or_wait(self, agent: KnownAgent) -> None:
        if self._is_over or self._patience.is_over(agent.node, _now()):
            self._drop(agent, agent.why_lost)
        else:
            self._wait_for(agent, self._heartbeat_s / 2)

    def _drop(self, agent: KnownAgent, cause: str) -> None:
        agent.stop_waiting()
        del self._agents[agent.node]
        self._health.pop(agent.node, None)
        self._patience.forget(agent.node)
        agent.gone.set()
        self._feed(ev.NodeLost(node=agent.node, cause=cause))


def _other_end(request: web.Request) -> str:
    """Return host and port that a connection comes from."""
    host, port = (request.get_extra_info("peername") or ("unknown", 0))[:2]
    return joined(host, port)


def _now() -> float:
    return asyncio.get_running_loop().time()
