"""How long those who lost each other wait: the coordinator for an agent, and an agent for the coordinator.

Both wait for ``orphan_s``, as long as nobody else is kept waiting by it. A connection over which nothing has come for
``heartbeat_s`` and a half is taken for broken at either end. An agent that is cut off is given up before its time only
where it is missed: others are heard of meanwhile, and the steps that it takes part in stand still. Pure: the clock is
an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(kw_only=True)
class _Heard:
    at: float
    cut_off_at: float | None = None
    is_missed_after: float = 0.0


def successor_grace_s(heartbeat_s: float) -> float:
    """Return how long a coordinator waits for the agents that knew the one before: until they can have noticed."""
    return 3 * heartbeat_s


class Patience:
    """Tells which agents are given up.

    Args:
        heartbeat_s: Between two signs of life of an agent.
        orphan_s: How long one that nobody misses is waited for.
        takes_part: Returns whether no step can be done without a node.
    """

    def __init__(self, heartbeat_s: float, orphan_s: float, takes_part: Callable[[int], bool]) -> None:
        self._heartbeat_s = heartbeat_s
        self._orphan_s = orphan_s
        self._takes_part = takes_part
        self._heard: dict[int, _Heard] = {}
        self._stepped_at = float("-inf")

    def hear(self, node: int, now: float) -> None:
        """Take in a sign of life."""
        self._heard[node] = _Heard(at=now)

    def note_step(self, now: float) -> None:
        """Take in that somebody tells of a step."""
        self._stepped_at = now

    def cut_off(self, node: int, now: float, *, is_silent: bool) -> None:
        """Take in that a connection broke; ``is_silent``: because nothing came, as when the fault is at this end."""
        heard = self._heard.setdefault(node, _Heard(at=now))
        heard.cut_off_at = now
        heard.is_missed_after = heard.at + self._heartbeat_s if is_silent else now

    def is_over(self, node: int, now: float) -> bool:
        """Return whether an agent that is cut off is waited for no longer."""
        heard = self._heard[node]
        assert heard.cut_off_at is not None
        if now - heard.cut_off_at >= self._orphan_s:
            return True
        if self._takes_part(node) and now - self._stepped_at < self._heartbeat_s:
            return False
        others = (other.at for number, other in self._heard.items() if number != node)
        return any(at > heard.is_missed_after for at in others)

    def forget(self, node: int) -> None:
        """Take in that an agent is gone."""
        self._heard.pop(node, None)
