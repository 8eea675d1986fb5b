"""Steps as they were planned, beside what workers wrote down of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from resilient.observability.figures.bars import planned_chart
from resilient.observability.planned_steps import (
    PLANNED_THREAD,
    differences,
    differences_text,
    planned_steps,
    with_plans,
)
from resilient.observability.step_trace import PlannedRow, RecordedSpan, TracedStep, traced_steps
from resilient.observability.trace_events import ACTION, PART, PLANNED, Trace
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.stage_times import StageTimes, action_ms

MS = 1_000_000
COSTS = (
    StageTimes(forward_ms=2.0, backward_input_ms=1.0, backward_weight_ms=3.0, send_ms=0.0),
    StageTimes(forward_ms=2.0, backward_input_ms=3.0, backward_weight_ms=1.0, send_ms=0.0),
)
ONE_F_ONE_B = generate(ScheduleKind.ONE_F_ONE_B, 2, 2)
"""Of two microbatches: 2 ms of forwards and 4 of backwards each, on either stage; 18 ms in all."""


def of_chain(action: Action) -> float:
    return action_ms(COSTS, action)


def run_of(
    schedule: Schedule, planned_ms: Callable[[Action], float] = of_chain, *, step: int = 5, run_ms: float = 3.0
) -> list[TracedStep]:
    """Every action takes as long, one after the other."""
    found: list[TracedStep] = []
    for row, actions in enumerate(schedule.rows):
        ends = [round(MS * run_ms * (1 + number)) for number in range(len(actions))]
        spans = [
            RecordedSpan(ACTION, str(action), end - round(MS * run_ms), end, 1)
            for action, end in zip(actions, ends, strict=True)
        ]
        spans.append(RecordedSpan(PART, "commit", ends[-1], ends[-1] + MS, 1))
        found.append(
            TracedStep(
                step=step, generation=1, node=4 - row, local_rank=row, pipeline=0, row=row,
                start_ns=0, end_ns=spans[-1].end_ns, busy_us=1, spans=tuple(spans),
                planned=PlannedRow(
                    graph=schedule.graph, pipelines=(0,), row=row, action_ms=tuple(map(planned_ms, actions))
                ),
            )
        )  # fmt: skip
    return found


def test_step_is_simulated_by_its_own_actions_with_the_times_of_the_plan() -> None:
    (step,) = planned_steps(run_of(ONE_F_ONE_B))
    assert step.timeline.schedule.rows == ONE_F_ONE_B.rows
    assert step.timeline.iteration_ms == 18.0
    assert step.run_ms == 3.0 * max(map(len, ONE_F_ONE_B.rows))
    (other,) = planned_steps(run_of(generate(ScheduleKind.ZB_H1, 2, 2)))
    assert other.timeline.iteration_ms == 16.0, "halves of backwards are planned apart: weights wait, inputs do not"


def test_latency_of_a_message_does_not_keep_the_next_one_waiting() -> None:
    costs = (COSTS[0], replace(COSTS[1], send_ms=20.0))
    rows = run_of(ONE_F_ONE_B, lambda action: action_ms(costs, action))
    late = [
        msgspec.structs.replace(
            row,
            planned=msgspec.structs.replace(
                row.planned, latency_ms=tuple(19.0 * (each.op is Op.SEND_F) for each in ONE_F_ONE_B.row(number))
            ),
        )
        for number, row in enumerate(rows)
    ]
    found = [planned_steps(each)[0].timeline.iteration_ms for each in (rows, late)]
    expected = [
        simulate(
            ONE_F_ONE_B,
            ActionCosts(
                forward_ms=2.0, backward_input_ms=4.0, backward_weight_ms=0.0, latency_ms=latency, transfer_ms=transfer
            ),
        ).iteration_ms
        for latency, transfer in ((0.0, 20.0), (19.0, 1.0))
    ]
    assert found == expected
    assert expected[1] < expected[0]


def test_steps_of_which_a_row_is_missing_or_gave_up_have_no_plan() -> None:
    rows = run_of(ONE_F_ONE_B)
    given_up = msgspec.structs.replace(rows[1], spans=rows[1].spans[:-1])
    assert planned_steps([rows[0]]) == planned_steps([rows[0], given_up]) == []
    assert differences([]) is None


def test_differences_are_told_the_largest_first() -> None:
    steps = planned_steps([*run_of(ONE_F_ONE_B), *run_of(ONE_F_ONE_B, step=6, run_ms=2.0)])
    found = differences(steps)
    assert found is not None
    assert (found["steps"], found["planned_ms"], found["computed_ms"], found["run_ms"]) == (2, 18.0, 15.0, 20.0)
    assert found["largest"] == [
        {"node": 3, "local_rank": 1, "action": "1B", "planned_ms": 4.0, "run_ms": 2.5},
        {"node": 4, "local_rank": 0, "action": "0B", "planned_ms": 4.0, "run_ms": 2.5},
        {"node": 3, "local_rank": 1, "action": "1F", "planned_ms": 2.0, "run_ms": 2.5},
        {"node": 4, "local_rank": 0, "action": "0F", "planned_ms": 2.0, "run_ms": 2.5},
    ]
    assert differences_text({**found, "largest": found["largest"][:1]}) == (
        "from the first action to the last: planned 18 ms, run 20 ms (1.11x), without messages, sums and reading 15 "
        "ms; a worker reads for up to 0 ms; most differ:\n"
        "  node 3, worker 1: 1B planned 4 ms, run 2.5 ms"
    )


def test_reading_is_told_apart_and_belongs_to_the_step() -> None:
    first, last = run_of(ONE_F_ONE_B, run_ms=2.0)
    reads = (RecordedSpan(PART, "load 0", -5 * MS, -MS, 1), RecordedSpan(PART, "load 1", 2 * MS, 3 * MS, 1))
    (without,) = planned_steps([first, last])
    (step,) = planned_steps([msgspec.structs.replace(first, spans=(*reads, *first.spans)), last])
    assert step.run_ms == without.run_ms + 5
    assert step.computed_ms == without.computed_ms
    assert (without.reading_ms, step.reading_ms) == (0, 5)


def test_plans_lie_on_threads_beside_the_workers() -> None:
    rows = run_of(ONE_F_ONE_B)
    trace = Trace(
        processes={3: "node 3", 4: "node 4"},
        threads={(3, 1): "worker 1", (4, 0): "worker 0", (3, 7): "another"},
        slices=tuple(each for row in rows for each in row.slices()),
    )
    planned = with_plans(trace, planned_steps(rows))
    assert planned.threads == {
        (3, 1): "worker 1",
        (3, 1 + PLANNED_THREAD): "worker 1 (planned)",
        (4, 0): "worker 0",
        (4, 0 + PLANNED_THREAD): "worker 0 (planned)",
        (3, 7): "another",
    }
    first = planned.of(4, PLANNED_THREAD, PLANNED)
    assert [(s.name, s.start_ns, s.end_ns) for s in first] == [
        ("0F0", 0, 2 * MS), ("0F1", 2 * MS, 4 * MS), ("0B0", 8 * MS, 12 * MS), ("0B1", 14 * MS, 18 * MS)
    ]  # fmt: skip
    chart = planned_chart(planned)
    assert chart is not None
    assert (chart.title, chart.length_ns, [row.partition("\n")[0] for row in chart.rows]) == (
        "step 5 as it was planned: computing takes 18 ms", 18 * MS, ["node 4", "node 3"]
    )  # fmt: skip
    assert planned_chart(replace(planned, slices=trace.slices)) is None


VISION, LLM = LaneName("vision"), LaneName("llm")
UNITS = generate_units(
    StepGraph(
        lanes=(
            UnitLane(name=VISION, rows=(0,), cells=(0,), backwards=(Backward.ALL,)),
            UnitLane(name=LLM, rows=(0, 1), cells=(0, 1), backwards=(Backward.ALL,) * 2),
        ),
        flows=(Flow(VISION, 0, LLM, 0), Flow(VISION, 0, LLM, 1)),
        num_rows=2,
    ),
    pace="llm",
)
"""One cell of an encoder, for both of the language model's, the first stage of which shares its worker."""


