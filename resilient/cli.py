"""The command line: ``run``, ``agent``, ``inject``, ``profile``, ``plan``, ``compare``, ``schedule``, ``simulate`` and
``demo``.

Exit codes of ``run``: 0 done; 1 failed; 3 stopped for lack of nodes, to be resumed; 4 a layer's state is lost and there
is no checkpoint; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from resilient import script_options
from resilient.compare_command import compare
from resilient.demo import demo
from resilient.errors import ResilientError
from resilient.messages import PHASES, Injection
from resilient.plan_command import plan
from resilient.profile_command import profile
from resilient.schedule_command import schedule
from resilient.simulation.command import simulate
from resilient.standard_output import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, help=__doc__)

_console = Console(stderr=True, highlight=False)
_ADDRESS = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):[1-9]\d{0,4}")


@app.command(
    context_settings=script_options.CONTEXT,
    help="Run a script on simulated nodes of this machine, with an embedded coordinator. Options come before the "
    "script. Ctrl-C or SIGTERM: end after the running step, with a checkpoint; again: at once.",
)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The job's script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help=script_options.ARGUMENTS_HELP)] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to start.")] = 1,
    workers_per_node: Annotated[int, typer.Option(min=1, help="Workers of each node.")] = 1,
    resume: Annotated[Path | None, typer.Option(help="Checkpoint folder to begin from.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<time> by default.")] = None,
    host: Annotated[str, typer.Option(help="This machine's address, for other machines to join.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")] = 0,
    network_gbit_s: Annotated[
        float | None, typer.Option(help="Between two nodes, for each worker; plans count it as unlimited by default.")
    ] = None,
    failure_interval_s: Annotated[
        float, typer.Option(help="Expected time between failures, over which a reconfiguration must pay.")
    ] = 3600.0,
    heartbeat_s: Annotated[float, typer.Option(help="Silence after which a node counts as lost.")] = 5.0,
    grace_s: Annotated[
        float,
        typer.Option(help="Time from the first Ctrl-C or SIGTERM to the end, for the running step and a checkpoint."),
    ] = 120.0,
    inject: Annotated[
        list[str] | None, typer.Option(help='A failure to cause, "node=2,step=15,phase=backward[,worker]"; repeatable.')
    ] = None,
    domains: Annotated[
        str,
        typer.Option(help='What the nodes fail together with, in turn: "zone-a,zone-b"; each by itself by default.'),
    ] = "",
    trace: Annotated[
        str, typer.Option(metavar="STEPS", help='Write what each worker did when in these steps: "10" or "10-12".')
    ] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
) -> None:
    from resilient.agent.launch import Launcher, LaunchOptions
    from resilient.live import make_view

    script_options.hint(context, arguments or ())
    run_directory = run_dir or new_run_directory()
    try:
        options = LaunchOptions(
            script=str(script),
            arguments=tuple(arguments or ()),
            num_nodes=nodes,
            workers_per_node=workers_per_node,
            run_directory=str(run_directory),
            resume=None if resume is None else str(resume),
            host=host,
            port=port,
            network_gbit_s=network_gbit_s,
            failure_interval_s=failure_interval_s,
            heartbeat_s=heartbeat_s,
            grace_s=grace_s,
            injections=tuple(parse_injection(text) for text in inject or ()),
            domains=tuple(label.strip() for label in domains.split(",") if label.strip()),
            trace=trace,
        )
        launcher = Launcher(options)
        with make_view(plain or None) as view:
            launcher.subscribe(view.on_event)
            exit_code = launcher.run()
    except (ResilientError, ValueError) as error:
        _console.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    if (run_directory / "events.jsonl").exists():
        _try_to_write("report", run_directory, lambda: _write_report(run_directory))
        if trace:
            _try_to_write("trace", run_directory, lambda: _write_trace(run_directory, trace))
    raise typer.Exit(exit_code)


@app.command(help="Join this machine to a running job. SIGTERM or Ctrl-C: leave it at the next step boundary.")
def agent(
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator's address.")],
    token: Annotated[str | None, typer.Option(envvar="RESILIENT_TOKEN", help="The job's token.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run", help="Take the token from this run's job.json.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers to start.")] = 1,
    heartbeat_s: Annotated[float, typer.Option(help="Silence after which the coordinator counts as gone.")] = 5.0,
    domain: Annotated[str, typer.Option(help="What this machine fails together with: its zone or rack.")] = "",
) -> None:
    from resilient.agent import node

    if not _ADDRESS.fullmatch(join):
        raise _usage_error(f"--join must be HOST:PORT, got {join!r}; take the address from the run's job.json")
    if not heartbeat_s > 0:
        raise _usage_error(f"--heartbeat-s must be > 0, got {heartbeat_s:g}; leave it out for the default")
    os.environ["RESILIENT_TOKEN"] = token or _read_job(run_dir).token
    options = ["--join", join, "--workers", str(workers), "--heartbeat-s", str(heartbeat_s), "--domain", domain]
    raise typer.Exit(node.main(options))


app.command(context_settings=script_options.CONTEXT)(profile)
app.command()(compare)
app.command()(demo)
app.command()(plan)
app.command()(schedule)
app.command()(simulate)

inject_app = typer.Typer(no_args_is_help=True, help="Cause failures and departures in a running job.")
app.add_typer(inject_app, name="inject")


@inject_app.command(help="Kill a node (its agent and all workers) or one worker with SIGKILL.")
def kill(
    node: Annotated[int, typer.Option(min=0, help="Number of the node.")],
    at_step: Annotated[int | None, typer.Option(min=1, help="In this step; at once by default.")] = None,
    at_phase: Annotated[str | None, typer.Option(help=f"In this phase: {', '.join(PHASES)}.")] = None,
    worker_only: Annotated[bool, typer.Option("--worker-only", help="Kill a worker, its agent survives.")] = False,
    run_dir: Annotated[Path | None, typer.Option("--run", help="Folder of the run; the newest by default.")] = None,
) -> None:
    _ask(run_dir, "inject", {"node": node, "at_step": at_step, "at_phase": at_phase, "worker_only": worker_only})


@inject_app.command(help="Have a node leave at the next step boundary, as SIGTERM to its agent or a spot notice would.")
def leave(
    node: Annotated[int, typer.Option(min=0, help="Number of the node.")],
    run_dir: Annotated[Path | None, typer.Option("--run", help="Folder of the run; the newest by default.")] = None,
) -> None:
    _ask(run_dir, "leave", {"node": node})


def _ask(run_dir: Path | None, what: str, body: dict[str, Any]) -> None:
    """Send a request to the coordinator of a run."""
    job = _read_job(run_dir)
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
        raise _usage_error(error.read().decode()) from None
    except OSError as error:
        run = run_dir or "the newest run in ./runs"
        raise _usage_error(
            f"the job of {run} does not answer at {job.address} ({error}); if another is running, name its folder "
            f"with --run"
        ) from None


def new_run_directory() -> Path:
    """Return the folder of a run that begins now, ``runs/<time>-<random>``."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def parse_injection(text: str) -> Injection:
    """Read ``node=2,step=15,phase=backward,worker``.

    Raises:
        ValueError: It does not have this form.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        fields[name] = value
    unknown = sorted(fields.keys() - {"node", "step", "phase", "worker"})
    phase = fields.get("phase")
    try:
        if unknown or (phase is not None and phase not in PHASES):
            raise ValueError(text)
        return Injection(
            node=int(fields["node"]),
            at_step=int(fields["step"]) if "step" in fields else None,
            at_phase=phase,
            worker_only="worker" in fields,
        )
    except (KeyError, ValueError):
        raise ValueError(
            f'--inject must look like "node=2,step=15,phase=backward[,worker]" with a phase of {", ".join(PHASES)}, '
            f"got {text!r}"
        ) from None


class _Listening(msgspec.Struct):
    """What a run leaves behind of where it listens."""

    address: str
    token: str


def _read_job(run_dir: Path | None) -> _Listening:
    """Read where a run listens; the newest run that left this behind when none is named."""
    if run_dir is None:
        found = sorted(Path("runs").glob("*/job.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise _usage_error("no run in ./runs; name the folder of the run with --run")
        run_dir = found[-1].parent
    try:
        return msgspec.json.decode((run_dir / "job.json").read_bytes(), type=_Listening)
    except (OSError, msgspec.DecodeError) as error:
        raise _usage_error(
            f"--run must be the folder of a run on this machine, got {run_dir} ({error}); choose one from ./runs"
        ) from None


def _usage_error(message: str) -> typer.Exit:
    _console.print(f"error: {message}", markup=False, style="red", soft_wrap=True)
    return typer.Exit(2)


def _try_to_write(what: str, run_directory: Path, write: Callable[[], None]) -> None:
    """Write, and warn where that fails: it changes nothing of what the exit code says of the job."""
    try:
        write()
    except (OSError, ValueError, KeyboardInterrupt) as error:
        text = f"warning: the job has ended, but there is no whole {what} in {run_directory}: {error!r}"
        _console.print(text, markup=False, style="yellow", soft_wrap=True)


def _write_report(run_directory: Path) -> None:
    from resilient.events import read_events
    from resilient.picture import draw_report
    from resilient.report import write_report

    report = write_report(run_directory)
    draw_report(read_events(run_directory / "events.jsonl"), report, run_directory / "report.png")


def _write_trace(run_directory: Path, steps: str) -> None:
    from resilient.chart import recorded_chart
    from resilient.schedule_picture import draw_charts
    from resilient.tracing import recorded_trace

    trace = recorded_trace(run_directory)
    if trace is None:
        _console.print(f"no trace: no worker here began a step of {steps}", markup=False)
        return
    path = run_directory / "trace.json"
    path.write_bytes(trace.to_json())
    _console.print(f"trace in {path}: open it in https://ui.perfetto.dev", markup=False, soft_wrap=True)
    chart = recorded_chart(trace)
    if chart is not None:
        draw_charts([chart], path.with_suffix(".png"))
