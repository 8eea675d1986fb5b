"""``resilient simulate``: what a job would get done, and at what price, on nodes that come and go.

Owns options and files; what is slow to import is imported when the command runs. Must not import torch.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from resilient.cli.shared.errors import option_names
from resilient.cli.shared.job_options import (
    JOB_OPTIONS,
    BatchOption,
    DeviceOption,
    FailuresOption,
    FrozenOption,
    GpusOption,
    MicrobatchOption,
    ModelOption,
    NetworkOption,
    PipelineNodesOption,
    ProfileOption,
    SeqLenOption,
    described_job,
    refusals,
    table_console,
)
from resilient.cli.shared.output_files import check_outputs
from resilient.cli.shared.renamed_options import renamed
from resilient.errors import ArgumentError

if TYPE_CHECKING:
    from resilient.simulation.availability.traces import AvailabilityTrace
    from resilient.simulation.replay.costs import ChangeCosts
    from resilient.simulation.scenario import Scenario
    from resilient.templates.plan import PlanningProblem

_PERIODIC = re.compile(r"every-(\d+(?:\.\d+)?)(h|min|s)")
_SECONDS = {"h": 3600, "min": 60, "s": 1}
_DEFAULT_HOURS = 12.0
_DEFAULT_NODES = 30
_LEAST_GB_S = 0.001


def simulate_command(
    ctx: typer.Context,
    availability: Annotated[
        list[str],
        typer.Option(
            help='A file (time_ms,add|remove,node or YYYY-MM-DD, HH:MM:SS, count); "ec2-p3" or "g4dn" for made-up spot '
            'nodes; "every-6h", "every-10min" for a loss each time, down to half of the nodes. Repeatable.'
        ),
    ],
    model: ModelOption = None,
    profile: ProfileOption = None,
    device: DeviceOption = None,
    nodes: Annotated[
        int | None, typer.Option(help="Scale to so many nodes at most; a file's own number by default, else 30.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="resilient, bamboo, varuna or restart; repeatable; all, or resilient alone in a sweep."),
    ] = None,
    gpus_per_node: GpusOption = 1,
    network_gbit_s: NetworkOption = None,
    max_failures: FailuresOption = 1,
    min_pipeline_nodes: PipelineNodesOption = 1,
    global_batch: BatchOption = None,
    microbatch: MicrobatchOption = None,
    seq_len: SeqLenOption = None,
    frozen: FrozenOption = None,
    hours: Annotated[
        float | None, typer.Option(help="Length; a file is cut or prolonged to it, spot nodes are made up for 12.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is made up, and of the nodes that a count does not name.")] = 0,
    announced: Annotated[
        bool, typer.Option("--announced", help="Nodes are told in time and stay until the step is finished.")
    ] = False,
    regroup_ms: Annotated[float, typer.Option(help="resilient: from a loss to new groups.")] = 61.0,
    restart_s: Annotated[float, typer.Option(help="Others: from a loss to restarted processes.")] = 60.0,
    storage_gb_s: Annotated[float, typer.Option(help="Saving and loading checkpoints, GB/s of the whole job.")] = 1.0,
    checkpoint_steps: Annotated[int, typer.Option(min=1, help="varuna, restart: steps between checkpoints.")] = 10,
    insurance_steps: Annotated[int, typer.Option(min=0, help="resilient: steps between checkpoints; 0 for none.")] = 30,
    restart_nodes: Annotated[
        int | None, typer.Option(min=1, help="restart: nodes of the job; as many as at the start by default.")
    ] = None,
    step_factor: Annotated[float, typer.Option(help="By which steps take longer than derived.")] = 1.0,
    price: Annotated[float | None, typer.Option(help="$ for a node and hour; a spot price by default.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help='What if: "nodes=16,24,32", "max-failures=1,2,3"; repeatable.')
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw here; with several traces, their names are added.")
    ] = None,
    old_trace: Annotated[str | None, renamed("--trace", "--availability")] = None,
) -> None:
    """Replay availability traces: throughput, where the nodes' time goes, and dollars, by policy."""
    from resilient.simulation.replay.costs import ChangeCosts
    from resilient.simulation.scenario import POLICIES, Scenario
    from resilient.simulation.sweep import parse_sweeps
    from resilient.templates.common.words import look_up

    console = Console(highlight=False)
    started = time.monotonic()
    with refusals(ctx):
        if not storage_gb_s >= _LEAST_GB_S:
            raise ArgumentError("storage_gb_s", f"be at least {_LEAST_GB_S}", storage_gb_s, "give what was measured")
        problem, samples = described_job(
            model=model,
            profile=profile,
            device=device,
            gpus_per_node=gpus_per_node,
            network_gbit_s=network_gbit_s,
            max_failures=max_failures,
            min_pipeline_nodes=min_pipeline_nodes,
            global_batch=global_batch,
            microbatch=microbatch,
            seq_len=seq_len,
            frozen=frozen,
        )
        batch = problem.num_microbatches * samples
        storage_s = sum(layer.state_bytes for layer in problem.profile.layers) / storage_gb_s / 1e9
        costs = ChangeCosts(
            regroup_ms=regroup_ms,
            restart_s=restart_s,
            load_s=storage_s,
            checkpoint_s=storage_s,
            checkpoint_steps=checkpoint_steps,
            insurance_steps=insurance_steps or None,
            step_factor=step_factor,
        )
        dollars = _node_hour_dollars(device, gpus_per_node, price)
        sweeps = parse_sweeps(sweep or ())
        if nodes is not None and "nodes" in sweeps:
            raise ArgumentError("nodes", "come without {sweep} nodes", nodes, "leave one of them out")
        policies = tuple(dict.fromkeys(policy or (("resilient",) if sweeps else POLICIES)))
        for name in policies:
            look_up("policy", name, dict.fromkeys(POLICIES))

        @cache
        def scenario(failures: int | None, max_nodes: int) -> Scenario:
            return Scenario(
                problem=_with_failures(problem, failures),
                batch=batch,
                max_nodes=max_nodes,
                costs=costs,
                node_hour_dollars=dollars,
                announced=announced,
                restart_nodes=restart_nodes,
            )

        texts = tuple(dict.fromkeys(availability))
        traces = [load_trace(text, nodes, hours, seed) for text in texts]
        pictures = _pictures(png_file, traces, sweeps)
        inputs = [profile, *map(Path, texts)]
        check_outputs([("--json", json_file), *(("--png", picture) for picture in pictures)], inputs)
        written: list[Any] = []
        for text, own, picture in zip(texts, traces, pictures, strict=True):
            if sweeps:

                def made(count: int | None, text: str = text, own: AvailabilityTrace = own) -> AvailabilityTrace:
                    return own if count is None else load_trace(text, count, hours, seed)

                written.append(_sweep(made, sweeps, scenario, policies, console, ctx))
            else:
                written.append(_compare(own, scenario, policies, console, picture, ctx))
        if json_file is not None:
            summary = _summary(problem, batch, costs, dollars, announced)
            json_file.write_text(json.dumps({"job": summary, "traces": written}, indent=2) + "\n")
    console.print(f"\nreplayed in {time.monotonic() - started:.1f} s", style="dim")


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
        except ValueError as error:
            raise ValueError(f"--availability {text}: {error}") from None
    elif Path(text).is_file():
        trace = read_trace(Path(text), seed=seed, hours=hours or 0.0)
        trace = trace if nodes is None else trace.scaled(nodes)
    else:
        raise ArgumentError(
            "availability", f"be a file, {', '.join(MARKETS)} or like every-6h", repr(text), "check the path"
        )
    return trace if hours is None else trace.lasting(hours)


