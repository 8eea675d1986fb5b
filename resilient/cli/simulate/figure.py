"""Draws replays: how many nodes there were, what each policy got done with them, and where the nodes' time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.observability.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PALE_BLUE,
    PALE_GREY,
    RED,
    legend_above,
    panels,
)
from resilient.simulation.replay.outcome import TIME_PARTS, ReplayOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR_NS = 3_600_000_000_000
_POLICY_COLOURS = {
    "resilient": BLUE,
    "varuna": "#e8890c",
    "bamboo": GREEN,
    "restart": RED,
}
_PART_COLOURS = {
    "training": BLUE,
    "redundant": "#6fa3d8",
    "redone": RED,
    "recovery": "#e8890c",
    "checkpointing": "#f2c94c",
    "idle": "#cbd2d9",
}
_WINDOWS = 90
_MOST_IN_A_LINE = 3


def draw_outcomes(outcomes: Sequence[ReplayOutcome], path: Path | str) -> None:
    """Draw the runs of several policies on one trace as a PNG file.

    Args:
        outcomes: One for each policy, at least one.
        path: The file to write.
    """
    with panels(path, [1.9, 3.6, 1.0 + 0.42 * len(outcomes)]) as axes:
        _draw_nodes(axes[0], outcomes[0])
        _draw_throughput(axes[1], outcomes)
        _draw_split(axes[2], outcomes)
        run = outcomes[0].stretches
        for each in axes[:2]:
            each.set_xlim(run[0].start_ns / _HOUR_NS, run[-1].end_ns / _HOUR_NS)


def _draw_nodes(axes: Axes, outcome: ReplayOutcome) -> None:
    hours = [stretch.start_ns / _HOUR_NS for stretch in outcome.stretches]
    live = [stretch.live for stretch in outcome.stretches]
    hours.append(outcome.stretches[-1].end_ns / _HOUR_NS)
    live.append(live[-1])
    axes.fill_between(hours, live, step="post", color=PALE_BLUE, linewidth=0)
    axes.step(hours, live, where="post", color=INK, linewidth=0.9)
    axes.set_ylim(0, 1.12 * max(live))
    axes.set_ylabel("live nodes")
    axes.set_title(
        f"{outcome.trace}: {outcome.node_ns / outcome.duration_ns:.1f} nodes on average, {max(live)} at most"
    )


def _draw_throughput(axes: Axes, outcomes: Sequence[ReplayOutcome]) -> None:
    window_s = outcomes[0].duration_ns / 1e9 / _WINDOWS
    for outcome in outcomes:
        colour = _POLICY_COLOURS[outcome.policy.removesuffix("-tuned")]
        style = (0, (1, 1.5)) if outcome.policy.endswith("-tuned") else "-"
        points = list(outcome.throughput(window_s))
        label = f"{outcome.policy}: {outcome.samples_per_s:.4g} samples/s"
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, linestyle=style, label=label)
        axes.axhline(outcome.samples_per_s, color=colour, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hours")
    axes.set_ylabel("samples/s kept")
    axes.grid(axis="y", color=PALE_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    columns = min(_MOST_IN_A_LINE, len(outcomes))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, borderaxespad=0.2, handlelength=1.4)
    axes.set_title("Samples of steps that were not lost later", pad=10 + 16 * -(-len(outcomes) // columns))


def _draw_split(axes: Axes, outcomes: Sequence[ReplayOutcome]) -> None:
    for row, outcome in enumerate(outcomes):
        left = 0.0
        split, total = outcome.split_ns, outcome.node_ns
        for part in TIME_PARTS:
            width = 100 * split[part] / total
            colour = _PART_COLOURS[part]
            axes.barh(row, width, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.8)
            if width >= 4:
                ink = INK if part in ("checkpointing", "idle") else "white"
                axes.text(left + width / 2, row, f"{width:.0f}", ha="center", va="center", color=ink, fontsize=8.5)
            left += width
        price = outcome.dollars_per_million
        text = "no samples" if price is None else f"${price:,.4g} / M samples"
        axes.annotate(text, (100, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(outcomes)), [outcome.policy for outcome in outcomes])
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("% of the nodes' time")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_title("Where the nodes' time went", pad=26)
    legend_above(axes, {part: _PART_COLOURS[part] for part in TIME_PARTS})
