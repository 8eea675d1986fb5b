"""How a node finds its coordinator: where it knocks, and for how long. Must not import torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import aiohttp

from resilient.agent.attach import read_office
from resilient.errors import ResilientError
from resilient.protocol.messages import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

ANSWER_HEARTBEATS = 6
"""How long a coordinator may take to answer: who knocks again may have been heard before, and count as two."""


class Door:
    """Where the coordinators of one job are to be found.

    Args:
        address: Of the first, host:port.
        heartbeat_s: Silence after which a connection counts as broken.
    """

    def __init__(self, address: str, heartbeat_s: float) -> None:
        self._address = address
        self._heartbeat_s = heartbeat_s
        self.run_directory: str | None = None

    async def knock(
        self, session: aiohttp.ClientSession, term: int, wait: Callable[[float, object], None]
    ) -> aiohttp.ClientWebSocketResponse[bool]:
        """Return a connection to a coordinator, once one opens.

        Args:
            session: Knows the job's token.
            term: The highest known: no other is looked for in the run's folder.
            wait: Called with the seconds that nobody has opened for, and why; raises when that is too long.

        Raises:
            ResilientError: The token is another job's.
        """
        loop = asyncio.get_running_loop()
        began, delay_s = loop.time(), 0.05
        while True:
            why: object = ""
            for address in self._addresses(term):
                try:
                    opening = session.ws_connect(
                        f"http://{address}/agent", max_msg_size=MAX_MESSAGE_BYTES, heartbeat=self._heartbeat_s
                    )
                    connection = await asyncio.wait_for(opening, ANSWER_HEARTBEATS * self._heartbeat_s)
                    self._address = address
                    return connection
                except aiohttp.WSServerHandshakeError as error:
                    if error.status == 401 and self.run_directory is None:
                        raise ResilientError(
                            "token must be the job's token; take it from the run folder's job.json"
                        ) from None
                    why = error
                except asyncio.TimeoutError:
                    why = "it does not answer"
                except (aiohttp.ClientError, OSError) as error:
                    why = getattr(error, "strerror", None) or error
            wait(loop.time() - began, why)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._heartbeat_s / 4)  # to be back in time

    def _addresses(self, term: int) -> Iterable[str]:
        """Where somebody was last, and where the run's folder says that somebody leads the job: there first if newer.

        The same coordinator may be reached over another address than its own.
        """
        office = None if self.run_directory is None else read_office(self.run_directory)
        if office is None or office.term < term:
            return (self._address,)
        return dict.fromkeys((office.address, self._address)[:: 1 if office.term > term else -1])
