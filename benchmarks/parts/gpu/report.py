"""What a benchmark of a GPU prints and writes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from benchmarks.parts.gpu.part import Outcome
from resilient.cli.shared.printing import plain_table


def machine(device: str) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    on_gpu = device == "cuda"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if on_gpu else []
    return {
        "devices": names,
        "memory_bytes": torch.cuda.mem_get_info()[1] if on_gpu else None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
    }


def table_of(outcomes: Sequence[Outcome], title: str) -> Table:
    """Return the table of all parts; what was skipped, failed or is wrong says why."""
    table = plain_table("part", "what", "value", "beside", left=("part", "what", "beside"), title=title)
    for outcome in outcomes:
        label = outcome.part
        for row in outcome.rows:
            beside = f"WRONG: {row.wrong}" if row.wrong else row.beside
            table.add_row(label, row.what, _cell(row.value, row.unit), beside)
            label = ""
        if outcome.skipped:
            table.add_row(label, "skipped", "", outcome.skipped)
        elif outcome.failed:
            table.add_row(label, "FAILED", "", outcome.failed)
        elif not outcome.rows:
            table.add_row(label, "FAILED", "", "it measured nothing")
    return table


def _cell(value: float | str, unit: str) -> str:
    text = value if isinstance(value, str) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def report_of(
    outcomes: Sequence[Outcome], *, machine: dict[str, Any], is_rehearsal: bool, took_s: float
) -> dict[str, Any]:
    """Return all of it, for a JSON file."""
    return {
        "machine": machine,
        "is_rehearsal": is_rehearsal,
        "took_s": took_s,
        "parts": [asdict(outcome) for outcome in outcomes],
    }
