"""What one end of a link knows of it when the other is not heard any more. Pure: the clock is an argument."""

from __future__ import annotations

SILENT_HEARTBEATS = 1.5
"""After so many without a sign of life either end hangs up: one, and half of one for the answer to a question."""


class KnownLink:
    """A node's, to the coordinator.

    Args:
        heartbeat_s: Between two signs of life.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._ends = ("", "")
        self._heard_at: float | None = None
        self._is_silent = False

    def break_off(self, own: str, other: str, now: float, *, is_silent: bool) -> None:
        """Take in that a connection has ended.

        Args:
            own: This end's address.
            other: The other end's.
            now: Seconds.
            is_silent: This end hung up because it heard nothing; else the other end did, or is gone.
        """
        self._ends = (own, other)
        self._is_silent = is_silent
        self._heard_at = now - SILENT_HEARTBEATS * self._heartbeat_s if is_silent else now

    def told(self, now: float, other: str, own: str, *, still_arrives: bool) -> str:
        """Return which link it is, since when nothing is heard over it, and which way it may be cut.

        Args:
            now: Seconds.
            other: Where the other end is looked for.
            own: From where.
            still_arrives: Packets of the other end have come over the connection, but no answer to what was said last.
        """
        if self._heard_at is None:
            return f"the link {own} -> {other}, over which nothing was heard yet"
        own, last = self._ends
        moved = "" if last == other else f", now looked for at {other}"
        if self._is_silent and still_arrives:
            way = f"its packets come, but no answers to this node's: the way {own} -> {last} is cut"
        elif self._is_silent:
            way = f"then nothing came any more: the way {last} -> {own} is cut, or both ways, or that machine is down"
        else:
            way = f"then it hung up, as it does when it hears nothing: the way {own} -> {last} is cut, or it has ended"
        return f"the link {own} -> {last}{moved}: last heard {now - self._heard_at:.0f} s ago, {way}"
