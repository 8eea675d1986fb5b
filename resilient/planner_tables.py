"""What ``resilient compare`` prints: one row for each planner."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient.planner_report import Comparison, Row

_PADDING = (0, 2, 0, 0)


def show(comparison: Comparison, console: Console) -> None:
    """Print a comparison."""
    units = list(comparison.rows[0].configuration.units) if comparison.rows else []
    console.print("\nSteps", style="bold")
    console.print(_steps(comparison, units))
    console.print(
        "std: of microbatch times in a step; sums: of gradients, after all else; fsdp's messages count as computing",
        style="dim",
    )
    console.print("\nConfigurations", style="bold")
    console.print(_configurations(comparison.rows, units))
    console.print("a unit: replicas x stages x tensor-parallel [x context-parallel] devices", style="dim")
    for row in comparison.rows:
        if not row.fits:
            _line(console, f"{row.name} needs more memory than a device has", "red")
    for name, why in comparison.refused.items():
        _line(console, f"{name} found no plan: {why}", "red")
    _line(console, f"\nbest: {comparison.reason()}", "bold")


def _steps(comparison: Comparison, units: Sequence[str]) -> Table:
    table = Table(box=None, padding=_PADDING, header_style="dim")
    table.add_column("planner")
    for header in ("step ms", "speed-up", "bubble", "sums ms", *(f"std {unit}" for unit in units), "GB"):
        table.add_column(header, justify="right")
    for row in comparison.rows:
        speed_up = comparison.speed_up(row)
        memory = Text(f"{row.peak_bytes / 1e9:.1f}", style="" if row.fits else "bold red")
        table.add_row(
            row.name,
            f"{row.iteration_ms:.0f}",
            "-" if speed_up is None else f"{speed_up:.2f}x",
            f"{100 * row.bubble:.0f} %",
            f"{row.sum_ms:.0f}",
            *(f"{row.std_ms[unit]:.1f}" for unit in units),
            memory,
        )
    return table


def _configurations(rows: Sequence[Row], units: Sequence[str]) -> Table:
    table = Table(box=None, padding=_PADDING, header_style="dim")
    table.add_column("planner")
    for header in ("devices", *units, "microbatches", "once ms", "step ms"):
        table.add_column(header, justify="right")
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


def _spread(row: Row, unit: str) -> str:
    spread = row.configuration.units[unit]
    return f"{spread.dp}x{spread.pp}x{spread.tp}" + (f"x{spread.cp}" if spread.cp > 1 else "")


def _line(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)
