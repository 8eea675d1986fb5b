"""The process in which a node stands for election, and leads the job if it is elected.

``python -m resilient.agent.candidate --run RUN --host ADDRESS --parent PID --dialect DIALECT``: dies with the node's
agent, its parent, which speaks that dialect; resigns at SIGTERM. Exit code 0: it led the job to its end, was not
elected, or has resigned. Must not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from resilient.agent.attach import finish, listen_where_it_was, succeed
from resilient.agent.journal.term import DeposedError
from resilient.agent.leadership.office import read_office
from resilient.agent.network.dialect import dialect
from resilient.common.printable import log_printably
from resilient.common.processes import die_with_parent
from resilient.errors import ResilientError

logger = logging.getLogger(__name__)


async def _stand(run_directory: Path, host: str) -> None:
    coordinator = await succeed(run_directory, lambda _: None)
    if coordinator is None:
        return
    told = DeposedError(f"this coordinator was told to resign, in term {coordinator.term}")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, coordinator.resign, told)
    try:
        office = read_office(run_directory)
        await listen_where_it_was(coordinator, host, 0 if office is None else office.port)
        await finish(coordinator, run_directory)
    finally:
        await coordinator.close()


def main() -> int:
    """Stand once; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--dialect", required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the agent decides who ends
    log_printably()
    if options.dialect != dialect():  # no node would understand it
        logger.error("cannot lead the job: resilient was changed here since the node began, to %s", dialect())
        return 1
    try:
        asyncio.run(_stand(options.run, options.host))
    except DeposedError as error:
        logger.warning("%s", error)
    except (ResilientError, OSError, ValueError) as error:
        logger.error("cannot lead the job: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
