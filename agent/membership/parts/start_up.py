"""Who is expected before the first generation, for how long, also in place of others, and what guests wait for."""

from __future__ import annotations

from resilient.agent.membership.next_generation.members import Member, Outstanding, WorkerId
from resilient.agent.membership.parts.context import Context
from resilient.protocol.messages import Ready

_FIRST_NOTICE_S = 60.0


class StartUp:
    """Counts the nodes the job is to begin with, and gives up waiting for those that are too late.

    The launcher's own nodes say what the job is. Guests that are ready before them are put off until then. A launcher
    without nodes of its own waits for as many as it takes, and as long; whoever is ready first says what the job is.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._expected = context.settings.num_nodes
        self._getting_ready = Outstanding()
        self._has_ended = False
        self._waiting_since: float | None = None
        self._notice_after_s = _FIRST_NOTICE_S if context.settings.has_own_nodes else 0.0
        self._unheard: list[tuple[Ready, WorkerId]] = []
        self._waits_until: float | None = None

    @property
    def expected(self) -> int:
        """Nodes to begin with: those the job was started with, without those that went away."""
        return self._expected

    @property
    def all_came(self) -> bool:
        """Whether nobody who is expected has yet to connect."""
        return len(self._context.members) >= self._expected

    @property
    def has_own(self) -> bool:
        """Whether a node of the launcher's own is there, or may come."""
        return self._context.settings.has_own_nodes and self._expected > 0

    @property
    def waits_for_workers(self) -> bool:
        """Whether nodes have yet to come or to get ready, and no script has ended meanwhile."""
        members = self._context.members

        def is_awaited(worker: WorkerId) -> bool:
            return worker[0] in members and not members[worker[0]].is_ready

        def awaited() -> list[WorkerId]:
            return [(node, 0) for node, member in members.items() if not member.is_ready]

        return not self._has_ended and (not self.all_came or self._getting_ready.has_any(is_awaited, awaited))

    def note_ended(self) -> None:
        """Take in that a script has ended before the job began."""
        self._has_ended = True

    def expect_one_less(self, member: Member) -> None:
        """Go on without a node that went away; guests were not expected, and others may come in their place."""
        if not member.is_guest:
            self._expected -= 1

    def put_off(self, message: Ready, worker: WorkerId) -> None:
        """Keep what a guest's worker says for later."""
        self._unheard.append((message, worker))

    def take_put_off(self) -> list[tuple[Ready, WorkerId]]:
        """Return what was put off, to be heard now."""
        unheard, self._unheard = self._unheard, []
        return unheard

    def waits_for(self, num_missing: int) -> bool:
        """Return whether others may still come in place of nodes that went away; record once how many are missing."""
        now, settings = self._context.now, self._context.settings
        if self._expected >= settings.num_nodes or not settings.wait_for_nodes_s:
            return False
        if self._waits_until is None:
            self._waits_until = now + settings.wait_for_nodes_s
            self._context.record("too_few", num_missing=num_missing, coming=[], wait_s=settings.wait_for_nodes_s)
        return now < self._waits_until

    def too_late(self) -> list[int]:
        """Return the nodes that are waited for no longer; record now and then, ever more rarely, who is waited for.

        Those of the launcher's own that have not even connected are expected no more.
        """
        now, members = self._context.now, self._context.members
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        waited_s = now - self._waiting_since
        late = [member.node for member in members.values() if not member.is_up]
        limit_s = self._context.settings.start_timeout_s
        if self._context.settings.has_own_nodes and waited_s >= limit_s:
            self._expected = len(members)
            return late
        if not self._context.settings.has_own_nodes:  # each has its own time, from when it came
            overdue = [node for node in late if now - members[node].connected_at >= limit_s]
            if overdue:
                return overdue
        if waited_s >= self._notice_after_s:
            num_missing = max(0, self._expected - len(members))
            self._context.record("waiting", nodes=late, num_missing=num_missing, waited_s=round(waited_s))
            self._notice_after_s = max(2 * self._notice_after_s, _FIRST_NOTICE_S)
        return []
