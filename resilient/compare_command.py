"""``resilient compare``: every multimodal planner on the same batches of a workload, without the machines.

Owns options and files; :mod:`resilient.planner_report` computes and :mod:`resilient.planner_tables` prints. What is
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

if TYPE_CHECKING:
    from resilient.planner_report import Comparison
    from resilient.planners.planner import Planner, Setting
    from resilient.planners.samples import SampleTable

ALL, AUTO = "all", "auto"
_KNOWN_SAMPLES = 2000
"""Samples that planners see before the first batch."""


def compare(
    model: Annotated[str, typer.Option(help='A published multimodal model, or "ENCODER+LANGUAGE_MODEL".')],
    device: Annotated[str, typer.Option(help="The accelerator.")],
    workload: Annotated[str, typer.Option(help="A file of samples, or a generator: laion, coco, mixed, ...")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Devices of each node.")] = 8,
    network_gbit_s: Annotated[
        float | None, typer.Option(help="Between two nodes, for each device; the usual network by default.")
    ] = None,
    planners: Annotated[
        str, typer.Option(metavar="NAMES", help='"uniform,entrain", or auto: all, to choose the best.')
    ] = AUTO,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 512,
    microbatch: Annotated[int, typer.Option(min=1, help="Samples of a microbatch, on average.")] = 2,
    frozen: Annotated[
        str | None, typer.Option(metavar="UNITS", help='Units that are not trained, such as "vision,llm".')
    ] = None,
    lost_nodes: Annotated[int, typer.Option(min=0, help="Nodes lost before the first batch.")] = 0,
    batches: Annotated[int, typer.Option(min=1, help="Global batches to simulate.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of samples.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw the steps' times here, and one step of the fastest beside it.")
    ] = None,
) -> None:
    """Compare multimodal planners on a workload by simulating their steps."""
    from resilient.planner_tables import show

    console = Console(highlight=False)
    try:
        setting = _setting(model, device, nodes, gpus_per_node, network_gbit_s, global_batch, microbatch, frozen)
        chosen = _planners(planners)
        samples, steps = _samples(workload, model, global_batch, batches, seed)
        comparison = _compare(chosen, setting, samples, steps, lost_nodes, console)
        _write(comparison, json_file, png_file)
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(2) from None
    for line in (
        setting.costs.source,
        f"{nodes} nodes with {gpus_per_node} devices each" + (f", {lost_nodes} of them lost" if lost_nodes else ""),
        f"{batches} batches of {global_batch} samples of {workload}, microbatches of {microbatch}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    show(comparison, console)
    if comparison.best is None:
        raise typer.Exit(1)


def _setting(
    model: str,
    device: str,
    nodes: int,
    gpus_per_node: int,
    network_gbit_s: float | None,
    global_batch: int,
    microbatch: int,
    frozen: str | None,
) -> Setting:
    from resilient.planners.derive import derive_costs
    from resilient.planners.planner import Setting
    from resilient.templates.devices import cluster_of, network

    if network_gbit_s is not None and not network_gbit_s > 0:
        raise ValueError(f"network_gbit_s must be > 0, got {network_gbit_s}; leave it out for the usual network")
    units = tuple(unit.strip() for unit in frozen.split(",")) if frozen else ()
    inter_node = None if network_gbit_s is None else network(network_gbit_s)
    return Setting(
        costs=derive_costs(model, device, frozen=units),
        cluster=cluster_of(device, gpus_per_node, inter_node=inter_node),
        num_nodes=nodes,
        global_batch=global_batch,
        microbatch=microbatch,
    )


def _planners(names: str) -> list[Planner]:
    from resilient.planners.registry import PLANNERS, planner

    chosen = list(PLANNERS) if names in (ALL, AUTO) else [name.strip() for name in names.split(",")]
    return [planner(name) for name in dict.fromkeys(chosen)]


def _samples(
    name: str, model: str, global_batch: int, batches: int, seed: int
) -> tuple[SampleTable, list[SampleTable]]:
    """Return the samples planners know, and the batches: others of the same workload."""
    from resilient.planners.workloads import workload

    table = workload(name, _KNOWN_SAMPLES + batches * global_batch, seed, model)
    starts = range(_KNOWN_SAMPLES, len(table), global_batch)
    return table[:_KNOWN_SAMPLES], [table[start : start + global_batch] for start in starts]


def _compare(
    planners: list[Planner],
    setting: Setting,
    samples: SampleTable,
    batches: list[SampleTable],
    lost_nodes: int,
    console: Console,
) -> Comparison:
    """Compute, on a terminal with a bar that goes when it is done."""
    from resilient.planner_report import compare as compare_planners
    from resilient.planners.registry import BASELINE

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=len(planners))
        return compare_planners(
            planners,
            setting,
            samples,
            batches,
            lost_nodes=lost_nodes,
            baseline=BASELINE,
            clock=time.perf_counter,
            done=lambda: progress.advance(task),
        )


def _write(comparison: Comparison, json_file: Path | None, png_file: Path | None) -> None:
    from resilient.planner_picture import draw_bars
    from resilient.planner_report import step_chart
    from resilient.schedule_picture import draw_charts

    for path in (json_file, png_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.to_dict(), indent=2) + "\n")
    if png_file is not None and comparison.rows:
        draw_bars(comparison, png_file)
        draw_charts(
            [step_chart(row) for row in comparison.shown or comparison.rows],
            png_file.with_stem(f"{png_file.stem}-steps"),
        )
