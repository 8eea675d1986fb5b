"""``resilient compare``: every multimodal planner on the same batches of a workload, without the machines.

Owns options and files; :mod:`resilient.cli.compare.report` computes and :mod:`resilient.cli.compare.tables` prints.
What is slow to import is imported when the command runs. Must not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from resilient.cli.shared.errors import told
from resilient.cli.shared.job_options import (
    JOB_OPTIONS,
    GpusOption,
    NetworkOption,
    described_cluster,
    full_device,
    refusals,
)
from resilient.cli.shared.options import command_of
from resilient.cli.shared.output_files import check_outputs
from resilient.cli.shared.printing import progress_bar, table_console
from resilient.cli.shared.ranges import within
from resilient.errors import ArgumentError
from resilient.planners.registry import AUTO
from resilient.templates.common.words import counted

if TYPE_CHECKING:
    from resilient.cli.compare.report import Comparison
    from resilient.planners.costs.samples import SampleTable
    from resilient.planners.planner import Planner, Setting
    from resilient.planners.workloads.records import Bad

_ALL = "all"
_MOST_NODES = 10_000
"""That planners are compared on."""

_WHY = "published planners try every way to divide devices among units"

_MOST_SAMPLES = 10_000_000
"""Of all batches, to be in memory at once."""

_KNOWN_SAMPLES, _KNOWN_BATCHES = 2048, 3
"""Samples that planners see before the first batch, and batches of them, at least."""


class WhenBad(str, Enum):
    """What is done with samples that do not fit."""

    ERROR = "error"
    DROP = "drop"
    RESIZE = "resize"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of ``resilient compare``."""

    model: Annotated[str, typer.Option(help='A published multimodal model, or "ENCODER+LANGUAGE_MODEL".')]
    device: Annotated[str, typer.Option(callback=full_device, help="The accelerator.")]
    workload: Annotated[str, typer.Option(help="A file of samples, or a generator: laion, coco, mixed, ...")]
    nodes: Annotated[int, typer.Option(callback=within(1, _MOST_NODES, _WHY), help="Nodes of the job.")] = 8
    gpus_per_node: GpusOption = 8
    network_gbit_s: NetworkOption = None
    planners: Annotated[
        str, typer.Option(metavar="NAMES", help='"uniform,entrain", or auto: all, to choose the best.')
    ] = AUTO
    global_batch: Annotated[int, typer.Option(callback=within(1), help="Samples of a step.")] = 512
    microbatch: Annotated[int, typer.Option(callback=within(1), help="Samples of a microbatch, on average.")] = 2
    frozen: Annotated[
        str | None,
        typer.Option(metavar="UNITS", help='Units that are not trained, such as "encoder,llm"; "projector" is one.'),
    ] = None
    max_failures: Annotated[
        int, typer.Option(callback=within(0), help="Nodes that may be lost at the same time without losing state.")
    ] = 0
    lost_nodes: Annotated[int, typer.Option(callback=within(0), help="Nodes lost before the first batch.")] = 0
    batches: Annotated[int, typer.Option(callback=within(1), help="Global batches to simulate.")] = 100
    seed: Annotated[int, typer.Option(callback=within(0), help="Of the choice of samples.")] = 0
    bad: Annotated[
        WhenBad, typer.Option(help="Samples that do not fit: name them and stop, leave them out, or make them fit.")
    ] = WhenBad.ERROR
    pictures: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of the pictures a file names without their sizes."),
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(exists=True, help="Counts the texts of a file: a tokenizer.json, or its folder.")
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw the steps' times here, and one step of the fastest beside it.")
    ] = None


@command_of(CompareOptions)
def compare_command(ctx: typer.Context, options: CompareOptions) -> None:
    """Compare multimodal planners on a workload by simulating their steps."""
    from resilient.cli.compare.tables import show_bad, show_comparison

    with refusals(ctx):
        setting = _setting(options)
        _check(options)
        png_file = options.png_file
        steps_file = png_file and png_file.with_stem(f"{png_file.stem}-steps")
        outputs = (("--json", options.json_file), ("--png", png_file), ("--png", steps_file))
        check_outputs(outputs, [options.tokenizer, Path(options.workload)])
        chosen = _planners(options.planners)
        known, steps, found = _samples(setting, options)
        reason = partial(told, ctx=ctx, others=JOB_OPTIONS)
        comparison = _compare(chosen, setting, known, steps, options.lost_nodes, reason)
        console = table_console()
        for line in _header(setting, options):
            console.print(line, markup=False, soft_wrap=True)
        show_bad(found, console)
        show_comparison(comparison, console)
        _write(comparison, _job(setting, options, found), options.json_file, png_file, steps_file)
    if comparison.best is None:
        raise typer.Exit(1)


def _check(options: CompareOptions) -> None:
    if options.lost_nodes >= options.nodes:
        raise ArgumentError("lost_nodes", f"be 0 to {options.nodes - 1}", options.lost_nodes, "leave a node")
    if options.max_failures >= options.nodes:
        constraint = f"be less than {{nodes}} {options.nodes}"
        raise ArgumentError("max_failures", constraint, options.max_failures, "lower it, or raise {nodes}")
    if options.microbatch > options.global_batch:
        constraint = f"be at most {{global_batch}} {options.global_batch}"
        raise ArgumentError("microbatch", constraint, options.microbatch, "lower it")
    if options.global_batch * options.batches > _MOST_SAMPLES:
        samples = options.global_batch * options.batches
        raise ArgumentError("{global_batch} times {batches}", f"be at most {_MOST_SAMPLES}", samples, "lower {batches}")


