"""The tables of ``resilient plan``: from the report to what a person reads, 80 columns wide."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from resilient.cli.plan.report import SEQUENCES, PipelineRow, PlanReport
from resilient.cli.shared.printing import plain_table
from resilient.observability.wording import duration, schedule_in_words, three_digits
from resilient.templates.common.words import counted
from resilient.templates.schedules.kind import ScheduleKind

SHOWN_ROWS = 32
"""Of a table; of a longer one the first, the last and some between. The ``--json`` file has all."""

_T = TypeVar("_T")


def show_plan(report: PlanReport, console: Console) -> None:
    """Print a report."""
    _lines(console, _headline(report))
    console.print("\nTemplates", style="bold")
    console.print(_templates(report))
    notes = ["share: microbatches, at its part of all nodes; step: predicted with them"]
    if _any_sharded(report):
        notes.append("shard: devices that divide a stage's state; slowest ms: of a microbatch for each")
    if any(row.num_checkpointing for row in report.templates):
        notes.append("redo: stages that run their forward again to save memory")
    _lines(console, notes, style="dim")
    console.print("\nPlan", style="bold")
    console.print(_plan(report))
    if _divided(report):
        _lines(
            console, ["method: devices of the stages that divide their state (shard), or each microbatch (tp)"], "dim"
        )
    console.print(f"a step takes {duration(report.step_ms)}: {_digits(report.samples_per_s)} samples/s")
    _lines(console, _standing_by(report))
    if report.limited is not None:
        limited, more = report.limited, report.limited.step_ms / report.step_ms - 1
        shares = compact(limited.num_microbatches)
        console.print(f"with {limited.limits}: {shares} microbatches; {duration(limited.step_ms)} ({more:+.1%})")
    console.print("\nAs nodes are lost", style="bold")
    console.print(_losses(report))
    if report.order_matters:
        notes = [f"kept: mean over {SEQUENCES} random orders of losing nodes; the worst of them, and its pipelines"]
    else:
        notes = [f"the same in {SEQUENCES} random orders of losing nodes one by one"]
    _lines(console, notes, style="dim")


def _headline(report: PlanReport) -> list[str]:
    memory = report.device_memory_bytes
    limit = "" if memory is None else f" of {_gb(memory)} GB to use"
    num_pipelines = report.max_failures + 1
    return [
        report.source or "measured",
        f"{counted(report.num_nodes, 'node')} with {counted(report.devices_per_node, 'device')}{limit} each",
        f"global batch {report.global_batch}, microbatch {report.microbatch}",
        *_schedule(report),
        f"to survive {counted(report.max_failures, 'failure')} at once: {counted(num_pipelines, 'pipeline')} of "
        f"{counted(report.min_pipeline_nodes, 'node')} or more, {report.fewest_nodes} in all",
    ]


def _schedule(report: PlanReport) -> list[str]:
    """Say what pipelines run, unless that is 1f1b because nobody asked for another."""
    if report.choice is not None:
        return [schedule_in_words(dataclasses.asdict(report.choice))]
    if report.schedule == ScheduleKind.ONE_F_ONE_B.value:
        return []
    return [f"schedule {report.schedule}, {counted(report.num_chunks, 'stage')} on each device"]


def _standing_by(report: PlanReport) -> list[str]:
    """Say which nodes stand by, and why."""
    if not report.num_idle:
        return []
    stand = f"{counted(report.num_idle, 'node')} {'stands' if report.num_idle == 1 else 'stand'} by"
    slow = [f"{row.factor:g} times slower than others" for row in report.slow if row.stands_by]
    which = f" ({', '.join(slow)})" if slow else ""
    if report.with_idle_ms is None:
        return [f"{stand}{which}: no pipeline has a place for {'it' if report.num_idle == 1 else 'them'}"]
    return [f"{stand}{which}: with every node a step would take {duration(report.with_idle_ms)}"]


def _templates(report: PlanReport) -> Table:
    redo = any(row.num_checkpointing for row in report.templates)
    shard = _any_sharded(report)
    more = [*(["shard"] if shard else []), *(["redo"] if redo else [])]
    before, after = ("nodes", "stages", "tp degrees"), ("slowest ms", "share", "step s", "GB")
    table = plain_table(*before, *more, *after, left=("tp degrees", "shard"))
    for row in _some(report.templates):
        table.add_row(
            str(row.num_nodes),
            str(len(row.tp_degrees)),
            compact(row.tp_degrees),
            *([compact(row.shards)] if shard else []),
            *([str(row.num_checkpointing or "-")] if redo else []),
            f"{row.slowest_ms:.1f}",
            str(row.num_microbatches),
            three_digits(row.iteration_ms / 1e3),
            _gb(row.memory_bytes),
        )
    return table


def _any_sharded(report: PlanReport) -> bool:
    return any(max(row.shards) > 1 for row in report.templates)


def _plan(report: PlanReport) -> Table:
    divided = _divided(report)
    methods = ["method"] if divided else []
    table = plain_table(
        "pipelines", "nodes of each", *methods, "microbatches of each", "step s", "GB", left=("method",)
    )
    for row, count in sorted(Counter(report.pipelines).items(), key=lambda item: (-item[0].num_nodes, -item[1])):
        table.add_row(
            str(count),
            str(row.num_nodes),
            *([_method(row)] if divided else []),
            str(row.num_microbatches),
            three_digits(row.iteration_ms / 1e3),
            _gb(row.memory_bytes),
        )
    return table


def _divided(report: PlanReport) -> bool:
    return any(max(*row.shards, *row.tp_degrees) > 1 for row in report.pipelines)


def _method(row: PipelineRow) -> str:
    if max(row.shards) > 1:
        return f"shard {compact(row.shards)}"
    return f"tp {compact(row.tp_degrees)}" if max(row.tp_degrees) > 1 else "-"


def _losses(report: PlanReport) -> Table:
    idle = any(row.num_idle for row in report.losses)
    worst = report.order_matters
    more = [*(["worst"] if worst else []), *(["idle"] if idle else [])]
    table = plain_table("lost", "nodes left", "samples/s", "kept", *more, "pipelines", left=("pipelines",))
    for row in _some(report.losses):
        left = report.num_nodes - row.num_lost
        table.add_row(
            str(row.num_lost),
            f"{left} ({100 * left / report.num_nodes:.0f} %)",
            _digits(row.samples_per_s),
            f"{100 * row.kept:.1f} %",
            *([f"{100 * row.worst_kept:.1f} %"] if worst else []),
            *([str(row.num_idle or "-")] if idle else []),
            compact(row.pipelines),
        )
    return table


def compact(numbers: Sequence[int]) -> str:
    """Write ``(4, 8, 8, 4, 4)`` as ``8 x2, 4 x3``: largest first."""
    counted = sorted(Counter(numbers).items(), reverse=True)
    return ", ".join(f"{number} x{count}" if count > 1 else str(number) for number, count in counted)


def _some(rows: Sequence[_T]) -> list[_T]:
    if len(rows) <= SHOWN_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (SHOWN_ROWS - 1))] for i in range(SHOWN_ROWS)]


def _lines(console: Console, lines: Sequence[str], style: str = "") -> None:
    for line in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def _digits(value: float) -> str:
    """Write a positive number with four digits, or all before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f}" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.2g}"
