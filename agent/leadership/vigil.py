"""What a node does while it finds no coordinator: it waits, has one come out of itself, and ends the job at last.

Where the job has a store, and the store says that nobody leads, nodes stand for election, in a process of their own
each: the one that is elected leads the job from there. In the run's folder alone nobody can see whether a coordinator
that is silent is gone, so without a store it takes an operator (``resilient run --attach``). Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
from collections.abc import Awaitable, Callable

from resilient.agent.leadership.knocking import Door
from resilient.agent.network.dialect import dialect
from resilient.common.processes import command_for
from resilient.errors import ResilientError
from resilient.protocol.messages import Welcome

logger = logging.getLogger(__name__)

_NODES_IN_TURN = 16
"""So many nodes try one after the other to lead their job, or to end it: mostly the first of them does."""
_TURN_HEARTBEATS = 0.25
"""Of nodes that stand for election: in the time of a turn the process of one before is there."""


class OrphanedError(ResilientError):
    """No coordinator leads the job any more, and no node has ended it."""


class Vigil:
    """Waits for one node.

    Args:
        door: Where it knocks.
        address: Where it was told to join, for messages.
        heartbeat_s: Of the job.
        patience_s: How long to wait for the first coordinator, and for the node that ends the job at last.
        end_job: Ends the job of a ``Welcome`` for want of a coordinator, for a reason; called once.
        link: Returns what is known of the link to the coordinator.
    """

    def __init__(
        self,
        door: Door,
        address: str,
        heartbeat_s: float,
        patience_s: float,
        end_job: Callable[[Welcome, str], Awaitable[None]],
        link: Callable[[], str],
    ) -> None:
        self._door = door
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._patience_s = patience_s
        self._end_job = end_job
        self._link = link
        self._has_complained = False
        self._ending: asyncio.Task[None] | None = None
        self._standing: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._orphan_s = 0.0

    def wait(self, waited_s: float, why: object, welcome: Welcome | None, host: str) -> None:
        """Wait on for a coordinator that has not answered for so long.

        Args:
            waited_s: How long.
            why: Nobody answers.
            welcome: What the job said to this node; None before it has.
            host: Address of this machine by which the others reach it.

        Raises:
            ResilientError: This node has tried all.
        """
        if welcome is None:
            self._wait_for_the_first(waited_s, why)
            return
        self._warn(waited_s, why, welcome)
        turn = welcome.node % _NODES_IN_TURN
        if self._door.vacant_s > turn * _TURN_HEARTBEATS * self._heartbeat_s and (
            self._standing is None or self._standing.done()
        ):
            self._standing = asyncio.create_task(self._stand(welcome, host))
        turn_s = turn * self._heartbeat_s / _NODES_IN_TURN
        if waited_s <= welcome.orphan_s + turn_s:
            return
        if self._ending is None:
            reason = f"no coordinator for {welcome.orphan_s:g} s"
            logger.warning("node %d: %s: ending the job", welcome.node, reason)
            if self._door.unreached:  # whoever has to go on needs to know what to mend
                reason += f"; {self._door.unreached}"
            self._ending = asyncio.ensure_future(self._end_job(welcome, reason))
        elif waited_s > welcome.orphan_s + turn_s + self._patience_s:
            raise OrphanedError(
                f"a coordinator must listen at {self._address}, got no answer for {waited_s:.0f} s ({why}; "
                f"{self._link()}); go on from the newest checkpoint with: {_how_to_resume(welcome)}"
            )

    async def close(self) -> None:
        """Wait until the job is ended, where this node ends it; let others lead it, where it is led from here."""
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)
        if self._standing is None:
            return
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):  # where all steps are done, it waits for the last script
                await asyncio.wait_for(self._process.wait(), self._orphan_s)
        self._standing.cancel()
        await asyncio.gather(self._standing, return_exceptions=True)

    def _wait_for_the_first(self, waited_s: float, why: object) -> None:
        address, patience_s = self._address, self._patience_s
        if not self._has_complained:
            logger.warning("no coordinator answers at %s (%s); trying for %g s", address, why, patience_s)
            self._has_complained = True
        if waited_s > patience_s:
            raise ResilientError(
                f"a coordinator must listen at {address}, got no answer for {patience_s:g} s ({why}; {self._link()}); "
                f"check that its job runs, was started with --host and --port of this address, and can be reached from "
                f"here"
            )

    def _warn(self, waited_s: float, why: object, welcome: Welcome) -> None:
        """Say once which link it is over which nobody is heard, if that is not over in a moment."""
        if waited_s <= self._heartbeat_s:
            self._has_complained = False
        elif not self._has_complained:
            said = "node %d: no coordinator answers (%s; %s); goes on without one, for %g s"
            logger.warning(said, welcome.node, why, self._link(), welcome.orphan_s)
            self._has_complained = True

    async def _stand(self, welcome: Welcome, host: str) -> None:
        """Have a process stand for election, and lead the job if it is elected. It dies with this one."""
        logger.info("node %d: nobody leads the job (%s): standing for it", welcome.node, self._link())
        options = ("--run", welcome.run_directory, "--host", host, "--parent", str(os.getpid()), "--dialect", dialect())
        self._orphan_s = welcome.orphan_s
        self._process = await asyncio.create_subprocess_exec(
            *command_for("resilient.agent.candidate", *options), stdin=asyncio.subprocess.DEVNULL
        )
        exit_code = await self._process.wait()
        logger.info("node %d: its coordinator has ended with %d", welcome.node, exit_code)
        await asyncio.sleep(self._heartbeat_s)  # whatever keeps it from leading may keep it again


def _how_to_resume(welcome: Welcome) -> str:
    command = ("resilient", "run", "--nodes", str(welcome.num_nodes), "--resume", welcome.run_directory)
    return shlex.join([*command, welcome.script, *welcome.arguments])
