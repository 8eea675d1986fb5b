"""``resilient inject``: failures in a running job, on purpose."""

from __future__ import annotations

from typing import Annotated

import typer

from resilient.cli.shared.coordinator import RunFolder, ask
from resilient.cli.shared.ranges import within
from resilient.protocol.phases import PHASES

inject = typer.Typer(no_args_is_help=True, help="Cause failures in a running job.")


@inject.callback()
def _group() -> None:
    """Keep ``kill`` a word of its own, though there is no other."""


@inject.command(help="Kill a node (its agent and all workers) or one worker with SIGKILL.")
def kill(
    node: Annotated[int, typer.Option(callback=within(0), help="Number of the node.")],
    at_step: Annotated[int | None, typer.Option(callback=within(1), help="In this step; at once by default.")] = None,
    at_phase: Annotated[
        str | None, typer.Option(help=f"In this phase: {', '.join(PHASES)}; or of a unit: vision.forward.")
    ] = None,
    worker_only: Annotated[bool, typer.Option("--worker-only", help="Kill a worker, its agent survives.")] = False,
    run_dir: RunFolder = None,
) -> None:
    ask(run_dir, "inject", {"node": node, "at_step": at_step, "at_phase": at_phase, "worker_only": worker_only})
