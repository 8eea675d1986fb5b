"""``resilient plan``: what templates a job would get on which machines, and what it keeps as they fail.

Owns options and files; :mod:`resilient.plan_report` computes and :mod:`resilient.plan_tables` prints. What is slow to
import is imported when the command runs. Must not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from resilient.plan_report import PlanReport
    from resilient.templates.cluster import Cluster
    from resilient.templates.nodespec import TooFewNodes
    from resilient.templates.plan import Problem
    from resilient.templates.profile import ModelProfile


def plan(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")],
    model: Annotated[str | None, typer.Option(help="A published model, to plan for without having it.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A measured profile instead, from `resilient profile`."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The accelerator; with --profile for its memory and links alone.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Devices of each node.")] = 1,
    network_gbit_s: Annotated[
        float | None, typer.Option(help="Between two nodes, for each device; the usual network by default.")
    ] = None,
    max_failures: Annotated[int, typer.Option(min=0, help="Node failures to survive at the same time.")] = 1,
    min_pipeline_nodes: Annotated[int, typer.Option(min=1, help="Fewest nodes of a pipeline.")] = 1,
    global_batch: Annotated[int | None, typer.Option(help="Samples of a step; the model's usual by default.")] = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Samples of a microbatch; the model's usual, or the measured one, by default.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample; the model's usual by default.")] = None,
    frozen: Annotated[
        str | None, typer.Option(metavar="UNITS", help='Units that are not trained, such as "vision,llm".')
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw what is kept as nodes are lost.")] = None,
    templates_file: Annotated[Path | None, typer.Option("--templates", help="Write the templates here.")] = None,
) -> None:
    """Plan a job without its machines: templates, pipelines, and what throughput is kept as nodes are lost."""
    from resilient.plan_tables import show

    console = Console(highlight=False)
    started = time.monotonic()
    units = tuple(unit.strip() for unit in frozen.split(",")) if frozen else ()
    try:
        cluster = _cluster(device, gpus_per_node, network_gbit_s)
        if profile is not None:
            if model is not None or seq_len is not None:
                raise ValueError("--profile must come without --model and --seq-len: it says both; leave them out")
            costs = read_profile(profile, units)
            global_batch, microbatch = _measured_batch(costs, global_batch, microbatch)
        else:
            costs, global_batch, microbatch = _derive(model, device, global_batch, microbatch, seq_len, units)
        problem = _problem(costs, cluster, global_batch, microbatch, max_failures, min_pipeline_nodes)
        report = _report(problem, nodes, microbatch, console)
        _write(report, problem, json_file, png_file, templates_file)
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(2) from None
    show(report, console)
    console.print(f"planned in {time.monotonic() - started:.1f} s", style="dim")


def _cluster(device: str | None, devices_per_node: int, network_gbit_s: float | None) -> Cluster:
    """Without a device, its memory is not limited and what is not known of its links costs nothing."""
    from resilient.templates.cluster import Cluster, Link
    from resilient.templates.devices import cluster_of, network

    if network_gbit_s is not None and not network_gbit_s > 0:
        raise ValueError(f"network_gbit_s must be > 0, got {network_gbit_s}; leave it out for the usual network")
    inter_node = None if network_gbit_s is None else network(network_gbit_s)
    if device is None:
        return Cluster(devices_per_node=devices_per_node, inter_node=inter_node or Link())
    return cluster_of(device, devices_per_node, inter_node=inter_node)


def _derive(
    model: str | None,
    device: str | None,
    global_batch: int | None,
    microbatch: int | None,
    seq_len: int | None,
    frozen: Sequence[str],
) -> tuple[ModelProfile, int, int]:
    from resilient.templates.derive import derive_profile
    from resilient.templates.devices import DEVICES
    from resilient.templates.known_models import MODELS

    if model is None:
        raise ValueError(f"--model or --profile must be given, got neither; --model can be {', '.join(MODELS)}")
    if device is None:
        raise ValueError(f"--device must be given with --model, got none; it can be {', '.join(DEVICES)}")
    costs = derive_profile(model, device, microbatch=microbatch, seq_len=seq_len, frozen=frozen)
    usual = MODELS[model]
    return (
        costs,
        usual.global_batch if global_batch is None else global_batch,
        usual.microbatch if microbatch is None else microbatch,
    )


def read_profile(path: Path, frozen: Sequence[str]) -> ModelProfile:
    """Read what ``--profile`` names.

    Args:
        path: The file.
        frozen: Units that are not trained.

    Raises:
        ValueError: It is no profile, or has no such units.
    """
    from resilient.templates.derive import freeze
    from resilient.templates.profile import ModelProfile

    try:
        measured = ModelProfile.from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"--profile must be a file that `resilient profile` wrote, got {path} ({error}); write it again"
        ) from None
    return freeze(measured, frozen) if frozen else measured


def _measured_batch(costs: ModelProfile, global_batch: int | None, microbatch: int | None) -> tuple[int, int]:
    measured = costs.microbatch
    microbatch = measured if microbatch is None else microbatch
    if measured is not None and microbatch != measured:
        raise ValueError(
            f"--microbatch must be {measured}, the one that --profile is of, got {microbatch}; leave it out, or "
            f"profile with another"
        )
    if global_batch is None or microbatch is None:
        raise ValueError(
            "--global-batch and --microbatch must be given with --profile, got "
            f"{global_batch or 'none'} and {microbatch or 'none'}; the microbatch is the one that was measured"
        )
    return global_batch, microbatch


def _problem(
    costs: ModelProfile,
    cluster: Cluster,
    global_batch: int,
    microbatch: int,
    max_failures: int,
    min_pipeline_nodes: int,
) -> Problem:
    from resilient.templates.batch import check_batch
    from resilient.templates.plan import Problem

    check_batch(global_batch, microbatch, max_failures + 1)
    return Problem(
        profile=costs,
        num_microbatches=global_batch // microbatch,
        cluster=cluster,
        max_failures=max_failures,
        min_pipeline_nodes=min_pipeline_nodes,
    )


def _report(problem: Problem, num_nodes: int, microbatch: int, console: Console) -> PlanReport:
    """Compute, on a terminal with a bar that goes when it is done."""
    from resilient.plan_report import build_report
    from resilient.templates.nodespec import TooFewNodes

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
            return build_report(problem, num_nodes, microbatch, on_progress)
        except TooFewNodes as error:
            raise ValueError(f"{error}{_other_ways(problem, error)}") from None


def _other_ways(problem: Problem, error: TooFewNodes) -> str:
    """Return what else than more nodes would do."""
    ways: list[str] = []
    if problem.max_failures:
        ways.append("lower --max-failures")
    if error.needed > (problem.max_failures + 1) * problem.min_pipeline_nodes:
        ways.append("use nodes with more memory (--gpus-per-node, --device)")
    elif problem.min_pipeline_nodes > 1:
        ways.append("lower --min-pipeline-nodes")
    return "".join(f", or {way}" for way in ways)


def _write(
    report: PlanReport, problem: Problem, json_file: Path | None, png_file: Path | None, templates_file: Path | None
) -> None:
    from resilient.plan_picture import draw_plan
    from resilient.templates.replan import templates_for

    for path in (json_file, png_file, templates_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    if png_file is not None:
        draw_plan(report, png_file)
    if templates_file is not None:
        templates_file.write_bytes(templates_for(problem, report.num_nodes).to_json())