def _node_hour_dollars(device: str | None, devices_per_node: int, price: float | None) -> float:
    from resilient.simulation.replay.outcome import PRICES
    from resilient.templates.common.words import look_up

    if price is not None:
        if not 0 <= price < math.inf:
            raise ArgumentError("price", "be >= 0", price, "0 leaves dollars out")
        return price
    if device is None:
        raise ArgumentError("price", "be given without {device}", "none", "0 leaves dollars out")
    return devices_per_node * look_up("device", device, PRICES)


def _with_failures(problem: PlanningProblem, failures: int | None) -> PlanningProblem:
    from dataclasses import replace

    from resilient.simulation.scenario import DoesNotFit

    try:
        return problem if failures is None else replace(problem, max_failures=failures)
    except ValueError as error:
        raise DoesNotFit(error) from None


def _compare(
    trace: AvailabilityTrace,
    scenario: Callable[[int | None, int], Scenario],
    policies: Sequence[str],
    console: Console,
    png_file: Path | None,
    ctx: typer.Context,
) -> dict[str, Any]:
    from resilient.cli.simulate.figure import draw_outcomes
    from resilient.cli.simulate.tables import show_outcomes, show_trace
    from resilient.simulation.scenario import DoesNotFit

    outcomes, missing = [], []
    for policy in policies:
        try:
            with console.status(f"replaying {trace.name}: {policy}"):
                outcomes.append(scenario(None, trace.max_nodes).run(trace, policy))
        except DoesNotFit as error:
            missing.append((policy, error.told(option_names(ctx, JOB_OPTIONS))))
    tables = table_console()
    show_trace(trace, tables)
    show_outcomes(outcomes, missing, tables)
    if png_file is not None and outcomes:
        draw_outcomes(outcomes, png_file)
    return {
        "trace": trace.name,
        "outcomes": [outcome.to_dict() for outcome in outcomes],
        "does_not_fit": dict(missing),
    }


def _sweep(
    trace: Callable[[int | None], AvailabilityTrace],
    sweeps: dict[str, tuple[int, ...]],
    scenario: Callable[[int | None, int], Scenario],
    policies: Sequence[str],
    console: Console,
    ctx: typer.Context,
) -> dict[str, Any]:
    from resilient.cli.simulate.tables import show_sweep, show_trace
    from resilient.simulation.sweep import run_sweep

    own = trace(None)
    with console.status(f"replaying {own.name}"):
        rows = list(run_sweep(sweeps, trace, scenario, policies, option_names(ctx, JOB_OPTIONS)))
    tables = table_console()
    show_trace(own, tables)
    show_sweep(rows, tables)
    return {
        "trace": own.name,
        "rows": [
            {"values": dict(row.values), "policy": row.policy, "does_not_fit": row.reason}
            if row.outcome is None
            else {"values": dict(row.values), **row.outcome.to_dict()}
            for row in rows
        ],
    }


def _summary(
    problem: PlanningProblem, batch: int, costs: ChangeCosts, node_hour_dollars: float, announced: bool
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "profile": problem.profile.source,
        "global_batch": batch,
        "num_microbatches": problem.num_microbatches,
        "devices_per_node": problem.cluster.devices_per_node,
        "max_failures": problem.max_failures,
        "announced": announced,
        "node_hour_dollars": node_hour_dollars,
        "costs": asdict(costs),
    }


def _pictures(
    path: Path | None, traces: Sequence[AvailabilityTrace], sweeps: dict[str, tuple[int, ...]]
) -> Sequence[Path | None]:
    """Return the picture of each trace."""
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
