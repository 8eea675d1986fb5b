"""``resilient plan``: what templates a job would get on which machines, and what it keeps as they fail.

Owns options and files; :mod:`resilient.cli.plan.report` computes and :mod:`resilient.cli.plan.tables` prints. What is
slow to import is imported when the command runs. Must not import torch.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from resilient.cli.shared.job_options import MOST_NODES, JobOptions, described_job, refusals
from resilient.cli.shared.options import command_of
from resilient.cli.shared.output_files import check_outputs
from resilient.cli.shared.printing import progress_bar, table_console
from resilient.cli.shared.ranges import within
from resilient.common.extras import require
from resilient.errors import ArgumentError
from resilient.protocol.job_config import AUTO_SCHEDULE, SCHEDULES, training_schedule
from resilient.templates.plan import AUTO_DEGREE, Sharding, tensor_degree
from resilient.templates.schedules.kind import INTERLEAVED_KINDS, ScheduleKind, chunks_of

if TYPE_CHECKING:
    from resilient.cli.plan.report import PlanReport
    from resilient.templates.plan import PlanningProblem
    from resilient.templates.replan.schedule_choice import ScheduleChoice
    from resilient.templates.search.template_sizes import TooFewNodes

_DEFAULT_CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class PlanOptions(JobOptions):
    """The options of ``resilient plan``."""

    nodes: Annotated[int, typer.Option(callback=within(1, MOST_NODES), help="Nodes of the job.")]
    shard: Annotated[
        Sharding,
        typer.Option(
            help="Devices of a node divide the states of their stage and take microbatches of their own: never, where "
            "that makes steps shorter, or in every stage.",
        ),
    ] = Sharding.OFF
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N",
            help="Devices of a node that share each microbatch: so many in every stage, or whatever makes steps "
            "shortest; by default that with --model, and 1 with --profile.",
        ),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            help=f"What pipelines run: {', '.join(SCHEDULES)}, or {AUTO_SCHEDULE}, which chooses by simulation.",
        ),
    ] = ScheduleKind.ONE_F_ONE_B.value
    chunks: Annotated[
        int | None,
        typer.Option(
            callback=within(1),
            help="Stages of each device, of interleaved schedules; the most of them under auto. 2 by default.",
        ),
    ] = None
    slow: Annotated[
        list[float] | None,
        typer.Option(metavar="FACTOR", help="What if a node were that many times slower than the others; repeatable."),
    ] = None
    share: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help='What if every pipeline\'s microbatches are limited: "min=4,max=16,multiple-of=2", or some of it.',
        ),
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw what is kept as nodes are lost.")] = None
    templates_file: Annotated[Path | None, typer.Option("--templates", help="Write the templates here.")] = None


@command_of(PlanOptions)
def plan_command(ctx: typer.Context, options: PlanOptions) -> None:
    """Plan a job without its machines: templates, pipelines, and what throughput is kept as nodes are lost."""
    from resilient.cli.plan.tables import show_plan

    started = time.monotonic()
    with refusals(ctx):
        problem, samples = described_job(options)
        degree = tensor_degree(options.tp or ("1" if options.model is None else AUTO_DEGREE))
        profile = problem.profile if degree is None else problem.profile.at_degree(degree)
        problem, choice = _with_schedule(replace(problem, profile=profile, sharding=options.shard), options)
        outputs = (("--json", options.json_file), ("--png", options.png_file), ("--templates", options.templates_file))
        check_outputs(outputs, [options.profile])
        for package in ("pyomo", "highspy") if options.share is not None else ():
            require(package, "--share")
        report = _report(problem, options, samples, choice)
        _write(report, problem, options)
        console = table_console()
        show_plan(report, console)
        console.print(f"planned in {time.monotonic() - started:.1f} s", style="dim")


def _with_schedule(problem: PlanningProblem, options: PlanOptions) -> tuple[PlanningProblem, ScheduleChoice | None]:
    """Return the problem with the schedule that is asked for, and why it is this one where it was to be chosen."""
    name, chunks = training_schedule(options.schedule), _DEFAULT_CHUNKS if options.chunks is None else options.chunks
    if name == AUTO_SCHEDULE:
        from resilient.templates.replan.schedule_choice import choose_schedule

        # As a job on accelerators would choose: there, it can have one stage on each device.
        choice = choose_schedule(problem, options.nodes, chunks if options.device is None else 1)
        return choice.of(problem), choice
    kind = ScheduleKind(name)
    if options.chunks is not None and kind not in INTERLEAVED_KINDS:
        several = " or ".join(each.value for each in INTERLEAVED_KINDS)
        constraint = f"stand beside {{schedule}} {several}, or {AUTO_SCHEDULE}"
        raise ArgumentError("chunks", constraint, chunks, "leave it out")
    return replace(problem, schedule=kind, num_chunks=chunks_of(kind, chunks)), None


def _report(
    problem: PlanningProblem, options: PlanOptions, microbatch: int, choice: ScheduleChoice | None
) -> PlanReport:
    """Compute, on a terminal with a bar that goes when it is done."""
    from resilient.cli.plan.report import build_plan_report
    from resilient.templates.search.template_sizes import TooFewNodes

    console = Console(highlight=False, emoji=False)
    columns = (TextColumn("{task.description}"), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with progress_bar(*columns, console=console) as progress:
        task = progress.add_task("templates", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, description="losing nodes", completed=done, total=total)

        try:
            slow = options.slow or ()
            return build_plan_report(
                problem, options.nodes, microbatch, on_progress, share=options.share, slow=slow, choice=choice
            )
        except TooFewNodes as error:
            fix = f"{error.fix}{_other_ways(problem, error)}"
            raise ArgumentError(error.field, error.constraint, error.value, fix) from None


def _other_ways(problem: PlanningProblem, error: TooFewNodes) -> str:
    """Return what else than more nodes would do, arguments in braces."""
    ways: list[str] = []
    if problem.max_failures:
        ways.append("lower {max_failures}")
    if error.needed > (problem.max_failures + 1) * problem.min_pipeline_nodes:
        ways.append("use nodes with more memory ({gpus_per_node}, {device})")
    elif problem.min_pipeline_nodes > 1:
        ways.append("lower {min_pipeline_nodes}")
    return "".join(f", or {way}" for way in ways)


def _write(report: PlanReport, problem: PlanningProblem, options: PlanOptions) -> None:
    from resilient.cli.plan.figure import draw_plan
    from resilient.templates.replan.replan import templates_for

    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    if options.png_file is not None:
        draw_plan(report, options.png_file)
    if options.templates_file is not None:
        options.templates_file.write_bytes(templates_for(problem, report.num_nodes).to_json())
