"""The tables of ``resilient simulate``, 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.simulation.availability.traces import AvailabilityTrace
from resilient.simulation.replay.outcome import TIME_PARTS, ReplayOutcome
from resilient.simulation.sweep import SweepRow, best
from resilient.templates.common.words import counted

_SHORT = {"training": "train", "redundant": "dupl.", "recovery": "recov.", "checkpointing": "ckpt"}


def show_trace(trace: AvailabilityTrace, console: Console) -> None:
    """Print what happens in a trace."""
    lost = sum(len(change.lost) for change in trace.changes)
    joined = sum(len(change.joined) for change in trace.changes) - trace.first_nodes
    console.print(f"\n{trace.name}", style="bold", highlight=False, emoji=False)
    console.print(
        f"{trace.end_ms / 3.6e6:.4g} h, {counted(trace.first_nodes, 'node')} at the start, {trace.max_nodes} at most; "
        f"{lost} lost, {joined} joined",
        soft_wrap=True,
    )


def show_outcomes(outcomes: Sequence[ReplayOutcome], missing: Sequence[tuple[str, str]], console: Console) -> None:
    """Print what policies made of a trace, and why others cannot train there at all."""
    parts = (_SHORT.get(part, part) for part in TIME_PARTS)
    table = plain_table("policy", "samples/s", "M samples", "$/M", *parts, left=("policy",))
    for before, outcome in zip((None, *outcomes), outcomes, strict=False):
        total = outcome.node_ns
        is_below = before is not None and outcome.policy == f"{before.policy}-tuned"
        shares = (f"{100 * part / total:.1f}" for part in outcome.split_ns.values())
        table.add_row(
            "  tuned" if is_below else outcome.policy,
            f"{outcome.samples_per_s:.4g}",
            f"{outcome.samples / 1e6:.4g}",
            _dollars(outcome.dollars_per_million),
            *shares,
        )
    for policy, _ in missing:
        table.add_row(policy, "does not fit")
    console.print(table)
    console.print("train to idle: % of the nodes' time", style="dim")
    if any(outcome.policy.endswith("-tuned") for outcome in outcomes):
        console.print("tuned: checkpoints by what they cost and how often they are needed", style="dim")
    for policy, reason in missing:
        console.print(f"{policy}: {reason}", style="dim", soft_wrap=True, markup=False)


def show_sweep(rows: Sequence[SweepRow], console: Console) -> None:
    """Print a row for each combination; the fastest and the cheapest are marked."""
    fastest = best(rows, lambda outcome: outcome.samples_per_s or None, least=False)
    cheapest = best(rows, lambda outcome: outcome.dollars_per_million, least=True)
    words = (*rows[0].values, "policy", "")
    table = plain_table(*rows[0].values, "policy", "samples/s", "", "$ / M samples", "", left=words)
    for index, row in enumerate(rows):
        values = [str(value) for value in row.values.values()]
        if row.outcome is None:
            table.add_row(*values, row.policy, "does not fit")
            continue
        table.add_row(
            *values,
            row.policy,
            f"{row.outcome.samples_per_s:.4g}",
            "fastest" if index == fastest else "",
            _dollars(row.outcome.dollars_per_million),
            "cheapest" if index == cheapest else "",
            style="bold" if index in (fastest, cheapest) else None,
        )
    console.print(table)
    for reason in dict.fromkeys(f"{row.policy}: {row.reason}" for row in rows if row.outcome is None):
        console.print(reason, style="dim", soft_wrap=True, markup=False)


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"
