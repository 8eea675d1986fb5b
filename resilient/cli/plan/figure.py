"""Draws the picture of ``resilient plan``: what throughput is kept as nodes are lost, and by which pipelines.

Reads the report only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.observability.figures.style import BLUE, GREY, PALE_BLUE, PALE_GREY, RED, panels
from resilient.templates.common.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from resilient.cli.plan.report import LossRow, PlanReport

_SMALLEST, _LARGEST = (0.72, 0.83, 0.95), (0.08, 0.22, 0.4)
"""Colours of the smallest and the largest pipelines; those between are mixed."""
_IDLE_COLOUR = "#f2c94c"
_MOST_SIZES = 8
_MOST_BORDERED_NODES = 64
"""Of more nodes, the borders of pipelines would hide them."""


def draw_plan(report: PlanReport, path: Path | str) -> None:
    """Draw a plan as a PNG file.

    Args:
        report: What :func:`resilient.cli.plan.report.build_plan_report` found.
        path: The file to write.
    """
    from matplotlib.ticker import MaxNLocator

    with panels(path, [4.0, 3.4]) as axes:
        _draw_throughput(axes[0], report)
        _draw_pipelines(axes[1], report.losses)
        for each in axes:
            each.xaxis.set_major_locator(MaxNLocator(integer=True))
            each.set_xlim(-0.6 * _stride(report.losses), report.losses[-1].num_lost + 0.6 * _stride(report.losses))


def _stride(losses: Sequence[LossRow]) -> int:
    return losses[1].num_lost if len(losses) > 1 else 1


def _draw_throughput(axes: Axes, report: PlanReport) -> None:
    losses = report.losses
    lost = [row.num_lost for row in losses]
    kept = [100 * row.kept for row in losses]
    worst = [100 * row.worst_kept for row in losses]
    axes.plot(lost, kept, color=BLUE, linewidth=1.8, marker="o", markersize=4, label="throughput kept", zorder=3)
    if report.order_matters:
        axes.fill_between(lost, worst, kept, color=PALE_BLUE, linewidth=0, label="down to the worst order of losses")
    left = [100 * (1 - count / report.num_nodes) for count in (lost[0], lost[-1])]
    axes.plot([lost[0], lost[-1]], left, color=GREY, linewidth=1.2, linestyle=(0, (4, 2)), label="nodes left")
    if report.max_failures:
        axes.axvspan(-lost[-1], report.max_failures + 0.5, color=RED, alpha=0.06, linewidth=0)
        axes.annotate(
            f"up to {report.max_failures} at the same time",
            (report.max_failures + 0.5, 0),
            xytext=(5, 6),
            textcoords="offset points",
            color=RED,
            fontsize=9,
        )
    axes.set_ylim(0, 108)
    axes.set_ylabel("% of all nodes' samples/s")
    axes.grid(axis="y", color=PALE_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right")
    axes.set_title(
        f"{report.source.removeprefix('derived: ')}\n"
        f"{counted(report.num_nodes, 'node')} x {report.devices_per_node}: {report.samples_per_s:.4g} samples/s; "
        f"goes on down to {counted(report.fewest_nodes, 'node')} with {100 * losses[-1].kept:.0f} %"
    )


def _draw_pipelines(axes: Axes, losses: Sequence[LossRow]) -> None:
    """Draw a bar of nodes for each number of lost ones, cut into pipelines, in the worst order of losses."""
    from matplotlib.patches import Patch

    sizes = sorted({size for row in losses for size in row.pipelines})
    colours = {size: _mixed(i / max(1, len(sizes) - 1)) for i, size in enumerate(sizes)}
    width = 0.8 * _stride(losses)
    border = 0.8 if sum(losses[0].pipelines) <= _MOST_BORDERED_NODES else 0.0
    for row in losses:
        bottom = 0
        for size in row.pipelines:
            axes.bar(row.num_lost, size, width, bottom=bottom, color=colours[size], edgecolor="white", linewidth=border)
            bottom += size
        if row.num_idle:
            axes.bar(row.num_lost, row.num_idle, width, bottom=bottom, color=_IDLE_COLOUR, linewidth=0)
    shown = sizes if len(sizes) <= _MOST_SIZES else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    handles = [Patch(color=colours[size], label=f"{size} node{'' if size == 1 else 's'}") for size in shown]
    if any(row.num_idle for row in losses):
        handles.append(Patch(color=_IDLE_COLOUR, label="idle"))
    axes.legend(handles=handles, loc="upper right", handlelength=1, handleheight=1)
    axes.set_xlabel("nodes lost")
    axes.set_ylabel("nodes")
    axes.set_title("Pipelines")


def _mixed(part: float) -> tuple[float, float, float]:
    red, green, blue = ((1 - part) * low + part * high for low, high in zip(_SMALLEST, _LARGEST, strict=True))
    return red, green, blue
