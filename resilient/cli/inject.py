"""``resilient inject``: failures in a running job, on purpose."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from resilient.cli.shared.coordinator import RunFolder, ask
from resilient.cli.shared.ranges import within
from resilient.protocol.messages import Injection
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
    worker: Annotated[
        int | None, typer.Option(callback=within(0), help="Only this worker of the node, from 0; its agent survives.")
    ] = None,
    run_dir: RunFolder = None,
) -> None:
    injection = Injection(
        node=node, at_step=at_step, at_phase=at_phase, worker_only=worker is not None, worker=worker or 0
    )
    ask(run_dir, "inject", msgspec.to_builtins(injection))
