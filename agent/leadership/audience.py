"""Whether anybody hears a leader: one that none of its nodes hears had better let one of them lead. Pure."""

from __future__ import annotations

from resilient.agent.journal.term import DeposedError


class UnheardError(DeposedError):
    """No node hears this coordinator any more: another one may."""


class Audience:
    """Counts the time in which no node was heard, by the coordinator's own ticks: when it stands still, they do, too.

    Args:
        patience_s: How long that may be.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._silent_s: float | None = None

    def hear(self) -> None:
        """Take in that some node was heard."""
        self._silent_s = 0.0

    def is_gone(self, passed_s: float, *, has_nodes: bool) -> bool:
        """Take in that time has passed; return whether it is too long since any node was heard.

        One that has not been heard of yet has nobody to lose: it waits.

        Args:
            passed_s: Since this was asked last.
            has_nodes: There are nodes that may be heard again.
        """
        if self._silent_s is None:
            return False
        self._silent_s = self._silent_s + passed_s if has_nodes else 0.0
        return self._silent_s >= self._patience_s
