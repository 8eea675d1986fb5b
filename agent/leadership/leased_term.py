"""A term that a lease in etcd gives: who holds it leads the job for as long as the lease is kept, by its own clock.

The clock counts from before each refreshing was asked for, so the lease here is over before it is over in etcd, and
some time before that: what is begun in time is done in time. Whoever was stopped, or cannot reach etcd, finds that out
by itself, and decides nothing more. The run's folder still has the number of the term, under its lock: of two
coordinators that both see it the log takes the later one's lines alone. The lease is kept by the coordinator's own
event loop: one that hangs loses it. Must not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from resilient.agent.journal.term import DeposedError, Term, newest_term
from resilient.agent.leadership.leader_store import Election, Leader, LeaderStore
from resilient.common.network.etcd_connection import EtcdUnreachableError

logger = logging.getLogger(__name__)

_REFRESHES = 6
"""In the time of a lease; the last one's is the margin."""


def lease_s(heartbeat_s: float) -> float:
    """Return after how long a leader that is not heard of by etcd is none any more."""
    return 3 * heartbeat_s


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps


class LeasedTerm(Term):
    """A coordinator's time in office, which ends with its lease."""

    def __init__(self, file: int, number: int, path: Path) -> None:
        super().__init__(file, number, path)
        self._over_at = -math.inf
        self._clock: Callable[[], float] = _now
        self._store: LeaderStore | None = None
        self._election: Election | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._why = ""

    @classmethod
    async def win(
        cls, url: str, run_directory: str | Path, heartbeat_s: float, clock: Callable[[], float] = _now
    ) -> LeasedTerm | None:
        """Stand for election; return the term that begins, None if somebody leads the job or was elected.

        Args:
            url: The store.
            run_directory: Folder of the run.
            heartbeat_s: Of the job: it decides how long the lease is.
            clock: Seconds, also while the machine sleeps.

        Raises:
            EtcdUnreachableError: No server answers.
            DeposedError: Somebody leads it without the store.
            OSError: The folder cannot be written.
        """
        run = str(Path(run_directory).resolve())
        store = LeaderStore(url, timeout_s=heartbeat_s)
        began = clock()
        try:
            election = await asyncio.to_thread(store.stand, run, newest_term(run), lease_s(heartbeat_s))
        except BaseException:
            store.close()
            raise
        if election is None:
            store.close()
            return None
        try:
            term = await asyncio.to_thread(cls.claim, run_directory, number=election.term)
        except BaseException:
            await asyncio.to_thread(store.resign, election.lease)
            store.close()
            raise
        term._hold(store, election, clock, began)
        return term

    def _hold(self, store: LeaderStore, election: Election, clock: Callable[[], float], began: float) -> None:
        self._store, self._election, self._clock = store, election, clock
        self._keep_until(began, election.ttl_s)
        self._keeping = asyncio.get_running_loop().create_task(self._keep(store, election))

    def _keep_until(self, asked_at: float, left_s: float) -> None:
        assert self._election is not None
        self._over_at = asked_at + left_s - self._election.ttl_s / _REFRESHES if left_s > 0 else -math.inf

    @property
    def is_held(self) -> bool:
        """Whether the lease is kept, as far as is known here."""
        return self._clock() < self._over_at

    async def _keep(self, store: LeaderStore, election: Election) -> None:
        has_complained = False
        while self.is_held:
            await asyncio.sleep(election.ttl_s / _REFRESHES)
            asked_at = self._clock()
            try:
                left_s = await asyncio.to_thread(store.refresh, election.lease)
                if not self.is_held:  # once out of office, out of it for good
                    await asyncio.to_thread(store.resign, election.lease)
                    return
                self._keep_until(asked_at, left_s)
                has_complained, self._why = False, ""
            except EtcdUnreachableError as error:
                self._why = str(error)
                if not has_complained:
                    left_s = max(0.0, self._over_at - self._clock())
                    logger.warning("term %d ends in %.1f s for want of etcd: %s", self.number, left_s, error)
                has_complained = True

    @contextmanager
    def in_office(self) -> Iterator[None]:
        """Do something that nobody may do who was deposed, or whose lease is over.

        Raises:
            DeposedError: Another one is in office, or may be.
        """
        with super().in_office():
            if not self.is_held:
                raise DeposedError(self._ended())
            yield

    async def announce(self, address: str) -> None:
        """Tell the nodes, by the store, where this coordinator is found.

        Raises:
            DeposedError: Somebody else leads by now.
        """
        assert self._store is not None
        assert self._election is not None
        leader = Leader(run=os.path.dirname(os.path.realpath(self._path)), term=self.number, address=address)
        try:
            is_leader = await asyncio.to_thread(self._store.announce, self._election, leader)
        except EtcdUnreachableError as error:
            raise DeposedError(f"term {self.number} ends before it has begun: {error}") from error
        if not is_leader:
            raise DeposedError(self._ended())

    def _ended(self) -> str:
        why = f" ({self._why})" if self._why else ""
        return f"the lease of term {self.number} is over: another coordinator may lead this job{why}"

    def close(self) -> None:
        """Do without the file, and give the lease back if it is still kept: somebody else may be elected at once."""
        super().close()
        if self._keeping is not None:
            self._keeping.cancel()
        store, self._store = self._store, None
        if store is not None and self._election is not None:
            if self.is_held:
                store.resign(self._election.lease)
            store.close()
