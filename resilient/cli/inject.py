"""``resilient inject``: failures and departures in a running job, on purpose."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from resilient.cli.shared.errors import usage_error
from resilient.cli.shared.ranges import within
from resilient.cli.shared.run_folder import read_job
from resilient.protocol.messages import PHASES

inject = typer.Typer(no_args_is_help=True, help="Cause failures and departures in a running job.")


@inject.command(help="Kill a node (its agent and all workers) or one worker with SIGKILL.")
def kill(
    node: Annotated[int, typer.Option(callback=within(0), help="Number of the node.")],
    at_step: Annotated[int | None, typer.Option(callback=within(1), help="In this step; at once by default.")] = None,
    at_phase: Annotated[str | None, typer.Option(help=f"In this phase: {', '.join(PHASES)}.")] = None,
    worker_only: Annotated[bool, typer.Option("--worker-only", help="Kill a worker, its agent survives.")] = False,
    run_dir: Annotated[Path | None, typer.Option("--run", help="Folder of the run; the newest by default.")] = None,
) -> None:
    _ask(run_dir, "inject", {"node": node, "at_step": at_step, "at_phase": at_phase, "worker_only": worker_only})


@inject.command(help="Have a node leave at the next step boundary, as SIGTERM to its agent or a spot notice would.")
def leave(
    node: Annotated[int, typer.Option(callback=within(0), help="Number of the node.")],
    run_dir: Annotated[Path | None, typer.Option("--run", help="Folder of the run; the newest by default.")] = None,
) -> None:
    _ask(run_dir, "leave", {"node": node})


def _ask(run_dir: Path | None, what: str, body: dict[str, Any]) -> None:
    """Send a request to the coordinator of a run."""
    job = read_job(run_dir)
    request = urllib.request.Request(
        f"http://{job.address}/{what}",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {job.token}", "Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for the web
    try:
        with direct.open(request, timeout=10):
            pass
    except urllib.error.HTTPError as error:
        raise usage_error(error.read().decode()) from None
    except OSError as error:
        run = run_dir or "the newest run in ./runs"
        raise usage_error(
            f"the job of {run} does not answer at {job.address} ({error}); if another is running, name its folder "
            f"with --run"
        ) from None
