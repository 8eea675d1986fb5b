"""The options of ``resilient simulate``, and the traces of availability that they name.

What is slow to import is imported when it is used. Must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.cli.shared.job_options import JobOptions
from resilient.cli.shared.ranges import within
from resilient.cli.shared.renamed_options import renamed
from resilient.errors import ArgumentError

if TYPE_CHECKING:
    from resilient.simulation.availability.traces import AvailabilityTrace

_PERIODIC = re.compile(r"every-(\d+(?:\.\d+)?)(h|min|s)")
_SECONDS = {"h": 3600, "min": 60, "s": 1}
_DEFAULT_HOURS = 12.0
_DEFAULT_NODES = 30


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(JobOptions):
    """The options of ``resilient simulate``."""

    availability: Annotated[
        list[str],
        typer.Option(
            help='A file (time_ms,add|remove,node or YYYY-MM-DD, HH:MM:SS, count); "ec2-p3" or "g4dn" for made-up spot '
            'nodes; "every-6h", "every-10min" for a loss each time, down to half of the nodes. Repeatable.'
        ),
    ]
    nodes: Annotated[
        int | None, typer.Option(help="Scale to so many nodes at most; a file's own number by default, else 30.")
    ] = None
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="resilient, bamboo, varuna or restart, or one of the latter with -tuned; repeatable; all, or "
            "resilient alone in a sweep."
        ),
    ] = None
    hours: Annotated[
        float | None, typer.Option(help="Length; a file is cut or prolonged to it, spot nodes are made up for 12.")
    ] = None
    seed: Annotated[
        int,
        typer.Option(callback=within(0), help="Of what is made up, and of the nodes that a count does not name."),
    ] = 0
    announced: Annotated[
        bool, typer.Option("--announced", help="Nodes are told in time and stay until the step is finished.")
    ] = False
    regroup_ms: Annotated[float, typer.Option(help="resilient: from a loss to new groups.")] = 61.0
    restart_s: Annotated[float, typer.Option(help="Others: from a loss to restarted processes.")] = 60.0
    storage_gb_s: Annotated[
        float | None,
        typer.Option(help="Saving and loading checkpoints, GB/s of the whole job; 1 where nodes have none of theirs."),
    ] = None
    node_storage_gb_s: Annotated[
        float | None, typer.Option(help="GB/s of each node, up to --storage-gb-s together, where that is given.")
    ] = None
    checkpoint_steps: Annotated[
        int, typer.Option(callback=within(1), help="bamboo, varuna, restart: steps between checkpoints, as published.")
    ] = 10
    insurance_steps: Annotated[
        int | None,
        typer.Option(
            callback=within(0), help="resilient: steps between checkpoints; 0 for none; by cost and risk by default."
        ),
    ] = None
    risk_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds between losses that go back to a checkpoint, for resilient and what is tuned; as the trace "
            "has them by default."
        ),
    ] = None
    restart_nodes: Annotated[
        int | None,
        typer.Option(callback=within(1), help="restart: nodes of the job; as many as at the start by default."),
    ] = None
    step_factor: Annotated[float, typer.Option(help="By which steps take longer than derived.")] = 1.0
    bamboo_factor: Annotated[
        float, typer.Option(help="bamboo: by which its steps take longer still; 1 for its idea alone.")
    ] = 2.9
    price: Annotated[float | None, typer.Option(help="$ for a node and hour; a spot price by default.")] = None
    sweep: Annotated[
        list[str] | None, typer.Option(help='What if: "nodes=16,24,32", "max-failures=1,2,3"; repeatable.')
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw here; with several traces, their names are added.")
    ] = None
    old_trace: Annotated[str | None, renamed("--trace", "--availability")] = None


def load_trace(text: str, nodes: int | None, hours: float | None, seed: int) -> AvailabilityTrace:
    """Return the trace that ``--availability`` names.

    Args:
        text: A file, a market, or ``every-<number><h|min|s>``.
        nodes: The most nodes; a file's own number, or 30, by default.
        hours: Length; a file's and periodic failures' own, or 12, by default.
        seed: Of what is made up.

    Raises:
        ValueError: It is none of these, or not a trace, or has no such length or number of nodes.
        OSError: The file cannot be read.
    """
    from resilient.simulation.availability.spot_market import MARKETS, spot_trace
    from resilient.simulation.availability.traces import MOST_HOURS, MOST_TRACED_NODES, periodic_failures, read_trace

    if nodes is not None and not 1 <= nodes <= MOST_TRACED_NODES:
        raise ArgumentError("nodes", f"be 1 to {MOST_TRACED_NODES}", nodes, "leave it out for the trace's own")
    if hours is not None and not 0.001 <= hours <= MOST_HOURS:
        raise ArgumentError("hours", f"be 0.001 to {MOST_HOURS}", hours, "leave it out for the trace's own")
    if text in MARKETS:
        return spot_trace(text, nodes or _DEFAULT_NODES, _DEFAULT_HOURS if hours is None else hours, seed=seed)
    periodic = _PERIODIC.fullmatch(text)
    if periodic:
        interval_s = float(periodic[1]) * _SECONDS[periodic[2]]
        try:
            trace = periodic_failures(nodes or _DEFAULT_NODES, interval_s, seed=seed)
        except ValueError:
            constraint = f"lose nodes 0.001 s or more apart, the last within {MOST_HOURS} hours"
            raise ArgumentError("availability", constraint, repr(text), "give a time as in every-6h") from None
    elif Path(text).is_file():
        trace = read_trace(Path(text), seed=seed, hours=hours or 0.0)
        trace = trace if nodes is None else trace.scaled(nodes)
    else:
        raise ArgumentError(
            "availability", f"be a file, {', '.join(MARKETS)} or like every-6h", repr(text), "check the path"
        )
    return trace if hours is None else trace.lasting(hours)


def picture_files(
    path: Path | None, traces: Sequence[AvailabilityTrace], sweeps: Mapping[str, tuple[int, ...]]
) -> Sequence[Path | None]:
    """Return the picture of each trace.

    Args:
        path: ``--png``, if it is given.
        traces: What is replayed.
        sweeps: ``--sweep``; there are no pictures of it.

    Raises:
        ArgumentError: There is a sweep, or two traces would have the same picture.
    """
    if path is None:
        return [None] * len(traces)
    if sweeps:
        raise ArgumentError("png_file", "come without {sweep}", path, "leave one of them out")
    if len(traces) == 1:
        return [path]
    named = {path.with_name(f"{path.stem}-{trace.name}{path.suffix}"): None for trace in traces}
    if len(named) < len(traces):
        names = ", ".join(trace.name for trace in traces)
        raise ArgumentError(
            "availability", "name different files for {png_file}", names, "rename one, or draw one at a time"
        )
    return list(named)
