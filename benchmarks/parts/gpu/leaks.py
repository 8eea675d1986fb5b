"""What survivors keep of many recoveries: memory of host and device, threads, descriptors, groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts.gpu.part import Row, Setting
from benchmarks.parts.gpu.runs import wrong_devices
from benchmarks.parts.steps import JOBS
from resilient.observability.event_log import read_events
from tests.integration.recoveries import COMM_TIMEOUT_S, EARLY, PLACES, Usage, recover

RECOVERIES = 20
LARGEST_GROWTH_MB = 2.0
"""Of the host's memory, over the recoveries after the early ones."""
_MB = 2**20
_SLACK = {"communicators": 0.0, "allocated_bytes": 0.0, "reserved_bytes": 20.0}
"""By which a later third of the steps may have more than an earlier one: torch's allocator reserves in such pieces."""


def measure(setting: Setting) -> list[Row]:
    """Have two workers live through the recoveries."""
    count = EARLY.start if setting.is_rehearsal else RECOVERIES
    directory, told = setting.folder / "run", setting.folder / "usage"
    told.mkdir()
    arguments = ("--device", setting.device, "--usage", str(told), "--comm-timeout-s", str(COMM_TIMEOUT_S))
    arguments += ("--min-pipeline-nodes", "2")
    usages = recover(directory, count, JOBS / "small.py", arguments)
    wrong = wrong_devices(setting, read_events(directory / "events.jsonl"))
    rows = [Row(what="recoveries", value=count, wrong="; ".join(wrong))]
    for node, of_node in usages.items():
        rows += [*process_rows(node, of_node), *device_rows(node, read_told(told / f"usage-{node}.jsonl"))]
    return rows


def process_rows(node: int, usages: Sequence[Usage]) -> list[Row]:
    """Return what a survivor's process had early on, and has."""
    early, last = usages[EARLY], usages[-1]
    threads, descriptors = (max(getattr(each, name) for each in early) for name in ("threads", "descriptors"))
    grown_mb = last.memory_mb - early[-1].memory_mb
    return [
        _row(node, "threads", last.threads, threads, last.threads <= threads + PLACES),
        _row(node, "descriptors", last.descriptors, descriptors, last.descriptors <= descriptors + PLACES),
        _row(node, "host memory", last.memory_mb, early[-1].memory_mb, grown_mb < LARGEST_GROWTH_MB, "MB"),
    ]


def device_rows(node: int, told: Sequence[dict[str, int]]) -> list[Row]:
    """Return what a survivor wrote down of its device and groups: the most in a third of the steps, and in the last.

    What it holds depends on its place, which changes with every generation: so thirds, of many generations each.
    """
    third = len(told) // 3
    rows: list[Row] = []
    for what, key, scale, unit in (
        ("communicators", "communicators", 1, ""),
        ("allocated on the device", "allocated_bytes", _MB, "MB"),
        ("reserved on the device", "reserved_bytes", _MB, "MB"),
    ):
        before, after = (max(line[key] for line in part) / scale for part in (told[third : 2 * third], told[-third:]))
        rows.append(_row(node, what, after, before, after <= before + _SLACK[key], unit))
    return rows


def read_told(path: Path) -> list[dict[str, int]]:
    """Return what a worker of ``small.py`` wrote down."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _row(node: int, what: str, now: float, before: float, is_right: bool, unit: str = "") -> Row:
    wrong = "" if is_right else f"it has grown from {before:.4g}"
    return Row(what=f"node {node}: {what}", value=now, unit=unit, beside=f"before: {before:.4g}", wrong=wrong)
