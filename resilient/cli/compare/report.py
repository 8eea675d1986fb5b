"""Computes what ``resilient compare`` shows: every planner on the same batches, judged by the same simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from resilient.observability.figures.bars import Bar, Chart
from resilient.observability.wording import duration
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Configuration, Planner, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.device_layout import used_devices
from resilient.templates.schedules.graph import LaneName


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannerRow:
    """The steps of one planner: means over the batches unless said otherwise.

    Args:
        name: Of the planner.
        source: Where it is published.
        configuration: What it decided.
        num_devices: That it uses.
        iteration_ms: Of a step.
        sum_ms: Part of it after the last backward.
        bubble: Part of all devices' time in which they compute nothing; those that it does not use never do.
        std_ms: By unit, of microbatch times within a step.
        peak_bytes: The most of any device in any step.
        fits: Whether there is so much memory.
        configure_ms: Planning time, once. What compiles at the first call is not counted, here and in the next.
        assign_ms: Planning time of each step, median.
        first: The first batch's step.
    """

    name: str
    source: str
    configuration: Configuration
    num_devices: int
    iteration_ms: float
    sum_ms: float
    bubble: float
    std_ms: Mapping[str, float]
    peak_bytes: int
    fits: bool
    configure_ms: float
    assign_ms: float
    first: Result

    def to_dict(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        spread = {
            name: {
                **{field: getattr(each, field) for field in ("dp", "pp", "chunks", "tp", "cp", "recompute")},
                "stage_layers": each.stage_layers,
            }
            for name, each in self.configuration.units.items()
        }
        numbers = ("num_devices", "iteration_ms", "sum_ms", "bubble", "peak_bytes", "fits", "configure_ms", "assign_ms")
        return {
            "planner": self.name,
            "source": self.source,
            "units": spread,
            "num_microbatches": self.configuration.num_microbatches,
            "colocated": self.configuration.colocated,
            "encoders": self.configuration.encoders.value,
            "shard": self.configuration.shard,
            "lead": self.configuration.lead,
            "assigned_by": self.configuration.assigned_by or self.name,
            "predicted_ms": self.configuration.predicted_ms,
            "notes": list(self.configuration.notes),
            "std_ms": dict(self.std_ms),
            **{name: getattr(self, name) for name in numbers},
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The planners that were compared, and why others were not.

    Args:
        rows: Those that found a configuration, in the order asked for.
        refused: By name, why others did not.
        bound_ms: Below which no step can be, mean over the batches.
        baseline: What speed-ups are relative to, if it was asked for and fits.
        memory_bytes: Of a device, that a plan may fill; None where that is unlimited.
    """

    rows: tuple[PlannerRow, ...]
    refused: Mapping[str, str]
    bound_ms: float
    baseline: str
    memory_bytes: int | None = None

    @property
    def base(self) -> PlannerRow | None:
        """What speed-ups are relative to: the baseline, or the first other one that fits where it does not.

        None where it was not asked for, or nothing fits.
        """
        if self.baseline not in (*self.refused, *(row.name for row in self.rows)):
            return None
        baseline_first = sorted(self.rows, key=lambda row: row.name != self.baseline)
        return next((row for row in baseline_first if row.fits), None)

    def speed_up(self, row: PlannerRow) -> float | None:
        """Return how much faster than the base a planner is, if there is one."""
        return self.base and self.base.iteration_ms / row.iteration_ms

    def of_bound(self, row: PlannerRow) -> float:
        """Return how many times the bound a planner's steps take."""
        return row.iteration_ms / self.bound_ms

    @property
    def best(self) -> PlannerRow | None:
        """The fastest that fits."""
        return min((row for row in self.rows if row.fits), key=lambda row: row.iteration_ms, default=None)

    @property
    def shown(self) -> list[PlannerRow]:
        """The base and the fastest three that fit: what is worth drawing in detail."""
        fastest = sorted((row for row in self.rows if row.fits), key=lambda row: row.iteration_ms)[:3]
        return [row for row in self.rows if row is self.base or row in fastest]

    def reason(self) -> str:
        """Say why the best is the best: beside the base, and beside the next."""
        best, base = self.best, self.base
        if not self.rows:
            return "no planner found a plan; use more nodes or a smaller microbatch"
        if best is None:
            return "no planner's steps fit into memory; use more nodes or a smaller microbatch"
        others = sorted((row for row in self.rows if row.fits and row is not best), key=lambda row: row.iteration_ms)
        parts: list[str] = []
        if base is not None and base is not best:
            gain = f"{base.iteration_ms / best.iteration_ms:.2f}x as fast in simulation as {base.name}"
            parts.append(gain + _mostly(best, base))
        if not others:
            parts.append("no other fits" if len(self.rows) > 1 else "no other was asked for")
        elif others[0] is not base:
            longer = others[0].iteration_ms / best.iteration_ms
            parts.append(f"{longer:.2f}x as fast as the next, {others[0].name}" + _mostly(best, others[0]))
        return f"{best.name}: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        rows = [{**row.to_dict(), "speed_up": self.speed_up(row), "of_bound": self.of_bound(row)} for row in self.rows]
        best, base = self.best, self.base
        return {
            "planners": rows,
            "refused": dict(self.refused),
            "memory_bytes": self.memory_bytes,
            "bound_ms": self.bound_ms,
            "baseline": base and base.name,
            "best": best and best.name,
            "reason": self.reason(),
        }


