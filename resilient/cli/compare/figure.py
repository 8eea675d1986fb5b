"""Draws what ``resilient compare`` found: how long each planner's step takes, and what it goes to."""

from __future__ import annotations

from pathlib import Path

from resilient.cli.compare.report import Comparison
from resilient.observability.figures.style import BLUE, INK, PALE_BLUE, PALE_GREY, panels
from resilient.observability.wording import duration


def draw_bars(comparison: Comparison, path: Path | str) -> None:
    """Draw a bar for each planner, as a PNG file.

    Args:
        comparison: With a row at least.
        path: The file to write.
    """
    rows = comparison.rows
    names = [row.name for row in rows]
    computing = [(1 - row.bubble) * row.iteration_ms for row in rows]
    sums = [row.sum_ms for row in rows]
    waiting = [row.iteration_ms - busy - row.sum_ms for row, busy in zip(rows, computing, strict=True)]
    with panels(path, [1.3 + 0.4 * len(rows)]) as (axes,):
        left = [0.0] * len(rows)
        parts = (("computing", computing, BLUE), ("waiting", waiting, PALE_GREY), ("gradient sums", sums, PALE_BLUE))
        for label, values, colour in parts:
            axes.barh(names, values, left=left, color=colour, label=label)
            left = [start + value for start, value in zip(left, values, strict=True)]
        for number, row in enumerate(rows):
            speed_up = comparison.speed_up(row)
            text = f"{duration(row.iteration_ms)}" + ("" if speed_up is None else f", {speed_up:.2f}x")
            axes.annotate(
                text,
                (row.iteration_ms, number),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=INK,
            )
        axes.axvline(comparison.bound_ms, color=INK, linewidth=1, linestyle="--", label="bound")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(row.iteration_ms for row in rows))
        axes.set_xlabel("ms per step, mean over devices")
        axes.set_title("Steps by planner", pad=24)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.2, ncols=4, fontsize=8.5)
