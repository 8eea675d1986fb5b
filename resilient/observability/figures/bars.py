"""Lays a step out as bars over time, one row for each worker, for the text timeline and the Gantt picture.

Owns the way there from simulated timelines and from traces of real runs. Must not import torch or matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from resilient.observability.trace_events import ACTION, PART, PLANNED, STEP, Slice, Trace
from resilient.observability.wording import duration, stages_text
from resilient.templates.common.interval import Interval
from resilient.templates.schedules.graph import CHAIN, LaneName
from resilient.templates.schedules.schedule import Action, Op
from resilient.templates.schedules.simulator import Timeline

COMPUTING: Mapping[str, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
)
"""What the kinds of bars of computations mean."""

OTHER: Mapping[str, str] = MappingProxyType(
    {"load": "loading", "sum": "waiting for gradient sums", "prepare": "prepare barrier", "commit": "optimizer"}
)
"""And those of the other parts of a real step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar(Interval):
    """An action of a worker, timed from the step's start.

    Args:
        row: The worker.
        kind: A key of :data:`COMPUTING` or :data:`OTHER`.
        label: The microbatch or cell, and the part of its backward, if it is of one.
        chunk: Which of the worker's stages it is of.
    """

    row: int
    kind: str
    label: str = ""
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A step of all workers as rows of bars.

    Args:
        title: What step it is.
        rows: Names of the workers.
        length_ns: Of the step.
        bars: What they do; one that lies on another comes after it.
        odd_chunks: What bars of odd chunks are of.
    """

    title: str
    rows: tuple[str, ...]
    length_ns: int
    bars: tuple[Bar, ...]
    odd_chunks: str = "every other stage"

    @property
    def busy(self) -> tuple[float, ...]:
        """Per row, the part of the step in which it computes."""
        totals = [0] * len(self.rows)
        for bar in self.bars:
            totals[bar.row] += bar.length_ns * (bar.kind in COMPUTING)
        return tuple(total / self.length_ns if self.length_ns else 0.0 for total in totals)


def simulated_chart(title: str, timeline: Timeline) -> Chart:
    """Return the chart of a simulated schedule."""
    graph = timeline.schedule.graph
    units = list(dict.fromkeys(lane.name.unit for lane in graph.lanes))
    stages = [graph.stages_of(row) for row in range(graph.num_rows)]
    return Chart(
        title=title,
        rows=tuple(
            f"worker {row}" if units == [CHAIN.unit] else f"worker {row}\n{stages_text(stages[row])}"
            for row in range(graph.num_rows)
        ),
        length_ns=timeline.iteration_ns,
        bars=tuple(
            Bar(
                row=span.row,
                kind=span.action.op.text,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                label=_label(span.action),
                chunk=_chunk(span.action, stages[span.row], units),
            )
            for span in timeline.spans
            if span.action.op.computes and span.length_ns
        ),
        odd_chunks=_odd_chunks(units),
    )


def _label(action: Action) -> str:
    return f"{action.index}.{action.part}" if action.part else str(action.index)


def _chunk(action: Action, stages: Sequence[tuple[LaneName, int]], units: Sequence[str]) -> int:
    """Return which of a row's stages an action is of; of units, whether it is another one than the last."""
    return int(action.lane.unit != units[-1]) if len(units) > 1 else stages.index((action.lane, action.stage))


def _odd_chunks(units: Sequence[str]) -> str:
    return ", ".join(units[:-1]) or "every other stage"


def recorded_chart(trace: Trace) -> Chart | None:
    """Return the chart of the first step of a run's trace that all its workers finished; None where there is none."""
    steps = _first_finished(trace)
    if not steps:
        return None
    start_ns, end_ns = min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    title = f"step {steps[0].args['step']} as it was run: {duration((end_ns - start_ns) / 1e6)}"
    return _chart_of(title, steps, [_within(trace, step) for step in steps], start_ns, end_ns)


def planned_chart(trace: Trace) -> Chart | None:
    """Return the chart of what was planned for that step; None where that is not known."""
    steps = _first_finished(trace)
    done = [
        [
            each
            for each in trace.slices
            if each.category == PLANNED
            and each.process == step.process
            and all(each.args[key] == step.args[key] for key in ("step", "generation", "pipeline", "row"))
        ]
        for step in steps
    ]
    if not any(done):
        return None
    start_ns = min(each.start_ns for own in done for each in own)
    end_ns = max(each.end_ns for own in done for each in own)
    title = f"step {steps[0].args['step']} as it was planned: computing takes {duration((end_ns - start_ns) / 1e6)}"
    return _chart_of(title, steps, done, start_ns, end_ns)


def _first_finished(trace: Trace) -> list[Slice]:
    """Return the slice of each worker of the first step that all of them finished, pipeline by pipeline."""
    whole = [each for each in trace.slices if each.category == STEP]
    committed = {
        (each.args["generation"], each.args["step"], each.process, each.thread)
        for each in trace.slices
        if (each.category, each.name) == (PART, "commit")
    }
    for generation, number in sorted({(each.args["generation"], each.args["step"]) for each in whole}):
        steps = [each for each in whole if (each.args["generation"], each.args["step"]) == (generation, number)]
        if all((generation, number, each.process, each.thread) in committed for each in steps):
            return sorted(steps, key=lambda step: (step.args["pipeline"], step.args["row"]))
    return []


def _chart_of(title: str, steps: list[Slice], done: list[list[Slice]], start_ns: int, end_ns: int) -> Chart:
    """Return the chart of what workers did in a step, or were to do: a row each."""
    computed = (ACTION, PLANNED)
    actions = [(each.start_ns, Action.parse(each.name)) for own in done for each in own if each.category in computed]
    # a unit computes before those that it feeds, which may wait from the start
    actions.sort(key=lambda action: (not action[1].op.computes, action[0]))
    units = list(dict.fromkeys(action.lane.unit for _, action in actions))
    bars: list[Bar] = []
    rows: list[str] = []
    for row, (step, own) in enumerate(zip(steps, done, strict=True)):
        run = sorted(
            (Action.parse(each.name) for each in own if each.category in computed), key=lambda a: a.order(units)
        )
        stages = list(dict.fromkeys((action.lane, action.stage) for action in run))
        rows.append(f"node {step.process}\npipeline {step.args['pipeline']}, {stages_text(stages)}")
        for each in own:
            kind, label, chunk = _kind_of(each, stages, units)
            if kind:
                times = {"start_ns": each.start_ns - start_ns, "end_ns": each.end_ns - start_ns}
                bars.append(Bar(row=row, kind=kind, label=label, chunk=chunk, **times))
    return Chart(
        title=title, rows=tuple(rows), length_ns=end_ns - start_ns, bars=tuple(bars), odd_chunks=_odd_chunks(units)
    )


def _within(trace: Trace, step: Slice) -> list[Slice]:
    """Return what was done in a worker's step."""
    slices = [each for category in (ACTION, PART) for each in trace.of(step.process, step.thread, category)]
    return [each for each in slices if each.start_ns >= step.start_ns and each.end_ns <= step.end_ns]


def _kind_of(each: Slice, stages: Sequence[tuple[LaneName, int]], units: Sequence[str]) -> tuple[str, str, int]:
    """Return the kind of bar, its label, and which of the worker's stages it is of; no kind for waiting or nothing."""
    if each.category == PART:
        name = each.name.partition(" ")[0]
        return (name if name in OTHER else ""), "", 0
    action = Action.parse(each.name)
    if action.op.computes:
        return action.op.text, _label(action), _chunk(action, stages, units)
    return ("sum" if action.op is Op.REDUCE else ""), "", 0
