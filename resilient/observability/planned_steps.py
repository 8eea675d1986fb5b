"""Sets steps as they were planned beside what their workers did: one simulated from the other's actions.

What was executed is the schedule, so a step is simulated by the actions that its workers wrote down, with the time
that each of them expected of its own; it begins with the first action of its pipeline, or with reading for it. Nobody
plans for reading. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import msgspec
import numpy as np

from resilient.observability.step_trace import PlannedRow, TracedStep
from resilient.observability.trace_events import ACTION, PART, PLANNED, Slice, Thread, Trace
from resilient.observability.wording import duration
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate

PLANNED_THREAD = 1000
"""A worker's thread of what was planned for it has the number of its own and this."""

_MOST_DIFFERENCES = 5
_READING = "load"
"""How the names of parts of a step begin in which a worker read what its cells need."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedStep:
    """One step of one pipeline, or of several that exchange features, that all workers finished, and its simulation.

    Of sharded stages that is one device of each.

    Args:
        rows: What each worker wrote down.
        timeline: What was expected.
    """

    rows: tuple[TracedStep, ...]
    timeline: Timeline

    @property
    def start_ns(self) -> int:
        """When the first action began, or reading for it, Unix time."""
        began = [times[0] for row in self.rows for times in _times(row).values()]
        return min(*began, *(start_ns for row in self.rows for start_ns, _ in _readings(row)))

    @property
    def run_ms(self) -> float:
        """From the start of the first action, or of reading for it, to the last one's end."""
        return (max(times[1] for row in self.rows for times in _times(row).values()) - self.start_ns) / 1e6

    @property
    def reading_ms(self) -> float:
        """What the worker read for that read longest, some of it perhaps while a message was on its way."""
        return max(sum(end_ns - start_ns for start_ns, end_ns in _readings(row)) for row in self.rows) / 1e6

    @cached_property
    def computed_ms(self) -> float:
        """What it would have taken as planned, but with what was computed taking as long as it did.

        What is above it, messages, sums and reading have cost; what is below, costs that were measured before have
        hidden.
        """
        schedule = self.timeline.schedule
        taken = [
            msgspec.structs.replace(
                row.planned,
                action_ms=tuple(
                    (end_ns - start_ns) / 1e6 if action.op.computes else planned_ms
                    for action, (start_ns, end_ns), planned_ms in zip(
                        schedule.row(number), _times(row).values(), row.planned.action_ms, strict=True
                    )
                ),
            )
            for number, row in enumerate(self.rows)
        ]
        return simulate(schedule, _costs(schedule, taken)).iteration_ms

    def slices(self) -> Iterator[Slice]:
        """Yield what was planned, on a thread beside each worker's own."""
        start_ns = self.start_ns
        for span in self.timeline.spans:
            row = self.rows[span.row]
            if span.action.op.computes and span.length_ns:
                yield Slice(
                    process=row.node,
                    thread=PLANNED_THREAD + row.local_rank,
                    name=str(span.action),
                    category=PLANNED,
                    start_ns=start_ns + span.start_ns,
                    end_ns=start_ns + span.end_ns,
                    args={"step": row.step, "generation": row.generation, "pipeline": row.pipeline, "row": row.row},
                )


def planned_steps(traced: Sequence[TracedStep]) -> list[ComparedStep]:
    """Return the steps that whole pipelines finished, each with its simulation, in order.

    Args:
        traced: What workers wrote down.
    """
    groups: dict[tuple[int, int, tuple[int, ...], int], list[TracedStep]] = {}
    for each in traced:
        group = each.generation, each.step, each.planned.pipelines, each.planned.device
        groups.setdefault(group, []).append(each)
    found: list[ComparedStep] = []
    for _, rows in sorted(groups.items()):
        rows.sort(key=lambda row: row.planned.row)
        graph = rows[0].planned.graph
        if [row.planned.row for row in rows] == list(range(graph.num_rows)) and all(map(_is_finished, rows)):
            schedule = Schedule.of([[Action.parse(name) for name in _times(row)] for row in rows], graph)
            costs = _costs(schedule, [row.planned for row in rows])
            found.append(ComparedStep(rows=tuple(rows), timeline=simulate(schedule, costs)))
    return found


