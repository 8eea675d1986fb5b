"""``resilient run``: a script on simulated nodes of this machine, with an embedded coordinator.

Exit codes: 0 done; 1 failed; 2 options that cannot be used; 3 stopped for lack of nodes, to be resumed; 4 a layer's
state is lost and there is no checkpoint; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from resilient.cli.shared import script_options
from resilient.cli.shared.errors import console, told, usage_error
from resilient.cli.shared.output_files import drawing
from resilient.cli.shared.ranges import least_to_most, nodes_of, within
from resilient.cli.shared.renamed_options import renamed
from resilient.cli.shared.run_folder import given_token, new_run_directory, newest_run
from resilient.cli.shared.shown_options import LocalRanksFilter, Redirects, Tee
from resilient.common.extras import MissingPackageError
from resilient.common.files import write_whole
from resilient.common.network.etcd_connection import EtcdUnreachableError
from resilient.common.printable import printable
from resilient.errors import ArgumentError, ResilientError
from resilient.planners.registry import AUTO, PLANNERS
from resilient.protocol.alike import ALLOWABLE
from resilient.protocol.foreign_launchers import check_started_once
from resilient.protocol.job_config import AUTO_SCHEDULE, SCHEDULES
from resilient.protocol.messages import Injection
from resilient.protocol.phases import PHASES, check_phase
from resilient.templates.common.words import look_up
from resilient.templates.plan import Sharding

if TYPE_CHECKING:
    from resilient.agent.job_control import JobControl

RUN_HELP = (
    "Run a script on simulated nodes of this machine, with an embedded coordinator. Options come before the "
    "script. Ctrl-C or SIGTERM: end after the running step, with a checkpoint; again: at once."
)


def run(
    context: typer.Context,
    script: Annotated[Path | None, typer.Argument(exists=True, dir_okay=False, help="The job's script.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help=script_options.ARGUMENTS_HELP)] = None,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            callback=least_to_most,
            help="Nodes to start with. MIN:MAX: MIN, and as others join at most MAX train, while the rest stand by.",
        ),
    ] = "1",
    local_nodes: Annotated[
        bool,
        typer.Option(
            "--local-nodes/--no-local-nodes",
            help="Start nodes here; or wait for agents of other machines.",
        ),
    ] = True,
    token_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Has the token that agents show; else RESILIENT_TOKEN, or new."),
    ] = None,
    workers_per_node: Annotated[int, typer.Option(callback=within(1), help="Workers of each node.")] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|latest", help="Checkpoint to begin from, or a run for its newest; of any run here."
        ),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<time> by default.")] = None,
    store: Annotated[
        str,
        typer.Option(
            metavar="etcd://HOST:PORT,.../PREFIX",
            help="etcd, where a node is elected to lead the job when its coordinator is gone; a prefix for each job.",
        ),
    ] = "",
    attach: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Take over the job of this run's folder, whose coordinator is gone while its nodes train on; "
            "without a script.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="This machine's address, for other machines to join.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(callback=within(0, 65535), help="Port to listen on; 0 for any that is free.")
    ] = 0,
    port_range: Annotated[
        str,
        typer.Option(
            metavar="FIRST:LAST",
            help="Ports that the job's sockets listen at, on all machines, such as 30000:30100; but for those of gloo "
            "and NCCL, which the system chooses.",
        ),
    ] = "",
    network_gbit_s: Annotated[
        float | None, typer.Option(help="Between two nodes, for each worker; plans count it as unlimited by default.")
    ] = None,
    failure_interval_s: Annotated[
        float, typer.Option(help="Expected time between failures, over which a reconfiguration must pay.")
    ] = 3600.0,
    shard: Annotated[
        Sharding,
        typer.Option(
            help="Workers of a node divide the states of their stage and take microbatches of their own: never, where "
            "that makes steps shorter, or in every stage.",
        ),
    ] = Sharding.OFF,
    tp: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Workers of a node that share each microbatch (tensor parallelism): so many in every stage, or "
            "whatever makes steps shortest.",
        ),
    ] = "1",
    tp_chunks: Annotated[
        int | None,
        typer.Option(
            callback=within(1),
            help="Chunks in which they exchange its tokens while they compute, instead of what the script asks for; 1 "
            "for all before or after.",
        ),
    ] = None,
    heartbeat_s: Annotated[float, typer.Option(help="Silence after which a node counts as lost.")] = 5.0,
    orphan_s: Annotated[
        float,
        typer.Option(help="Time that nodes train on without a coordinator before they end the job with a checkpoint."),
    ] = 600.0,
    grace_s: Annotated[
        float,
        typer.Option(help="Time from the first Ctrl-C or SIGTERM to the end, for the running step and a checkpoint."),
    ] = 120.0,
    wait_for_nodes_s: Annotated[
        float,
        typer.Option(
            help="Time for others to join when nodes went away and too few are left; 0 for stopping at once. A job "
            "that begins with too few --nodes stops at once in any case."
        ),
    ] = 10.0,
    inject: Annotated[
        list[str] | None,
        typer.Option(help='A failure to cause, "node=2,step=15,phase=backward[,worker[=1]]"; repeatable.'),
    ] = None,
    domains: Annotated[
        str,
        typer.Option(help='What the nodes fail together with, in turn: "zone-a,zone-b"; each by itself by default.'),
    ] = "",
    trace_steps: Annotated[
        str, typer.Option(metavar="STEPS", help='Write what each worker did when in these steps: "10" or "10-12".')
    ] = "",
    planner: Annotated[
        str, typer.Option(help="Places samples of multimodal models, instead of what the script asks for.")
    ] = "",
    schedule: Annotated[
        str,
        typer.Option(
            help=f"What pipelines run, instead of what the script asks for: {', '.join(SCHEDULES)}, or "
            f"{AUTO_SCHEDULE}, which chooses by simulation.",
        ),
    ] = "",
    tee: Tee = "0",
    redirects: Redirects = "3",
    local_ranks_filter: LocalRanksFilter = "",
    allow_different: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"What may differ between nodes, which is refused otherwise: {', '.join(ALLOWABLE)}; repeatable.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
    old_trace: Annotated[str | None, renamed("--trace", "--trace-steps")] = None,
) -> None:
    from resilient.agent.launch import Launcher
    from resilient.agent.launch_options import LaunchOptions

    if attach is not None:
        _take_over(context, attach, script, plain=plain)
    if script is None:
        raise usage_error("SCRIPT must be given; without one, a job can only be taken over, with --attach RUN")
    script_options.hint(context, arguments or ())
    run_directory = run_dir or new_run_directory()
    num_nodes, most_nodes = nodes_of(nodes)
    if str(resume) == "latest":
        resume = newest_run(run_directory)
        console.print(f"going on from the newest checkpoint of {resume}", markup=False, soft_wrap=True)
    try:
        check_started_once(os.environ, [str(script), *(arguments or ())], is_script=False)
        if planner:
            look_up("planner", planner, dict.fromkeys((AUTO, *PLANNERS)))
        options = LaunchOptions(
            script=str(script),
            arguments=tuple(arguments or ()),
            num_nodes=num_nodes,
            most_nodes=most_nodes,
            local_nodes=local_nodes,
            token=given_token(token_file),
            token_file="" if token_file is None else str(token_file.absolute()),
            workers_per_node=workers_per_node,
            run_directory=str(run_directory),
            resume=None if resume is None else str(resume),
            host=host,
            port=port,
            port_range=port_range,
            network_gbit_s=network_gbit_s,
            failure_interval_s=failure_interval_s,
            shard=shard.value,
            tp=tp,
            tp_chunks=tp_chunks,
            heartbeat_s=heartbeat_s,
            orphan_s=orphan_s,
            grace_s=grace_s,
            wait_for_nodes_s=wait_for_nodes_s,
            injections=tuple(parse_injection(text) for text in inject or ()),
            domains=tuple(label.strip() for label in domains.split(",") if label.strip()),
            trace_steps=trace_steps,
            planner=planner,
            schedule=schedule,
            allow_different=tuple(allow_different or ()),
            store=store,
            tee=tee,
            redirects=redirects,
            local_ranks_filter=local_ranks_filter,
            validate=os.environ.get("RESILIENT_VALIDATE", "") not in ("", "0"),
        )
    except (ResilientError, ValueError) as error:  # of the options themselves: nothing has begun
        raise usage_error(_said(context, error)) from None
    try:
        exit_code = _run_to_its_end(Launcher(options), run_directory, trace_steps, plain=plain)
    except (ResilientError, ValueError, EtcdUnreachableError, MissingPackageError) as error:
        raise _failed(context, error) from None
    raise typer.Exit(exit_code)


def _take_over(context: typer.Context, run_directory: Path, script: Path | None, *, plain: bool) -> NoReturn:
    from resilient.agent.attach import Attachment

    if script is not None:
        raise usage_error(f"--attach RUN must stand without a script, got {script}; the run knows its own")
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name: source is not None and source.name == "COMMANDLINE" for name, source in sources.items()}
    refused = [name for name in given if given[name] and name not in ("attach", "host", "port", "plain", "arguments")]
    if refused:
        option = f"--{refused[0].replace('_', '-')}"
        raise usage_error(f"--attach RUN must stand without {option}; the job keeps what it was started with")
    where = {name: context.params[name] for name in ("host", "port") if given[name]}
    try:
        exit_code = _run_to_its_end(Attachment(run_directory, **where), run_directory, "", plain=plain)
    except (ResilientError, ValueError, EtcdUnreachableError, MissingPackageError) as error:
        raise _failed(context, error) from None
    raise typer.Exit(exit_code)


def _run_to_its_end(job: JobControl, run_directory: Path, trace_steps: str, *, plain: bool) -> int:
    from resilient.observability.live_view import make_view

    with job.signals(for_good=True):  # a second one does not keep the report from being written
        with make_view(plain or None) as view:
            job.subscribe(view.on_event)
            exit_code = job.run()
        _conclude(run_directory, trace_steps)
        with contextlib.suppress(OSError, SystemExit):  # rich's, when nobody reads any more
            view.print_ending()
    return exit_code


def _failed(context: typer.Context, error: Exception) -> typer.Exit:
    console.print(f"error: {printable(_said(context, error))}", markup=False, style="red", soft_wrap=True)
    return typer.Exit(1)


def _said(context: typer.Context, error: Exception) -> str:
    return told(error, context, {"run_directory": "--run-dir", "num_nodes": "--nodes"})


def parse_injection(text: str) -> Injection:
    """Read ``node=2,step=15,phase=backward,worker``, or ``worker=1`` for another than the node's first worker.

    Raises:
        ArgumentError: It does not have this form.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        fields[name] = value
    unknown = sorted(fields.keys() - {"node", "step", "phase", "worker"})
    phase = fields.get("phase")
    try:
        if unknown:
            raise ValueError(text)
        node, at_step = int(fields["node"]), int(fields["step"]) if "step" in fields else None
        if phase is not None:
            check_phase(phase)
        worker = int(fields.get("worker") or 0)
        if node < 0 or worker < 0 or (at_step is not None and at_step < 1):
            raise ValueError(text)
        return Injection(
            node=node,
            at_step=at_step,
            at_phase=phase,
            worker_only="worker" in fields,
            worker=worker,
        )
    except (KeyError, ValueError):
        form, fix = '"node=2,step=15,phase=backward[,worker[=1]]"', f"phases are {', '.join(PHASES)}"
        raise ArgumentError("inject", f"look like {form}", repr(text), fix) from None


