"""What ``resilient compare`` prints: one row for each planner."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient.cli.compare.report import Comparison, PlannerRow
from resilient.cli.shared.printing import plain_table
from resilient.planners.workloads.records import Bad

_NAMED = 10
"""Bad samples that are printed."""


def show_bad(found: Sequence[Bad], console: Console) -> None:
    """Print which samples are bad, by name, and what became of them."""
    if not found:
        return
    dropped = sum(each.dropped for each in found)
    _line(console, f"\nBad samples: {dropped} left out, {len(found) - dropped} made to fit", "bold")
    for each in found[:_NAMED]:
        text = f"{each.name!r}: {each.reason}; {'left out' if each.dropped else 'made to fit'}"
        _line(console, text.encode(console.encoding, "backslashreplace").decode(console.encoding), "")
    if len(found) > _NAMED:
        _line(console, f"and {len(found) - _NAMED} more, all in what --json writes", "dim")


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print a comparison."""
    rows = comparison.rows
    if rows:
        units = list(rows[0].configuration.units)
        console.print("\nSteps", style="bold")
        console.print(_steps(comparison, units))
        _line(console, "std: of microbatch times in a step; sums: of gradients, after all else", "dim")
        _line(console, f"bound: {comparison.bound_ms:.0f} ms, all work over all devices with nothing else", "dim")
        if comparison.base is not None and comparison.base.name != comparison.baseline:
            text = f"{comparison.baseline} does not fit: speed-ups are relative to {comparison.base.name}"
            _line(console, text, "yellow")
        console.print("\nConfigurations", style="bold")
        console.print(_configurations(rows, units))
        text = "a unit: replicas x stages [* on each device] x tensor-parallel [x context-parallel] devices"
        _line(console, text, "dim")
    for row in rows:
        for note in row.configuration.notes:
            _line(console, f"{row.name}: {note}", "yellow")
        if not row.fits:
            has = f"{(comparison.memory_bytes or 0) / 1e9:.1f}"
            _line(console, f"{row.name} needs {row.peak_bytes / 1e9:.1f} GB, and a device has {has}", "red")
    for name, why in comparison.refused.items():
        _line(console, f"{name} found no plan: {why}", "red")
    _line(console, f"\nbest: {comparison.reason()}", "bold")


def _steps(comparison: Comparison, units: Sequence[str]) -> Table:
    columns = ("step\nms", "speed-up", "of\nbound", "bubble", "sums\nms", *(f"std\n{unit}" for unit in units), "GB")
    table = plain_table("planner", *columns, left=("planner",), no_wrap=True)
    for row in comparison.rows:
        speed_up = comparison.speed_up(row)
        memory = Text(f"{row.peak_bytes / 1e9:.1f}", style="" if row.fits else "bold red")
        table.add_row(
            row.name,
            f"{row.iteration_ms:.0f}",
            "-" if speed_up is None else f"{speed_up:.2f}x",
            f"{comparison.of_bound(row):.2f}x",
            f"{100 * row.bubble:.0f} %",
            f"{row.sum_ms:.0f}",
            *(f"{row.std_ms[unit]:.1f}" for unit in units),
            memory,
        )
    return table


def _configurations(rows: Sequence[PlannerRow], units: Sequence[str]) -> Table:
    columns = ("devices", *units, "micro-\nbatches", "once\nms", "step\nms")
    table = plain_table("planner", *columns, left=("planner",), no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_devices),
            *(_spread(row, unit) for unit in units),
            str(row.configuration.num_microbatches),
            f"{row.configure_ms:.0f}",
            f"{row.assign_ms:.2f}",
        )
    return table


def _spread(row: PlannerRow, unit: str) -> str:
    spread = row.configuration.units[unit]
    stages = f"{spread.pp}" if spread.chunks == 1 else f"{spread.pp}*{spread.chunks}"
    return f"{spread.dp}x{stages}x{spread.tp}" + (f"x{spread.cp}" if spread.cp > 1 else "")


def _line(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)
