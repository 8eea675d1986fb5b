"""Errors and crashes of workers: which cost a node, and which can only be the job's own."""

from __future__ import annotations

import signal

from resilient.agent.membership.next_generation.members import Member
from resilient.templates.common.words import counted

_MOST_WITHOUT_A_STEP = 2
"""Nodes that errors may cost without a step between them, lest one that shows ever differently cost node after node."""

_CRASHES = frozenset(
    (
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)
"""Signals of what a process does itself. Others come from outside: of the kernel that lacks memory, of a person."""


class OwnErrors:
    """Remembers which node had which error first, and who is to be let go for one."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._since_step: list[int] = []
        self._crashed: dict[int, Member] = {}
        self._has_stepped = False
        self._erring: dict[int, str] = {}

    @property
    def erring(self) -> dict[int, str]:
        """Nodes, dead or alive, without which the next generation is to be formed, and their errors."""
        return dict(self._erring)

    def why_of_the_job(self, node: int, kind: str) -> str | None:
        """Return what to say of an error that is the job's own, after its text; None for one of the node alone.

        Args:
            node: Whose error it is.
            kind: What tells it from others.
        """
        if not self._has_stepped:
            return ""
        first = self._first.get(kind, node)
        if first != node:
            return f"; node {first} had the same error before, so it is the job's own"
        if len(self._since_step) >= _MOST_WITHOUT_A_STEP:
            before = counted(len(self._since_step), "node")
            nodes = " and ".join(map(str, self._since_step))
            return f"; {before} ({nodes}) had others since the last step, so they are the job's own"
        return None

    def take(self, node: int, kind: str, error: str) -> None:
        """Take in an error of one node alone, which is to be let go."""
        self._first[kind] = node
        self._since_step.append(node)
        self._erring[node] = error

    def take_crash(self, member: Member, number: int) -> str:
        """Take in by which signal a worker was killed.

        A signal has no place in the code to compare it by, so steps between two crashes tell them apart. A worker that
        its agent starts again is of a new node and of the same machine.

        Returns:
            What to say of a crash that is the job's own, after its text; "" for one of the machine alone.
        """
        if number not in _CRASHES:
            return ""
        first = self._crashed.setdefault(number, member)
        if (first.host, first.pid) == (member.host, member.pid):
            return ""
        return f"; one of node {first.node} was, too, and no step was done since, so it is the job's own"

    def note_step(self) -> None:
        """Take in that a step was done: the job can be trained."""
        self._has_stepped = True
        self._since_step.clear()
        self._crashed.clear()

    def enter_generation(self) -> None:
        """Take in that a generation was formed without those who were to be let go."""
        self._erring.clear()
