"""``resilient agent``: this machine joins a running job."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from resilient.cli.shared.errors import usage_error
from resilient.cli.shared.ranges import within
from resilient.cli.shared.run_folder import given_token, read_job, run_folder
from resilient.cli.shared.shown_options import LocalRanksFilter, Redirects, Tee
from resilient.common.extras import MissingPackageError
from resilient.errors import ArgumentError
from resilient.protocol.shown_streams import ShownStreams

_ADDRESS = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):[1-9]\d{0,4}")

_TOKEN_FIX = "give the job's token with --token-file or RESILIENT_TOKEN, or the folder of the run with --run"

AGENT_HELP = "Join this machine to a running job. SIGTERM or Ctrl-C: leave it at the next step boundary."


def agent(
    join: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="The coordinator's address, or where it is found: the job's --store."),
    ],
    token_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Has the job's token; else $RESILIENT_TOKEN has.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run", help="Take the token from this run's job.json.")] = None,
    workers: Annotated[int, typer.Option(callback=within(1), help="Workers to start.")] = 1,
    heartbeat_s: Annotated[float, typer.Option(help="Silence after which the coordinator counts as gone.")] = 5.0,
    domain: Annotated[str, typer.Option(help="What this machine fails together with: its zone or rack.")] = "",
    interface: Annotated[
        str,
        typer.Option(
            metavar="NAME|ADDRESS",
            help="Where other nodes reach this machine; by default the address at which it reaches the coordinator.",
        ),
    ] = "",
    tee: Tee = "0",
    redirects: Redirects = "3",
    local_ranks_filter: LocalRanksFilter = "",
) -> None:
    from resilient.agent import node
    from resilient.agent.leadership.leader_store import SCHEME, check_store
    from resilient.agent.network.addresses import address_of

    if join.startswith(SCHEME):
        try:
            check_store(join)
        except ArgumentError as error:
            raise usage_error(error.told(lambda name: {"store": "--join"}.get(name, name))) from None
        except MissingPackageError as error:
            raise usage_error(str(error)) from None
    elif not _ADDRESS.fullmatch(join):
        raise usage_error(f"--join must be HOST:PORT, got {join!r}; take the address from the run's job.json")
    if interface:
        try:
            address_of(interface)
        except ArgumentError as error:
            raise usage_error(error.told(lambda name: f"--{name}")) from None
    if not heartbeat_s > 0:
        raise usage_error(f"--heartbeat-s must be > 0, got {heartbeat_s:g}; leave it out for the default")
    os.environ["RESILIENT_TOKEN"] = given_token(token_file) or read_job(run_folder(run_dir, _TOKEN_FIX)).token
    options = ["--join", join, "--workers", str(workers), "--heartbeat-s", str(heartbeat_s), "--domain", domain]
    options += ["--interface", interface]
    options += ShownStreams(tee=tee, redirects=redirects, local_ranks=local_ranks_filter).options
    raise typer.Exit(node.main(options))
