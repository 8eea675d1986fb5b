"""Who is there: the live nodes with their workers. Plain data of the membership machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from resilient.protocol.alike import Alike
from resilient.protocol.messages import Ready

WorkerId = tuple[int, int]
"""A worker: (node, local rank)."""


@dataclass(kw_only=True)
class Member:
    """A live node.

    Args:
        domain: What it fails together with (a zone, a rack); "" when it is not known.
        is_guest: Somebody else than the launcher has started it.
        unchecked: What it has told of itself and is not held against the others yet.
        connected_at: When it introduced itself.
        num_behind: So many others were at the door then.
        up_at: When all its workers were up.
        ready: Its workers that are up, by local rank.
        done: Its workers that have ended as they should.
        cut_off: Its connection broke a moment ago.
        leaving: It has announced that it goes away.
        admitted: It was told of the current generation, with a place in it or without.
        lacks_plans: Plans for as many nodes as there are with it are still being prepared.
    """

    node: int
    host: str
    pid: int
    num_workers: int
    domain: str = ""
    is_guest: bool = False
    unchecked: Alike = field(default_factory=Alike)
    connected_at: float = 0.0
    num_behind: int = 0
    up_at: float = 0.0
    ready: dict[int, Ready] = field(default_factory=dict[int, Ready])
    done: set[int] = field(default_factory=set[int])
    cut_off: bool = False
    leaving: bool = False
    admitted: bool = False
    lacks_plans: bool = False

    @property
    def is_up(self) -> bool:
        """Whether all its workers are up."""
        return len(self.ready) == self.num_workers

    @property
    def is_ready(self) -> bool:
        """Whether it can be given a place."""
        return len(self.ready) == self.num_workers and not self.lacks_plans  # often asked: no call of another property

    @property
    def is_done(self) -> bool:
        """Whether all its workers have ended."""
        return len(self.done) == self.num_workers

    @cached_property
    def workers(self) -> tuple[WorkerId, ...]:
        """All its workers."""
        return tuple((self.node, local_rank) for local_rank in range(self.num_workers))

    @property
    def pids(self) -> dict[str, int]:
        """Process numbers of the workers that are up, by "node/local_rank"."""
        return {f"{self.node}/{local_rank}": ready.pid for local_rank, ready in sorted(self.ready.items())}


class Outstanding:
    """Tells, time after time and of many, whether anybody is still waited for.

    It remembers all who were when it last had to look, and looks again only when none of these is waited for now.
    """

    def __init__(self) -> None:
        self._known: list[WorkerId] = []

    def has_any(self, is_awaited: Callable[[WorkerId], bool], awaited: Callable[[], Collection[WorkerId]]) -> bool:
        """Return whether anybody is.

        Args:
            is_awaited: Whether one is.
            awaited: Returns all who are.
        """
        while self._known and not is_awaited(self._known[-1]):
            self._known.pop()
        if not self._known:
            self._known = list(awaited())
        return bool(self._known)


def log_path(run_directory: str, worker: WorkerId) -> Path:
    """Return the file, on its own machine, that a worker's output goes to."""
    return Path(run_directory) / "logs" / f"node-{worker[0]}" / f"worker-{worker[1]}.log"


def available(members: Iterable[Member], most: int | None) -> list[int]:
    """Return the nodes that the next plan may use: of those that could, so many that came first; all if None."""
    return sorted(member.node for member in members if member.is_ready and not member.leaving)[:most]
