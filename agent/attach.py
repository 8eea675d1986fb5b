"""Takes over a job whose coordinator is gone: what ``resilient run --attach`` does, and nodes that waited in vain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from resilient.agent.coordinator import Coordinator
from resilient.agent.job_control import JobControl
from resilient.agent.journal.stimulus_log import read_stimuli
from resilient.agent.journal.term import DeposedError, Term, newest_term, shows_life
from resilient.agent.leadership.knocking import session_for
from resilient.agent.leadership.leased_term import LeasedTerm
from resilient.agent.leadership.office import Office, read_office
from resilient.agent.membership.parts import events as ev
from resilient.agent.network.addresses import check_host
from resilient.errors import ArgumentError, ResilientError
from resilient.observability.run_report import write_report

_ANSWER_TIMEOUT_S = 5.0


class StillLedError(ResilientError):
    """The coordinator cannot be reached from here, but is at work: the network between is cut."""


async def _answers(office: Office) -> bool:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
    try:
        async with (
            session_for(office.token, timeout=timeout) as session,
            session.get(f"https://{office.address}/healthz") as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return False


async def _term_without_store(run_directory: Path, office: Office, after: int | None) -> Term:
    if await _answers(office):
        raise _is_led(run_directory, f"process {office.pid} listens at {office.address}")
    if await shows_life(run_directory):
        if after is not None and newest_term(run_directory) != after:
            raise DeposedError(f"another coordinator is about to take this job over (see {run_directory}/term)")
        raise StillLedError(
            f"process {office.pid} at {office.address} leads the job of {run_directory}, but cannot be reached from "
            f"here; mend the network between, or stop it on its machine before another takes over"
        )
    return Term.claim(run_directory, after=after)


def _is_led(run_directory: Path, how: str) -> ArgumentError:
    got = f"{run_directory}, for which {how}"
    return ArgumentError("attach", "be a run without a coordinator", got, "stop that one before")


def _office(run_directory: Path) -> Office:
    office = read_office(run_directory)
    if office is None:
        fix = "give one that this machine sees, or begin again with --resume"
        raise ArgumentError("attach", "be the folder of a run, with its job.json", str(run_directory), fix)
    return office


async def _inherit(
    run_directory: Path, office: Office, on_event: Callable[[dict[str, Any]], None], term: Term
) -> Coordinator:
    """Return a coordinator that has taken over what the one before left; it does not listen yet."""
    coordinator: Coordinator | None = None
    try:
        settings, _ = read_stimuli(run_directory / "stimuli.jsonl")
        coordinator = Coordinator(settings, office.token, on_event, term, follows=True)
        await coordinator.inherit()
    except BaseException as error:
        if coordinator is not None:
            await coordinator.close()
        else:
            term.close()
        if isinstance(error, ArgumentError) or not isinstance(error, OSError | ValueError):
            raise
        fix = "its nodes end by themselves; go on from its newest checkpoint with --resume"
        got = f"{run_directory} ({error})"
        raise ArgumentError("attach", "be a run whose stimuli.jsonl is whole", got, fix) from error
    return coordinator


async def succeed(run_directory: Path, on_event: Callable[[dict[str, Any]], None]) -> Coordinator | None:
    """Take over a job whose coordinators are elected; return the next one, which does not listen yet.

    Args:
        run_directory: Folder of the run.
        on_event: Given every event of the log, from the beginning.

    Returns:
        The coordinator; None if somebody else leads the job.

    Raises:
        EtcdUnreachableError: Its store does not answer.
        ResilientError, OSError, ValueError: It cannot be taken over from here, or need not be.
    """
    office = _office(run_directory)
    heartbeat_s = read_stimuli(run_directory / "stimuli.jsonl")[0].heartbeat_s
    term = await LeasedTerm.win(office.store, run_directory, heartbeat_s)
    return None if term is None else await _inherit(run_directory, office, on_event, term)


async def succeed_without_store(
    run_directory: Path, on_event: Callable[[dict[str, Any]], None], term: int
) -> Coordinator:
    """Take a job over to end it, whoever its store says leads it: the term in the run's folder decides alone.

    Args:
        run_directory: Folder of the run.
        on_event: Given every event of the log, from the beginning.
        term: Of the coordinator that is gone; who has begun a later one leads the job.

    Returns:
        The next coordinator, which does not listen yet.

    Raises:
        StillLedError: The coordinator is at work.
        ResilientError, OSError, ValueError: It cannot be taken over from here, or need not be.
    """
    office = _office(run_directory)
    begun = await _term_without_store(run_directory, office, term)
    return await _inherit(run_directory, office, on_event, begun)


class Attachment(JobControl):
    """Takes a job over and runs it to its end. Its nodes go on, and come back to the new coordinator by themselves.

    Args:
        run_directory: Folder of the run.
        host: Address to listen on; None for the one before's.
        port: Port to listen on; None for the one before's, if it is free.
    """

    def __init__(self, run_directory: str | Path, *, host: str | None = None, port: int | None = None) -> None:
        super().__init__(Path(run_directory).resolve())
        self._host, self._port = host, port

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        if self._host is not None:
            await asyncio.to_thread(check_host, self._host)
        office = _office(self._run_directory)
        if office.store:
            coordinator = await succeed(self._run_directory, self._on_event)
            if coordinator is None:
                raise _is_led(self._run_directory, f"{office.store} says that somebody leads it")
        else:
            term = await _term_without_store(self._run_directory, office, None)
            coordinator = await _inherit(self._run_directory, office, self._on_event, term)
        self._coordinator = coordinator
        try:
            host = office.host if self._host is None else self._host
            if self._port is None:
                await listen_where_it_was(coordinator, host, office.port)
            else:
                await self._listen(coordinator, host, self._port)
            return await coordinator.wait()
        finally:
            await coordinator.close()


async def listen_where_it_was(coordinator: Coordinator, host: str, port: int) -> None:
    """Have a coordinator listen, at another port if somebody else is at this one.

    Raises:
        OSError: It is no address of this machine.
        DeposedError: Another coordinator has taken the job over.
    """
    try:
        await coordinator.start(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        await coordinator.start(host, 0)


async def end_orphaned_job(run_directory: str, host: str, term: int, reason: str) -> None:
    """Take a job over for which nobody else has, and end it with a checkpoint, to be resumed.

    Args:
        run_directory: Folder of the run.
        host: Address of this machine by which the others reach it.
        term: Of the coordinator that is gone.
        reason: Why.

    Raises:
        StillLedError: The coordinator is at work.
        ResilientError: Another one takes it over.
        OSError, ValueError: It cannot be taken over from here, or need not be.
    """
    folder = Path(run_directory)
    coordinator = await succeed_without_store(folder, lambda _: None, term)
    try:
        await coordinator.start(host, 0)
        if not coordinator.is_ending:  # or whoever was in office before had begun to
            coordinator.feed(ev.Interrupted(reason=reason, is_orphaned=True))
        await finish(coordinator, folder)
    finally:
        await coordinator.close()


async def finish(coordinator: Coordinator, run_directory: Path) -> None:
    """Serve a job until it is over, and write its report.

    Raises:
        DeposedError: Another coordinator has taken it over.
    """
    await coordinator.wait()
    with contextlib.suppress(OSError, ValueError):  # the job has ended as it should, with a report or without
        await asyncio.to_thread(write_report, run_directory)
