"""``resilient schedule``: what a pipeline's workers do when, by kind of schedule, without running it.

Owns options and files; :mod:`resilient.cli.schedule.report` computes. What is slow to import is imported when the
command runs. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from resilient.cli.shared.job_options import (
    DeviceOption,
    ModelOption,
    ProfileOption,
    described_cluster,
    described_layers,
    refusals,
)
from resilient.cli.shared.options import command_of
from resilient.cli.shared.output_files import check_outputs
from resilient.cli.shared.ranges import within
from resilient.cli.shared.renamed_options import renamed
from resilient.errors import ArgumentError
from resilient.templates.schedules.kind import INTERLEAVED_KINDS, ScheduleKind, chunks_of

if TYPE_CHECKING:
    from resilient.cli.schedule.report import PipelineWork, ScheduleReport

ALL = "all"
_DEFAULT_CHUNKS = 2
_MOST_PASSES = 200_000
"""Of microbatches through stages, in all schedules: more take minutes and show nothing else."""

_MOST_STAGES = 1024
_MOST_MS = 1e9


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The options of ``resilient schedule``."""

    stages: Annotated[
        int, typer.Option(callback=within(1, _MOST_STAGES), help="Workers of the pipeline, each with a stage.")
    ]
    microbatches: Annotated[int, typer.Option(callback=within(1), help="Microbatches that go through it in a step.")]
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(kind.value for kind in ScheduleKind)}, or all that train; repeatable; 1f1b by default."
        ),
    ] = None
    chunks: Annotated[
        int | None, typer.Option(callback=within(1), help="interleaved kinds: stages of each worker, 2 by default.")
    ] = None
    max_in_flight: Annotated[int | None, typer.Option(help="eager-1f1b: most microbatches that a worker holds.")] = None
    forward_ms: Annotated[float | None, typer.Option(help="Of a microbatch on a worker; 1 by default.")] = None
    backward_input_ms: Annotated[
        float | None, typer.Option(help="Backward for what the worker received; 1 by default.")
    ] = None
    backward_weight_ms: Annotated[float | None, typer.Option(help="Backward for its parameters; 1 by default.")] = None
    send_ms: Annotated[float | None, typer.Option(help="Of a message between two workers; 0 by default.")] = None
    model: ModelOption = None
    profile: ProfileOption = None
    device: DeviceOption = None
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw the timelines here.")] = None
    trace_file: Annotated[
        Path | None, typer.Option("--trace-json", help="Write them here, for https://ui.perfetto.dev.")
    ] = None
    text: Annotated[bool, typer.Option("--text", help="Print the workers' actions, a line for each, and no more.")] = (
        False
    )
    old_trace: Annotated[str | None, renamed("--trace", "--trace-json")] = None

    def given_ms(self) -> dict[str, float]:
        """Return by their options those times of a microbatch that were given: forward, backward, a message."""
        names = ("forward_ms", "backward_input_ms", "backward_weight_ms", "send_ms")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@command_of(ScheduleOptions)
def schedule_command(ctx: typer.Context, options: ScheduleOptions) -> None:
    """Show what the workers of a pipeline do when, and how long they wait, without running it."""
    console = Console(highlight=False, emoji=False)
    with refusals(ctx):
        kinds = _kinds(options.kind or ["1f1b"])
        _check_belongs("chunks", options.chunks, INTERLEAVED_KINDS, kinds)
        _check_belongs("max_in_flight", options.max_in_flight, (ScheduleKind.EAGER,), kinds)
        memory_bytes, reports = _reports(options, kinds)
        _write(reports, options.png_file, options.trace_file)
        if options.text:
            for report in reports:
                console.print(str(report.timeline.schedule), markup=False, soft_wrap=True)
        else:
            _show(reports, memory_bytes, console)


def _reports(options: ScheduleOptions, kinds: Sequence[ScheduleKind]) -> tuple[int | None, list[ScheduleReport]]:
    """Return the memory of a worker, if it is known, and what is shown of each kind."""
    from resilient.cli.schedule.report import schedule_report

    several = _DEFAULT_CHUNKS if options.chunks is None else options.chunks
    num_chunks = {each: chunks_of(each, several) for each in kinds}
    passes = options.stages * options.microbatches * sum(num_chunks.values())
    if passes > _MOST_PASSES:
        product = "{stages} times {microbatches} (times {chunks}) of all kinds"
        raise ArgumentError(product, f"be at most {_MOST_PASSES}", passes, "lower {microbatches}")
    memory_bytes, work = _work(options)
    check_outputs([("--png", options.png_file), ("--trace-json", options.trace_file)], [options.profile])
    reports = [
        schedule_report(
            kind,
            options.stages,
            options.microbatches,
            num_chunks[kind],
            work,
            memory_bytes=memory_bytes,
            max_in_flight=options.max_in_flight,
        )
        for kind in kinds
    ]
    return memory_bytes, reports