def _costs(schedule: Schedule, planned: Sequence[PlannedRow]) -> ActionCosts:
    """Return what was expected as the simulator takes it.

    Args:
        schedule: What was run.
        planned: Of each of its rows.
    """
    graph, codes = schedule.graph, schedule.codes
    times = np.array([each for row in planned for each in row.action_ms])
    latencies = np.array([each for row in planned for each in row.latency_ms or (0.0,) * len(row.action_ms)])
    op, stage, cell, part, flow = codes.T
    num_parts = max(1, int(graph.tables.parts.max(initial=1)))
    forward, sent, late = np.zeros((3, graph.num_stages, graph.num_cells))
    inputs, weights = np.zeros((2, graph.num_stages, graph.num_cells, num_parts))
    handed, handed_late = np.zeros((2, len(graph.flows)))
    message = (op == Op.SEND_F) & (flow < 0)
    for table, values, chosen in (
        (forward, times, op == Op.FORWARD),
        (sent, times - latencies, message),
        (late, latencies, message),
    ):
        table[stage[chosen], cell[chosen]] = values[chosen]
    for table, chosen in (
        (inputs, (op == Op.BACKWARD) | (op == Op.BACKWARD_INPUT)),
        (weights, op == Op.BACKWARD_WEIGHT),
    ):
        table[stage[chosen], cell[chosen], part[chosen]] = times[chosen]
    message = (op == Op.SEND_F) & (flow >= 0)
    handed[flow[message]] = (times - latencies)[message]
    handed_late[flow[message]] = latencies[message]
    return ActionCosts(
        forward_ms=forward,
        backward_input_ms=inputs,
        backward_weight_ms=weights,
        latency_ms=late[:-1],
        transfer_ms=sent[:-1],
        flow_latency_ms=handed_late,
        flow_transfer_ms=handed,
    )


def with_plans(trace: Trace, steps: Sequence[ComparedStep]) -> Trace:
    """Return a trace with what was planned on threads beside the workers' own."""
    planned = [each for step in steps for each in step.slices()]
    workers = {(each.process, each.thread) for each in planned}
    threads: dict[Thread, str] = {}
    for (process, thread), name in trace.threads.items():
        threads[process, thread] = name
        if (process, PLANNED_THREAD + thread) in workers:
            threads[process, PLANNED_THREAD + thread] = f"{name} (planned)"
    return replace(trace, threads=threads, slices=(*trace.slices, *planned))


def differences(steps: Sequence[ComparedStep]) -> dict[str, Any] | None:
    """Return how steps differ from their plans, for ``report.json``; None without steps.

    Returns:
        ``steps``: how many, of one pipeline each or of those that exchange features; ``planned_ms``, ``computed_ms``
        and ``run_ms``: medians of them, from the first action to the last, ``computed_ms`` as planned but for what was
        computed, which takes as long as it did; ``reading_ms``: the median of what the worker took to read samples
        that took longest; ``largest``: by node, worker and kind of action (``1F``:
        stage and what is done) the median time that was planned and that it took, those first that differ most in a
        whole step.
    """
    if not steps:
        return None
    planned: dict[tuple[int, int, str], list[float]] = {}
    taken: dict[tuple[int, int, str], list[float]] = {}
    for step in steps:
        for span in step.timeline.spans:
            if span.action.op.computes:
                row = step.rows[span.row]
                start_ns, end_ns = _times(row)[str(span.action)]
                key = (row.node, row.local_rank, _kind(span.action))
                planned.setdefault(key, []).append(span.length_ns / 1e6)
                taken.setdefault(key, []).append((end_ns - start_ns) / 1e6)
    found = [
        {
            "node": node,
            "local_rank": local_rank,
            "action": kind,
            "planned_ms": round(median(planned[node, local_rank, kind]), 3),
            "run_ms": round(median(taken[node, local_rank, kind]), 3),
        }
        for node, local_rank, kind in sorted(planned, key=lambda key: (-abs(sum(taken[key]) - sum(planned[key])), key))
    ]
    return {
        "steps": len(steps),
        "planned_ms": round(median(step.timeline.iteration_ms for step in steps), 3),
        "computed_ms": round(median(step.computed_ms for step in steps), 3),
        "run_ms": round(median(step.run_ms for step in steps), 3),
        "reading_ms": round(median(step.reading_ms for step in steps), 3),
        "largest": found[:_MOST_DIFFERENCES],
    }


def differences_text(found: Mapping[str, Any]) -> str:
    """Return :func:`differences` as text for people."""
    ratio = found["run_ms"] / found["planned_ms"] if found["planned_ms"] else 1.0
    lines = [
        f"from the first action to the last: planned {duration(found['planned_ms'])}, run {duration(found['run_ms'])} "
        f"({ratio:.2f}x), without messages, sums and reading {duration(found['computed_ms'])}; "
        f"a worker reads for up to {duration(found['reading_ms'])}; most differ:"
    ]
    for each in found["largest"]:
        times = f"planned {duration(each['planned_ms'])}, run {duration(each['run_ms'])}"
        lines.append(f"  node {each['node']}, worker {each['local_rank']}: {each['action']} {times}")
    return "\n".join(lines)


def _times(row: TracedStep) -> dict[str, tuple[int, int]]:
    """Return when each of a worker's actions began and ended, in their order."""
    return {span.name: (span.start_ns, span.end_ns) for span in row.spans if span.category == ACTION}


def _readings(row: TracedStep) -> list[tuple[int, int]]:
    """Return when a worker began and ended to read what its cells need."""
    of_row = [span for span in row.spans if span.category == PART and span.name.partition(" ")[0] == _READING]
    return [(span.start_ns, span.end_ns) for span in of_row]


def _is_finished(row: TracedStep) -> bool:
    return any(span.name == "commit" for span in row.spans)


def _kind(action: Action) -> str:
    lane = f"{action.lane}:" if action.lane.unit else ""
    return f"{lane}{action.stage}{action.op.text}"
