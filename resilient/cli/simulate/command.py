"""``resilient simulate``: what a job would get done, and at what price, on nodes that come and go.

Replays and writes; :mod:`resilient.cli.simulate.options` describes and reads, :mod:`resilient.cli.simulate.tables`
prints. What is slow to import is imported when the command runs. Must not import torch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from resilient.cli.shared.errors import option_names
from resilient.cli.shared.job_options import JOB_OPTIONS, described_job, refusals
from resilient.cli.shared.options import command_of
from resilient.cli.shared.output_files import check_outputs
from resilient.cli.shared.printing import table_console
from resilient.cli.simulate.options import ReplayOptions, load_trace, picture_files
from resilient.errors import ArgumentError

if TYPE_CHECKING:
    from resilient.simulation.availability.traces import AvailabilityTrace
    from resilient.simulation.replay.costs import ChangeCosts
    from resilient.simulation.scenario import Scenario
    from resilient.templates.plan import PlanningProblem

_LEAST_GB_S = 0.001


@dataclass(frozen=True, kw_only=True)
class _Replayed:
    """The job, its costs and its policies, which are the same for all traces."""

    problem: PlanningProblem
    batch: int
    costs: ChangeCosts
    node_hour_dollars: float
    sweeps: Mapping[str, tuple[int, ...]]
    policies: Sequence[str]
    scenario: Callable[[int | None, int], Scenario]


@command_of(ReplayOptions)
def simulate_command(ctx: typer.Context, options: ReplayOptions) -> None:
    """Replay availability traces: throughput, where the nodes' time goes, and dollars, by policy."""
    console = Console(highlight=False, emoji=False)
    started = time.monotonic()
    with refusals(ctx):
        job = _described(options)
        texts = tuple(dict.fromkeys(options.availability))
        traces = [load_trace(text, options.nodes, options.hours, options.seed) for text in texts]
        pictures = picture_files(options.png_file, traces, job.sweeps)
        inputs = [options.profile, *map(Path, texts)]
        check_outputs([("--json", options.json_file), *(("--png", picture) for picture in pictures)], inputs)
        named = option_names(ctx, JOB_OPTIONS)
        written: list[Any] = []
        for text, trace, picture in zip(texts, traces, pictures, strict=True):
            if job.sweeps:
                written.append(_sweep(text, trace, options, job, named, console))
            else:
                written.append(_compare(trace, job, picture, named, console))
        if options.json_file is not None:
            summary = _summary(job, announced=options.announced)
            options.json_file.write_text(json.dumps({"job": summary, "traces": written}, indent=2) + "\n")
    console.print(f"\nreplayed in {time.monotonic() - started:.1f} s", style="dim")


def _described(options: ReplayOptions) -> _Replayed:
    from resilient.simulation.scenario import POLICIES, Scenario
    from resilient.simulation.sweep import parse_sweeps
    from resilient.templates.common.words import look_up

    for name in ("storage_gb_s", "node_storage_gb_s"):
        value = getattr(options, name)
        if value is not None and not value >= _LEAST_GB_S:
            raise ArgumentError(name, f"be at least {_LEAST_GB_S}", value, "give what was measured")
    problem, samples = described_job(options)
    batch, costs = problem.num_microbatches * samples, _costs(options, problem)
    dollars = _node_hour_dollars(options.device, options.gpus_per_node, options.price)
    sweeps = parse_sweeps(options.sweep or ())
    if options.nodes is not None and "nodes" in sweeps:
        raise ArgumentError("nodes", "come without {sweep} nodes", options.nodes, "leave one of them out")
    policies = tuple(dict.fromkeys(options.policy or (("resilient",) if sweeps else POLICIES)))
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
            announced=options.announced,
            restart_nodes=options.restart_nodes,
        )

    return _Replayed(
        problem=problem,
        batch=batch,
        costs=costs,
        node_hour_dollars=dollars,
        sweeps=sweeps,
        policies=policies,
        scenario=scenario,
    )


def _costs(options: ReplayOptions, problem: PlanningProblem) -> ChangeCosts:
    from resilient.simulation.replay.costs import ChangeCosts

    num_gb = sum(layer.state_bytes for layer in problem.profile.layers) / 1e9
    of_job, of_node = options.storage_gb_s, options.node_storage_gb_s
    of_job = 1.0 if of_job is None and of_node is None else of_job
    storage_s, node_storage_s = (num_gb / gb_s if gb_s is not None else 0.0 for gb_s in (of_job, of_node))
    return ChangeCosts(
        regroup_ms=options.regroup_ms,
        restart_s=options.restart_s,
        load_s=storage_s,
        node_load_s=node_storage_s,
        checkpoint_s=storage_s,
        node_checkpoint_s=node_storage_s,
        checkpoint_steps=options.checkpoint_steps,
        insurance_steps="auto" if options.insurance_steps is None else options.insurance_steps or None,
        risk_s=options.risk_s,
        step_factor=options.step_factor,
        bamboo_factor=options.bamboo_factor,
    )


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
    from resilient.simulation.scenario import DoesNotFit

    try:
        return problem if failures is None else replace(problem, max_failures=failures)
    except ValueError as error:
        raise DoesNotFit(error) from None


def _compare(
    trace: AvailabilityTrace,
    job: _Replayed,
    png_file: Path | None,
    named: Callable[[str], str],
    console: Console,
) -> dict[str, Any]:
    from resilient.cli.simulate.figure import draw_outcomes
    from resilient.cli.simulate.tables import show_outcomes, show_trace
    from resilient.simulation.scenario import DoesNotFit

    outcomes, missing = [], []
    for policy in job.policies:
        try:
            with console.status(f"replaying {trace.name}: {policy}"):
                outcomes.append(job.scenario(None, trace.max_nodes).run(trace, policy))
        except DoesNotFit as error:
            missing.append((policy, error.told(named)))
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
    text: str,
    own: AvailabilityTrace,
    options: ReplayOptions,
    job: _Replayed,
    named: Callable[[str], str],
    console: Console,
) -> dict[str, Any]:
    from resilient.cli.simulate.tables import show_sweep, show_trace
    from resilient.simulation.sweep import run_sweep

    def trace(count: int | None) -> AvailabilityTrace:
        return own if count is None else load_trace(text, count, options.hours, options.seed)

    with console.status(f"replaying {own.name}"):
        rows = list(run_sweep(job.sweeps, trace, job.scenario, job.policies, named))
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


def _summary(job: _Replayed, *, announced: bool) -> dict[str, Any]:
    return {
        "profile": job.problem.profile.source,
        "global_batch": job.batch,
        "num_microbatches": job.problem.num_microbatches,
        "devices_per_node": job.problem.cluster.devices_per_node,
        "max_failures": job.problem.max_failures,
        "announced": announced,
        "node_hour_dollars": job.node_hour_dollars,
        "costs": asdict(job.costs),
    }