def _kinds(names: Sequence[str]) -> list[ScheduleKind]:
    """Return the kinds that were named, each once."""
    from resilient.templates.common.words import look_up

    known = {kind.value: [kind] for kind in ScheduleKind}
    known[ALL] = [kind for kind in ScheduleKind if kind is not ScheduleKind.FORWARD_ONLY]
    return list(dict.fromkeys(kind for name in names for kind in look_up("kind", name, known)))


def _check_belongs(name: str, value: int | None, owners: Sequence[ScheduleKind], kinds: Sequence[ScheduleKind]) -> None:
    if value is not None and not set(owners) & set(kinds):
        given, known = (", ".join(kind.value for kind in each) for each in (kinds, owners))
        raise ArgumentError(name, f"come with {{kind}} {known}", f"{value} for {given}", "leave it out")


def _work(options: ScheduleOptions) -> tuple[int | None, Callable[[int], PipelineWork]]:
    """Return the memory of a worker, if it is known, and the work of a number of stages."""
    from resilient.cli.schedule.report import even_work, profiled_work

    model, profile, device, given_ms = options.model, options.profile, options.device, options.given_ms()
    for name, given in given_ms.items():
        if not 0 <= given <= _MOST_MS:
            raise ArgumentError(name, f"be 0 to {_MOST_MS:g}", f"{given:g}", "give milliseconds")
    if model is None and profile is None:
        if device is not None:
            raise ArgumentError("device", "come with {model} or {profile}", f"{device} alone", "leave it out")

        def even(num_stages: int) -> PipelineWork:
            share = options.stages / num_stages
            return even_work(
                num_stages,
                forward_ms=share * given_ms.get("forward_ms", 1.0),
                backward_input_ms=share * given_ms.get("backward_input_ms", 1.0),
                backward_weight_ms=share * given_ms.get("backward_weight_ms", 1.0),
                send_ms=given_ms.get("send_ms", 0.0),
            )

        return None, even
    if given_ms:
        own, source = " and ".join(f"{{{name}}}" for name in given_ms), "model" if profile is None else "profile"
        raise ArgumentError(source, f"come without {own}, which it says", model or profile, "leave one of them out")
    costs, cluster = described_layers(model, profile, device), described_cluster(device)
    return cluster.memory_bytes, lambda num_stages: profiled_work(costs, cluster, num_stages, options.microbatches)


def _write(reports: Sequence[ScheduleReport], png_file: Path | None, trace_file: Path | None) -> None:
    from resilient.observability.figures.bars import simulated_chart
    from resilient.observability.figures.gantt import draw_charts
    from resilient.observability.trace_events import simulated_trace

    if trace_file is not None:
        trace_file.write_bytes(simulated_trace({report.kind.value: report.timeline for report in reports}).to_json())
    if png_file is not None:
        draw_charts([simulated_chart(_title(report), report.timeline) for report in reports], png_file)


def _show(reports: Sequence[ScheduleReport], memory_bytes: int | None, console: Console) -> None:
    from resilient.cli.schedule.tables import show_kinds, show_misfits, show_timeline, show_workers
    from resilient.observability.figures.bars import simulated_chart

    for index, report in enumerate(reports):
        if index:
            console.print()
        show_timeline(simulated_chart(_title(report), report.timeline), console)
    if len(reports) == 1:
        show_workers(reports[0], memory_bytes, console)
    else:
        console.print()
        show_kinds(reports, memory_bytes, console)
    show_misfits(reports, memory_bytes, console)


def _title(report: ScheduleReport) -> str:
    from resilient.observability.wording import duration

    chunks = f", {report.num_chunks} stages on each worker" if report.num_chunks > 1 else ""
    iteration = duration(report.timeline.iteration_ms)
    return f"{report.kind.value}{chunks}: {iteration}, {100 * report.bubble:.1f} % bubble"