def of_units(action: Action) -> float:
    """Cell 1 takes ten times as long as cell 0, and so does the second part of a backward; messages 1 ms."""
    base = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.SEND_F: 1.0}.get(action.op, 0.0)
    return base * (10.0 if action.index or action.part else 1.0) if action.op.computes else base


def test_step_of_units_is_simulated_by_the_graph_that_was_written_down(tmp_path: Path) -> None:
    for row in run_of(UNITS, of_units):
        row.write(tmp_path)
    (step,) = planned_steps(traced_steps(tmp_path))
    assert step.timeline.schedule == UNITS
    planned = {(s.process, s.name): (s.start_ns // MS, s.end_ns // MS) for s in step.slices()}
    assert planned == {
        (4, "vision.0:0F0"): (0, 1),
        (4, "llm.0:0F0"): (1, 2),
        (4, "llm.0:0F1"): (2, 12),
        (3, "llm.0:1F0"): (3, 4),
        (3, "llm.0:1B0"): (4, 6),
        (4, "llm.0:0B0"): (12, 14),
        (4, "vision.0:0B0"): (14, 16),
        (3, "llm.0:1F1"): (13, 23),
        (3, "llm.0:1B1"): (23, 43),
        (4, "llm.0:0B1"): (44, 64),
        (4, "vision.0:0B0.1"): (64, 84),
    }
    found = differences([step])
    assert found is not None
    assert [(each["node"], each["action"]) for each in found["largest"]] == [
        (3, "llm.0:1B"), (4, "llm.0:0B"), (4, "vision.0:0B"), (3, "llm.0:1F"), (4, "llm.0:0F")
    ]  # fmt: skip
