"""The command line: ``run``, ``agent``, ``status``, ``events``, ``logs``, ``drain``, ``stop``, ``inject``, ``replay``,
``profile``, ``plan``, ``compare``, ``schedule``, ``simulate`` and ``demo``.

Exit codes of ``run``: 0 done; 1 failed; 3 stopped for lack of nodes, to be resumed; 4 a layer's state is lost and there
is no checkpoint; 130 interrupted.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from resilient.cli import agent, run
from resilient.cli.compare.command import compare_command
from resilient.cli.demo import demo
from resilient.cli.follow import events, logs
from resilient.cli.inject import inject
from resilient.cli.operate import drain, status, stop
from resilient.cli.plan.command import plan_command
from resilient.cli.profile import profile
from resilient.cli.replay import REPLAY_HELP, replay_command
from resilient.cli.schedule.command import schedule_command
from resilient.cli.shared import script_options
from resilient.cli.shared.renamed_options import CommandWithOldOptions
from resilient.cli.shared.standard_output import Commands
from resilient.cli.simulate.command import simulate_command

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)


def _show_version(wanted: bool) -> None:
    """Print the versions of this package and of torch, which is not imported for that, and end."""
    if wanted:
        typer.echo(f"resilient {_version('resilient-train')}, torch {_version('torch')}")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its sources, say
        return "(not installed)"


@app.callback(help=__doc__)
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Take the options of all commands together."""


app.command(cls=CommandWithOldOptions, context_settings=script_options.CONTEXT, help=run.RUN_HELP)(run.run)
app.command(help=agent.AGENT_HELP)(agent.agent)
app.command(context_settings=script_options.CONTEXT)(profile)
app.command("compare")(compare_command)
app.command()(demo)
app.command("plan")(plan_command)
app.command("replay", help=REPLAY_HELP)(replay_command)
app.command("schedule", cls=CommandWithOldOptions)(schedule_command)
app.command("simulate", cls=CommandWithOldOptions)(simulate_command)
app.command()(status)
app.command()(events)
app.command()(logs)
app.command()(drain)
app.command()(stop)
app.add_typer(inject, name="inject")
