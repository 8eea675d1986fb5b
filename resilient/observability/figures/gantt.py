"""Draws steps as Gantt charts: what each worker of a pipeline does when, simulated or as it was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from resilient.observability.figures.bars import COMPUTING, OTHER, Bar, Chart
from resilient.observability.figures.style import GREY, INK, PALE_GREY, legend_above, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "F": "#4a90d9",
        "B": "#2b8a3e",
        "I": "#e8890c",
        "W": "#8fce8f",
        "load": "#f2c94c",
        "sum": "#b197d6",
        "prepare": "#9aa5b1",
        "commit": "#616e7c",
    }
)
_DARK = ("F", "B", "commit")
_LIGHTER = 0.45
"""White in the colours of every other chunk."""
_ROW_INCHES, _MOST_INCHES, _FRAME_INCHES = 0.36, 14.0, 1.35
_WIDTH_INCHES = 8.4
"""Of the axes, about."""
_BORDERED_INCHES = 0.03
"""Of the narrowest bar with a white border: it would hide narrower ones."""
_MOST_LABELS = 4000


def draw_charts(charts: Sequence[Chart], path: Path | str) -> None:
    """Draw charts below each other, on one scale, as a PNG file.

    Args:
        charts: The steps to draw.
        path: The file to write.
    """
    num_rows = sum(len(chart.rows) for chart in charts)
    row_inches = min(_ROW_INCHES, _MOST_INCHES / num_rows)
    longest_ns = max(chart.length_ns for chart in charts)
    with panels(path, [_FRAME_INCHES + row_inches * len(chart.rows) for chart in charts]) as axes:
        for each, chart in zip(axes, charts, strict=True):
            _draw(each, chart, longest_ns, row_inches)


def _draw(axes: Axes, chart: Chart, longest_ns: int, row_inches: float) -> None:
    scale = 1e-6
    rows = range(len(chart.rows))
    length_ms = scale * chart.length_ns
    axes.barh(rows, [length_ms] * len(chart.rows), height=0.86, color=PALE_GREY)
    groups: dict[tuple[int, str, int, bool], list[tuple[float, float]]] = {}
    for bar in chart.bars:
        part = (scale * bar.start_ns, scale * bar.length_ns)
        bordered = row_inches > 0.15 and _WIDTH_INCHES * bar.length_ns > _BORDERED_INCHES * longest_ns
        groups.setdefault((bar.row, bar.kind, bar.chunk % 2, bordered), []).append(part)
    for (row, kind, lighter, bordered), parts in groups.items():
        colour = _colour(kind, lighter)
        axes.broken_barh(parts, (row - 0.43, 0.86), facecolor=colour, edgecolor="white", linewidth=0.5 * bordered)
    _label(axes, chart.bars, longest_ns, row_inches)
    for row, busy in enumerate(chart.busy):
        axes.annotate(
            f"{100 * busy:.0f} % busy",
            (length_ms, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=min(8.5, 60 * row_inches),
            color=INK,
        )
    axes.set_yticks(rows, chart.rows, fontsize=min(9.0, 60 * row_inches / (1 + chart.rows[0].count("\n"))))
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.set_xlim(0, scale * longest_ns * 1.09 or 1.0)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_title(chart.title, pad=26)
    legend_above(axes, _meanings(chart))


def _label(axes: Axes, bars: Sequence[Bar], longest_ns: int, row_inches: float) -> None:
    """Write the microbatches into the bars that have room for them."""
    points = min(8.0, 44 * row_inches)
    if points < 4:
        return
    digit_inches = 0.65 * points / 72
    labelled = [
        bar
        for bar in bars
        if bar.label and _WIDTH_INCHES * bar.length_ns / longest_ns > digit_inches * (len(bar.label) + 0.4)
    ]
    for bar in labelled[:_MOST_LABELS]:
        axes.text(
            0.5e-6 * (bar.start_ns + bar.end_ns),
            bar.row,
            bar.label,
            ha="center",
            va="center_baseline",
            fontsize=points,
            color="white" if bar.kind in _DARK and not bar.chunk % 2 else INK,
        )


def _meanings(chart: Chart) -> dict[str, Any]:
    """Return what is in a chart, with the colour of each."""
    kinds = {bar.kind for bar in chart.bars}
    colours: dict[str, Any] = {name: _COLOURS[kind] for kind, name in {**COMPUTING, **OTHER}.items() if kind in kinds}
    if any(bar.chunk for bar in chart.bars):
        colours[f"lighter: {chart.odd_chunks}"] = _colour("F", 1)
    return {**colours, "waiting": PALE_GREY}


def _colour(kind: str, lighter: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (part + lighter * _LIGHTER * (1 - part) for part in to_rgb(_COLOURS[kind]))
    return red, green, blue