def _header(setting: Setting, options: CompareOptions) -> Sequence[str]:
    """Return the lines above the table: the model, the nodes and the workload."""
    lost = f", {options.lost_nodes} of them lost" if options.lost_nodes else ""
    return (
        setting.costs.source,
        f"{counted(options.nodes, 'node')} with {counted(options.gpus_per_node, 'device')} each{lost}",
        f"{options.batches} batch{'es' * (options.batches != 1)} of {counted(options.global_batch, 'sample')} of "
        f"{options.workload}, microbatches of {options.microbatch}",
    )


def _job(setting: Setting, options: CompareOptions, bad: Sequence[Bad]) -> dict[str, Any]:
    """Return what is written of the job as JSON."""
    return {
        "costs": setting.costs.source,
        "num_nodes": options.nodes,
        "devices_per_node": options.gpus_per_node,
        "max_failures": options.max_failures,
        "lost_nodes": options.lost_nodes,
        "workload": options.workload,
        "num_batches": options.batches,
        "global_batch": options.global_batch,
        "microbatch": options.microbatch,
        "seed": options.seed,
        "bad_samples": [{"name": each.name, "reason": each.reason, "dropped": each.dropped} for each in bad],
    }


def _setting(options: CompareOptions) -> Setting:
    from resilient.planners.costs.derived_costs import derive_costs
    from resilient.planners.planner import Setting

    units = tuple(unit.strip() for unit in (options.frozen or "").split(",") if unit.strip())
    costs = derive_costs(options.model, options.device, frozen=units)
    if not any(layer.trainable for unit in costs.units for layer in unit.layers):
        raise ArgumentError("frozen", "leave a unit to train", options.frozen, "leave one out")
    return Setting(
        costs=costs,
        cluster=described_cluster(options.device, options.gpus_per_node, options.network_gbit_s),
        num_nodes=options.nodes,
        global_batch=options.global_batch,
        microbatch=options.microbatch,
        max_failures=options.max_failures,
    )


def _planners(names: str) -> list[Planner]:
    from resilient.planners.registry import PLANNERS, planner

    chosen = list(PLANNERS) if names in (_ALL, AUTO) else [name.strip() for name in names.split(",")]
    return [planner(name) for name in dict.fromkeys(chosen)]


def _samples(setting: Setting, options: CompareOptions) -> tuple[SampleTable, list[SampleTable], tuple[Bad, ...]]:
    """Return the samples planners know, the batches (others of the same workload), and what is bad among them all.

    More batches only add some: those before, and what planners know, are the same.
    """
    from resilient.planners.workloads.sample_limits import most_tokens
    from resilient.planners.workloads.workload import judged_workload

    num_known = max(_KNOWN_SAMPLES, _KNOWN_BATCHES * setting.global_batch)
    table, found = judged_workload(
        options.workload,
        num_known + options.batches * setting.global_batch,
        options.seed,
        options.model,
        bad=options.bad.value,
        limits=most_tokens(setting.costs, setting.cluster, setting.num_nodes),
        tokenizer=_counter(options.tokenizer),
        pictures=options.pictures,
        known=num_known,
    )
    starts = range(num_known, len(table), setting.global_batch)
    return table[:num_known], [table[start : start + setting.global_batch] for start in starts], found


def _counter(path: Path | None) -> Callable[[str], Sequence[int]] | None:
    """Return what turns a text into token ids."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # of no narrower type
        raise ArgumentError(
            "tokenizer", "be a tokenizer.json or its folder", f"{path} ({error})", "save it there"
        ) from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _compare(
    planners: list[Planner],
    setting: Setting,
    samples: SampleTable,
    batches: list[SampleTable],
    lost_nodes: int,
    reason: Callable[[ValueError], str],
) -> Comparison:
    """Compute, on a terminal with a bar that goes when it is done."""
    from resilient.cli.compare.report import compare_planners
    from resilient.planners.registry import BASELINE

    console = Console(highlight=False, emoji=False)
    with progress_bar(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("simulating", total=len(planners))
        return compare_planners(
            planners,
            setting,
            samples,
            batches,
            lost_nodes=lost_nodes,
            baseline=BASELINE,
            reason=reason,
            clock=time.perf_counter,
            done=lambda: progress.advance(task),
        )


def _write(
    comparison: Comparison,
    job: dict[str, Any],
    json_file: Path | None,
    png_file: Path | None,
    steps_file: Path | None,
) -> None:
    from resilient.cli.compare.figure import draw_bars
    from resilient.cli.compare.report import step_chart
    from resilient.observability.figures.gantt import draw_charts

    if json_file is not None:
        json_file.write_text(json.dumps({"job": job, **comparison.to_dict()}, indent=2) + "\n")
    if png_file is not None and steps_file is not None and comparison.rows:
        draw_bars(comparison, png_file)
        draw_charts([step_chart(row) for row in comparison.shown or comparison.rows], steps_file)
