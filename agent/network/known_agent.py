"""An agent as the coordinator knows it, over all of its connections. Must not import torch."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket

from aiohttp import web

from resilient.agent.membership.parts import events as ev
from resilient.agent.network.conversation import Conversation
from resilient.protocol.messages import FromAgentMessage

LOST = "node lost"
"""What is said of a node that went without a word."""


class KnownAgent:
    """One agent, connected or cut off.

    Args:
        connected: Of which node it is, and what it has said of itself.
        conversation: With it.

    Attributes:
        socket: Over which it was connected last.
        gone: Set when it is given up.
        num_heard_before_nonsense: So many messages were heard when it last sent what is none.
        lost_soon: Gives it up, while it is cut off.
        has_ended: Its process has.
        bell: Where its doorbell is; "" where it has none.
        why_lost: What is said of it when it is given up.
    """

    def __init__(self, connected: ev.NodeConnected, conversation: Conversation[FromAgentMessage]) -> None:
        self.node = connected.node
        self.num_workers = connected.num_workers
        self.conversation = conversation
        self.socket: web.WebSocketResponse | None = None
        self.gone = asyncio.Event()
        self.num_heard_before_nonsense: int | None = None
        self.lost_soon: asyncio.TimerHandle | None = None
        self.has_ended = False
        self.bell = ""
        self._told: dict[int, int] = {}  # by worker, the generation it was last told of, in this conversation
        self.why_lost = LOST
        self._process = (connected.host, connected.pid)
        self._known_by = connected.known_by

    def runs_here_as(self, pid: int) -> bool:
        """Return whether it is this process of this machine."""
        return self._process == (socket.gethostname(), pid)

    def is_known_by(self, key: str) -> bool:
        """Return whether it is this agent that shows a key: others have the job's token, too."""
        return hmac.compare_digest(self._known_by, digest(key))

    def note_told(self, local_rank: int | None, generation: int) -> int:
        """Take in that a worker is told of a generation; return which it was told of before, 0 for none."""
        before, self._told[local_rank or 0] = self._told.get(local_rank or 0, 0), generation
        return before

    def stop_waiting(self) -> bool:
        """Give it up no more when its time is over; return whether that would have been."""
        waited, self.lost_soon = self.lost_soon, None
        if waited is not None:
            waited.cancel()
        return waited is not None


def digest(key: str) -> str:
    """Return what may stand in logs of an agent's key."""
    return hashlib.sha256(key.encode()).hexdigest()
