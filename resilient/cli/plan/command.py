"""``resilient plan``: what templates a job would get on which machines, and what it keeps as they fail.

Owns options and files; :mod:`resilient.cli.plan.report` computes and :mod:`resilient.cli.plan.tables` prints. What is
slow to import is imported when the command runs. Must not import torch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from resilient.cli.shared.job_options import (
    MOST_NODES,
    BatchOption,
    DeviceOption,
    FailuresOption,
    FrozenOption,
    GpusOption,
    MicrobatchOption,
    ModelOption,
    NetworkOption,
    PipelineNodesOption,
    ProfileOption,
    SeqLenOption,
    described_job,
    refusals,
    table_console,
)
from resilient.cli.shared.output_files import check_outputs
from resilient.errors import ArgumentError

if TYPE_CHECKING:
    from resilient.cli.plan.report import PlanReport
    from resilient.templates.plan import PlanningProblem
    from resilient.templates.search.template_sizes import TooFewNodes


def plan_command(
    ctx: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes of the job.")],
    model: ModelOption = None,
    profile: ProfileOption = None,
    device: DeviceOption = None,
    gpus_per_node: GpusOption = 1,
    network_gbit_s: NetworkOption = None,
    max_failures: FailuresOption = 1,
    min_pipeline_nodes: PipelineNodesOption = 1,
    global_batch: BatchOption = None,
    microbatch: MicrobatchOption = None,
    seq_len: SeqLenOption = None,
    frozen: FrozenOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw what is kept as nodes are lost.")] = None,
    templates_file: Annotated[Path | None, typer.Option("--templates", help="Write the templates here.")] = None,
) -> None:
    """Plan a job without its machines: templates, pipelines, and what throughput is kept as nodes are lost."""
    from resilient.cli.plan.tables import show_plan

    started = time.monotonic()
    with refusals(ctx):
        problem, samples = described_job(
            model=model,
            profile=profile,
            device=device,
            gpus_per_node=gpus_per_node,
            network_gbit_s=network_gbit_s,
            max_failures=max_failures,
            min_pipeline_nodes=min_pipeline_nodes,
            global_batch=global_batch,
            microbatch=microbatch,
            seq_len=seq_len,
            frozen=frozen,
        )
        check_outputs([("--json", json_file), ("--png", png_file), ("--templates", templates_file)], [profile])
        report = _report(problem, nodes, samples)
        _write(report, problem, json_file, png_file, templates_file)
        console = table_console()
        show_plan(report, console)
        console.print(f"planned in {time.monotonic() - started:.1f} s", style="dim")


def _report(problem: PlanningProblem, num_nodes: int, microbatch: int) -> PlanReport:
    """Compute, on a terminal with a bar that goes when it is done."""
    from resilient.cli.plan.report import build_plan_report
    from resilient.templates.search.template_sizes import TooFewNodes

    console = Console(highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("templates", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, description="losing nodes", completed=done, total=total)

        try:
            return build_plan_report(problem, num_nodes, microbatch, on_progress)
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


def _write(
    report: PlanReport,
    problem: PlanningProblem,
    json_file: Path | None,
    png_file: Path | None,
    templates_file: Path | None,
) -> None:
    from resilient.cli.plan.figure import draw_plan
    from resilient.templates.replan.replan import templates_for

    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    if png_file is not None:
        draw_plan(report, png_file)
    if templates_file is not None:
        templates_file.write_bytes(templates_for(problem, report.num_nodes).to_json())
