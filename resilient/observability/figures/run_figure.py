"""Draws ``report.png``: the loss with failures and joins marked, and what each recovery took.

Reads events and the report only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.observability.event_log import Event, loss_of, steps_of
from resilient.observability.figures.style import BLUE, GREEN, INK, PALE_BLUE, PALE_GREY, RED, legend_above, panels
from resilient.observability.wording import RECOVERY_PARTS, duration, lost_work, three_digits
from resilient.templates.common.words import counted, listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PART_COLOURS: dict[str, str] = dict(
    zip(RECOVERY_PARTS, ("#c92a2a", "#e8890c", "#f2c94c", "#4a90d9", "#9aa5b1"), strict=True)
)
_SHOWN_RECOVERIES = 12
_SHOWN_LABELS = 8


def draw_report(
    events: Sequence[Event],
    report: Mapping[str, Any],
    path: Path | str,
    reference_events: Sequence[Event] | None = None,
) -> None:
    """Draw a run as a PNG file.

    Args:
        events: All events of the run.
        report: What :func:`resilient.observability.run_report.build_run_report` made of them.
        path: The file to write.
        reference_events: Events of the failure-free run of the same job, drawn behind the run's loss.
    """
    shown = report["recoveries"][:_SHOWN_RECOVERIES]
    bars_inches = 1.3 + 0.45 * len(shown)
    with panels(path, [4.3, bars_inches] if shown else [4.3]) as axes:
        _draw_loss(axes[0], steps_of(events), report, steps_of(reference_events or ()))
        if shown:
            _draw_recoveries(axes[1], shown, left_out=len(report["recoveries"]) - len(shown))


def _draw_loss(
    axes: Axes, steps: Mapping[int, Event], report: Mapping[str, Any], reference: Mapping[int, Event]
) -> None:
    if reference:
        losses = [loss_of(step) for step in reference.values()]
        axes.plot(
            list(reference), losses, color=PALE_BLUE, linewidth=5, solid_capstyle="round", label="without failures"
        )
    style = {"marker": "o", "markersize": 3.5} if len(steps) <= 60 else {}
    axes.plot(
        list(steps), [loss_of(step) for step in steps.values()], color=BLUE, linewidth=1.6, label="this run", **style
    )
    _mark(axes, report["recoveries"], RED, "failure", row=0)
    _mark(axes, report["joins"], GREEN, "join", row=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.margins(x=0.02)
    axes.grid(axis="y", color=PALE_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(_headline(report), pad=34 if report["recoveries"] or report["joins"] else 10)
    if steps:
        axes.legend(loc="upper right")


def _headline(report: Mapping[str, Any]) -> str:
    recoveries = report["recoveries"]
    words = [counted(report["steps"], "step")]
    if recoveries:
        total_ms = max(recovery["total_ms"] for recovery in recoveries)
        what = f"{len(recoveries)} failures survived, slowest" if len(recoveries) > 1 else "a failure survived"
        words.append(f"{what} in {duration(total_ms)}")
    if report["joins"]:
        words.append(f"{len(report['joins'])} joins" if len(report["joins"]) > 1 else "a node joined")
    if report.get("max_loss_abs_diff") is not None:
        difference = report["max_loss_abs_diff"]
        words.append(f"loss differs by {difference:.1e}" if difference else "same loss to the last bit")
    return "  ·  ".join(words)


def _mark(axes: Axes, changes: Sequence[Mapping[str, Any]], colour: str, word: str, row: int) -> None:
    """Draw a line where training was interrupted, labelled above the axes (failures and joins in a row each)."""
    for index, change in enumerate(changes):
        position = change["step"] - 0.5
        axes.axvline(position, color=colour, linewidth=1.4, linestyle=(0, (4, 2)), label=word if index == 0 else None)
        if len(changes) <= _SHOWN_LABELS:
            axes.annotate(
                _who(change["nodes"], word),
                (position, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 4 + 13 * row),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontsize=9,
            )


def _who(nodes: Sequence[int], word: str) -> str:
    if not nodes:
        return word
    plural = "s" if len(nodes) > 1 else ""
    return f"node{plural} {listed(nodes)} {'joined' if word == 'join' else 'lost'}"


def _draw_recoveries(axes: Axes, recoveries: Sequence[Mapping[str, Any]], left_out: int) -> None:
    suffix = f" (first {len(recoveries)} of {len(recoveries) + left_out})" if left_out else ""
    axes.set_title(f"What each recovery took{suffix}", pad=26)
    longest_ms = max(recovery["total_ms"] for recovery in recoveries)
    for row, recovery in enumerate(recoveries):
        end_ms = 0.0
        for part in RECOVERY_PARTS:
            part_ms = recovery[f"{part}_ms"] or 0.0
            axes.barh(
                row, part_ms, left=end_ms, height=0.6, color=_PART_COLOURS[part], edgecolor="white", linewidth=0.8
            )
            if part_ms > 0.035 * longest_ms:
                ink = INK if part in ("regroup", "redo") else "white"
                axes.text(
                    end_ms + part_ms / 2, row, three_digits(part_ms), ha="center", va="center", color=ink, fontsize=8.5
                )
            end_ms += part_ms
        _annotate_bar(axes, recovery, end_ms, row)
    axes.set_yticks(
        range(len(recoveries)), [f"step {r['step']}\n{_who(r['nodes'], 'failure')}" for r in recoveries], fontsize=9
    )
    axes.set_ylim(len(recoveries) - 0.5, -0.5)
    axes.set_xlim(0, (longest_ms or 1.0) * 1.56)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    legend_above(axes, _PART_COLOURS)


def _annotate_bar(axes: Axes, recovery: Mapping[str, Any], end_ms: float, row: int) -> None:
    """Write the total and, below it, every part: the narrow ones have no room in the bar."""
    parts = [f"{part} {three_digits(recovery[f'{part}_ms'])}" for part in RECOVERY_PARTS if recovery[f"{part}_ms"]]
    lines = (
        (f"{duration(recovery['total_ms'])}, {lost_work(recovery)}", 1, 9, INK),
        (" + ".join(parts), -10, 7.5, "#616e7c"),
    )
    for text, offset, size, colour in lines:
        axes.annotate(text, (end_ms, row), xytext=(7, offset), textcoords="offset points", fontsize=size, color=colour)