def compare_planners(
    planners: Sequence[Planner],
    setting: Setting,
    samples: SampleTable,
    batches: Sequence[SampleTable],
    *,
    lost_nodes: int,
    baseline: str,
    reason: Callable[[ValueError], str],
    clock: Callable[[], float],
    done: Callable[[], object],
) -> Comparison:
    """Let each planner configure the job once and assign each batch, and simulate every step.

    Args:
        planners: They.
        setting: The job.
        samples: What they know of the data set beforehand.
        batches: The global batches that they are judged by, others than those.
        lost_nodes: Nodes lost after configuring, before the first batch.
        baseline: The planner that speed-ups are relative to.
        reason: Words why a planner found no plan.
        clock: Seconds, for planning times.
        done: Called after each planner.
    """
    rows: list[PlannerRow] = []
    refused: dict[str, str] = {}
    for each in planners:
        try:
            rows.append(_row(each, setting, samples, batches, lost_nodes, clock))
        except ValueError as error:
            refused[each.name] = reason(error)
        done()
    return Comparison(
        rows=tuple(rows),
        refused=refused,
        bound_ms=float(np.mean([bound_ms(setting, batch, lost_nodes) for batch in batches])),
        baseline=baseline,
        memory_bytes=setting.cluster.memory_bytes,
    )


def _row(
    planner: Planner,
    setting: Setting,
    samples: SampleTable,
    batches: Sequence[SampleTable],
    lost_nodes: int,
    clock: Callable[[], float],
) -> PlannerRow:
    planner.configure(setting, samples)  # compiles
    started = clock()
    configuration = planner.configure(setting, samples)
    configure_ms = 1e3 * (clock() - started)
    replicas = degraded_replicas(setting, configuration, lost_nodes)
    planner.assign(setting, configuration, batches[0], replicas)  # compiles
    times: list[float] = []
    results: list[Result] = []
    for batch in batches:
        started = clock()
        assignment = planner.assign(setting, configuration, batch, replicas)
        times.append(1e3 * (clock() - started))
        results.append(evaluate(setting, configuration, assignment, batch, replicas))
    used = used_devices(configuration)
    total_ms = sum(result.iteration_ms for result in results)
    computing_ms = sum((1 - result.bubble) * result.iteration_ms for result in results) * used / setting.num_devices
    peak = max(result.peak_bytes for result in results)
    limit = setting.cluster.memory_bytes
    return PlannerRow(
        name=planner.name,
        source=planner.source,
        configuration=configuration,
        num_devices=used,
        iteration_ms=float(np.mean([result.iteration_ms for result in results])),
        sum_ms=float(np.mean([result.sum_ms for result in results])),
        bubble=1 - computing_ms / total_ms if total_ms else 0.0,
        std_ms={name: float(np.mean([result.std_ms[name] for result in results])) for name in configuration.units},
        peak_bytes=peak,
        fits=limit is None or peak <= limit,
        configure_ms=configure_ms,
        assign_ms=float(np.median(times)),
        first=results[0],
    )


def _mostly(row: PlannerRow, other: PlannerRow) -> str:
    """Say what most of the time goes to that one step takes less than another."""
    shares = [
        ("computes", _computing_ms(other) - _computing_ms(row)),
        ("waits", _waiting_ms(other) - _waiting_ms(row)),
        ("sums gradients", other.sum_ms - row.sum_ms),
    ]
    what, saved = max(shares, key=lambda share: share[1])
    return f", mostly as it {what} {saved:.0f} ms less" if saved >= 0.5 else ""


def _computing_ms(row: PlannerRow) -> float:
    return (1 - row.bubble) * row.iteration_ms


def _waiting_ms(row: PlannerRow) -> float:
    return row.bubble * row.iteration_ms - row.sum_ms


def step_chart(row: PlannerRow) -> Chart:
    """Return the first batch's step of the pipeline that ends last, for drawing."""
    result, timeline = row.first, row.first.timeline
    graph, ends = timeline.schedule.graph, np.asarray(timeline.schedule.ends)
    last = int(np.searchsorted(ends, timeline.end_ns.argmax(), side="right")) if len(timeline.end_ns) else 0
    rows = np.flatnonzero(result.pipelines == result.pipelines[last]).tolist()
    names = _row_names([graph.stages_of(each) for each in rows])
    bars = [
        Bar(
            row=rows.index(span.row),
            kind=span.action.op.text,
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            label=str(span.action.index),
            chunk=int(len(graph.stages_of(span.row)) > 1 and span.action.lane.unit != LLM),
        )
        for span in timeline.spans
        if span.row in rows and span.action.op.computes and span.length_ns
    ]
    end_ns = round(1e6 * result.iteration_ms)
    if result.sum_ms:
        start_ns = round(1e6 * (result.iteration_ms - result.sum_ms))
        bars += [Bar(row=number, kind="sum", start_ns=start_ns, end_ns=end_ns) for number in range(len(names))]
    return Chart(
        title=f"{row.name}: {duration(result.iteration_ms)}, {100 * result.bubble:.0f} % bubble",
        rows=names,
        length_ns=end_ns,
        bars=tuple(bars),
        odd_chunks="encoders",
    )


def _row_names(rows: Sequence[Sequence[tuple[LaneName, int]]]) -> tuple[str, ...]:
    """Return names of rows with these stages: the unit's, its lane's number if there are several, and the stage's."""
    lanes: dict[str, list[int]] = {}
    for lane, _ in (stage for stages in rows for stage in stages):
        if lane.number not in lanes.setdefault(lane.unit, []):
            lanes[lane.unit].append(lane.number)
    names: list[str] = []
    for stages in rows:
        lane, stage = stages[0]
        several = f".{lanes[lane.unit].index(lane.number)}" if len(lanes[lane.unit]) > 1 else ""
        names.append(f"stage {stage}" if len(stages) > 1 else f"{lane.unit}{several} {stage}")
    return tuple(names)
