"""How a node finds its coordinator: where it knocks, and for how long. Must not import torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp

from resilient.agent.leadership.leader_store import SCHEME, Leader, LeaderStore
from resilient.agent.leadership.office import read_office
from resilient.agent.network.dialect import REFUSED, SPOKEN, dialect
from resilient.common.extras import MissingPackageError
from resilient.common.job_certificate import client_context
from resilient.common.network.etcd_connection import EtcdUnreachableError
from resilient.errors import ArgumentError, ResilientError
from resilient.protocol.messages import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

ANSWER_HEARTBEATS = 6
"""How long a coordinator may take to answer: who knocks again may have been heard before, and count as two."""


def session_for(token: str, **options: Any) -> aiohttp.ClientSession:
    """Return what speaks to the coordinator of the token's job, and to nobody else.

    Args:
        token: Of the job; said once the other end has shown that it has it, too.
        options: Of the session.
    """
    connector = aiohttp.TCPConnector(ssl=client_context(token), limit=0)
    return aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {token}"}, **options)


class Door:
    """Where the coordinators of one job are to be found.

    Args:
        address: Of the first, host:port; or of the store that knows, as ``--store`` names it.
        heartbeat_s: Silence after which a connection counts as broken.

    Attributes:
        unreached: Why the store could not be asked last, and over which links; "" where it could, or there is none.
        run_directory: Folder of the run, once this node is told; None before.
    """

    def __init__(self, address: str, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._address, self._url = ("", address) if address.startswith(SCHEME) else (address, "")
        self._store: LeaderStore | None = None
        self._vacant_since: float | None = None
        self._is_blind = False
        self.unreached = ""
        self.run_directory: str | None = None

    @property
    def address(self) -> str:
        """Where somebody opened last, or is looked for; "" where nobody knows yet."""
        return self._address

    @property
    def vacant_s(self) -> float:
        """For how many seconds the store has said that nobody leads the job; 0 where somebody may."""
        return 0.0 if self._vacant_since is None else asyncio.get_running_loop().time() - self._vacant_since

    async def knock(
        self, session: aiohttp.ClientSession, term: int, wait: Callable[[float, object], None]
    ) -> aiohttp.ClientWebSocketResponse[bool]:
        """Return a connection to a coordinator, once one opens.

        Args:
            session: Knows the job's token.
            term: The highest known: no other is looked for in the run's folder, or in the store.
            wait: Called with the seconds that nobody has opened for, and why; raises when that is too long.

        Raises:
            ResilientError: The token is another job's, or the coordinator does not speak this node's dialect.
        """
        loop = asyncio.get_running_loop()
        began, delay_s = loop.time(), 0.05
        while True:
            why: object = None
            for address in await self._addresses(term):
                try:
                    connection = await self._open(session, address)
                    self._address, self._vacant_since = address, None
                    return connection
                except aiohttp.ClientConnectorCertificateError as error:
                    if self.run_directory is None:
                        raise ResilientError(
                            f"token must be the job's token, got one that the coordinator at {address} does not have; "
                            f"take it from the run folder's job.json"
                        ) from None
                    why = error
                except aiohttp.WSServerHandshakeError as error:
                    reason = error.headers.get(REFUSED) if error.headers is not None else None
                    if reason is not None and self.run_directory is None:
                        raise ResilientError(reason) from None
                    why = reason or error  # a later coordinator may be one that this node understands
                except asyncio.TimeoutError:
                    why = "it does not answer"
                except (aiohttp.ClientError, OSError) as error:
                    why = getattr(error, "strerror", None) or error
            wait(loop.time() - began, self._in_all(why))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._heartbeat_s / 4)  # to be back in time

    def _in_all(self, why: object) -> object:
        """Return why nobody opens, and why none is found where others would be."""
        if why is None:
            return self.unreached or "nobody leads the job"
        return f"{why}; {self.unreached}" if self.unreached else why

    async def _open(self, session: aiohttp.ClientSession, address: str) -> aiohttp.ClientWebSocketResponse[bool]:
        """Knock at one address; not for longer than somebody leads the job there, where that is known.

        Raises:
            TimeoutError: Nobody answers.
            aiohttp.ClientError, OSError: Nobody listens, or lets this node in.
        """
        opening = asyncio.create_task(self._connect(session, address))
        watching = asyncio.create_task(self._watch(address))
        try:
            await asyncio.wait((opening, watching), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise asyncio.TimeoutError
            return opening.result()
        finally:
            for task in (opening, watching):
                task.cancel()

    async def _connect(self, session: aiohttp.ClientSession, address: str) -> aiohttp.ClientWebSocketResponse[bool]:
        return await session.ws_connect(
            f"https://{address}/agent",
            headers={SPOKEN: dialect()},
            max_msg_size=MAX_MESSAGE_BYTES,
            heartbeat=self._heartbeat_s,
        )

    async def _watch(self, address: str) -> None:
        """Return when nobody who knocks at an address need wait any more."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + ANSWER_HEARTBEATS * self._heartbeat_s
        while loop.time() < give_up_at:
            await asyncio.sleep(self._heartbeat_s / 2)
            if self._store is not None:
                leader = await self._leader(self._store)
                if self._vacant_since is not None or (leader is not None and leader.address not in ("", address)):
                    return

    async def _addresses(self, term: int) -> Iterable[str]:
        """Where somebody was last, and where somebody leads the job, as the run's folder or the store says.

        There first if newer: the same coordinator may be reached over another address than its own. Where the store
        says that nobody leads, nobody is knocked for.
        """
        office = None if self.run_directory is None else read_office(self.run_directory)
        if (
            self._store is None
            and not self._is_blind
            and (url := self._url or (office.store if office is not None else ""))
        ):
            self._store = self._opened(url)
        leader: Leader | None = None
        if self._store is not None:
            leader = await self._leader(self._store)
            if self._vacant_since is not None:
                return ()
        found = leader if leader is not None else office
        if found is None or not found.address or found.term < term:
            return (self._address,) if self._address else ()
        return dict.fromkeys(filter(None, (found.address, self._address)[:: 1 if found.term > term else -1]))

    def _opened(self, url: str) -> LeaderStore | None:
        try:
            return LeaderStore(url, timeout_s=self._heartbeat_s)
        except (MissingPackageError, OSError) as error:  # of a file for TLS: others do better
            if not self._address:
                raise ResilientError(str(error)) from error
            logger.warning("coordinators are looked for in the run's folder alone: %s", error)
            self._is_blind = True
            return None

    async def _leader(self, store: LeaderStore) -> Leader | None:
        """Return who leads this node's job, None where nobody does, or where that is not known."""
        try:
            leader = await asyncio.to_thread(store.leader)
        except (EtcdUnreachableError, ArgumentError) as error:
            if not self.unreached:
                logger.warning("where the coordinator is cannot be asked: %s", error)
            self.unreached, self._vacant_since = str(error), None
            return None
        self.unreached = ""
        if leader is None:
            self._vacant_since = self._vacant_since or asyncio.get_running_loop().time()
            return None
        self._vacant_since = None
        return leader if self.run_directory in (None, leader.run) else None