def _conclude(run_directory: Path, trace_steps: str) -> None:
    if (run_directory / "events.jsonl").exists():
        _try_to_write("report", run_directory, lambda: _write_report(run_directory))
        if trace_steps:
            _try_to_write("trace", run_directory, lambda: _write_trace(run_directory, trace_steps))


def _try_to_write(what: str, run_directory: Path, write: Callable[[], None]) -> None:
    """Write, and warn where that fails: it changes nothing of what the exit code says of the job."""
    try:
        write()
    except (OSError, ValueError, KeyboardInterrupt) as error:
        text = f"warning: the job has ended, but there is no whole {what} in {run_directory}: {error!r}"
        console.print(text, markup=False, style="yellow", soft_wrap=True)


def _write_report(run_directory: Path) -> None:
    from resilient.observability.event_log import read_events
    from resilient.observability.figures.run_figure import draw_report
    from resilient.observability.run_report import write_report

    report = write_report(run_directory)
    with drawing(run_directory / "report.png") as picture:
        draw_report(read_events(run_directory / "events.jsonl"), report, picture)


def _write_trace(run_directory: Path, steps: str) -> None:
    from resilient.observability.figures.bars import planned_chart, recorded_chart
    from resilient.observability.figures.gantt import draw_charts
    from resilient.observability.planned_steps import differences, differences_text, planned_steps, with_plans
    from resilient.observability.step_trace import recorded_trace, traced_steps

    traced = traced_steps(run_directory)
    trace = recorded_trace(run_directory, traced)
    if trace is None:
        console.print(f"no trace: no worker here began a step of {steps}", markup=False)
        return
    planned = planned_steps(traced)
    trace = with_plans(trace, planned)
    path = run_directory / "trace.json"
    write_whole(path, trace.to_json())
    console.print(f"trace in {path}: open it in https://ui.perfetto.dev", markup=False, soft_wrap=True)
    found = differences(planned)
    if found is not None:
        console.print(differences_text(found), markup=False, soft_wrap=True)
    charts = [chart for chart in (planned_chart(trace), recorded_chart(trace)) if chart is not None]
    if charts:
        with drawing(path.with_suffix(".png")) as picture:
            draw_charts(charts, picture)
