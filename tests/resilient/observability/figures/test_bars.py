"""Bars of steps of units: which lane they are of is to be seen."""

from __future__ import annotations

from resilient.observability.figures.bars import Bar, recorded_chart, simulated_chart
from resilient.observability.trace_events import ACTION, PART, STEP, Slice, Trace, simulated_trace
from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate
from resilient.templates.schedules.unit_generator import generate_units

MS = 1_000_000
VISION, LLM = LaneName("vision"), LaneName("llm")


def timeline() -> Timeline:
    """An encoder on the rows of the language model; its first cell is used in two."""
    kinds = (Backward.ALL, Backward.ALL)
    graph = StepGraph(
        lanes=(
            UnitLane(name=VISION, rows=(0, 1), cells=(0, 1), backwards=kinds),
            UnitLane(name=LLM, rows=(0, 1), cells=(0, 1), backwards=kinds),
        ),
        flows=(Flow(VISION, 0, LLM, 0), Flow(VISION, 0, LLM, 1), Flow(VISION, 1, LLM, 1)),
        num_rows=3,
    )
    schedule = generate_units(graph, states=[[0], [1], [2], [3]])
    costs = ActionCosts(
        forward_ms=1, backward_input_ms=2, transfer_ms=0.5, flow_transfer_ms=0.25, reduce_ms=dict.fromkeys(range(4), 1)
    )
    return simulate(schedule, costs)


def test_simulated_step_of_units_names_lanes_and_parts() -> None:
    chart = simulated_chart("step", timeline())
    assert chart.rows == (
        "worker 0\nvision.0:0, llm.0:0",
        "worker 1\nvision.0:1, llm.0:1",
        "worker 2\nno stage",
    )
    assert chart.odd_chunks == "vision"
    first = sorted((bar for bar in chart.bars if bar.row == 0), key=lambda bar: bar.start_ns)
    encoder = [f"{bar.kind}{bar.label}" for bar in first if bar.chunk]
    assert encoder == ["F0", "F1", "B0", "B0.1", "B1"]
    assert [f"{bar.kind}{bar.label}" for bar in first if not bar.chunk] == ["F0", "F1", "B0", "B1"]


def test_simulated_trace_of_units_has_a_thread_for_each_row_and_link() -> None:
    trace = simulated_trace({"units": timeline()})
    assert list(trace.threads.values()) == [
        "worker 0: vision.0:0, llm.0:0", "worker 0: gradient sums", "worker 0 sends to 1",
        "worker 1: vision.0:1, llm.0:1", "worker 1: gradient sums", "worker 1 sends to 0",
        "worker 2: no stage",
    ]  # fmt: skip
    sent = [each.name for each in trace.of(0, 5, ACTION)]
    assert "vision.0:1SEND_F0.1>llm.0:1" in sent
    part = next(each for each in trace.of(0, 0, ACTION) if each.name == "vision.0:0B0.1")
    assert part.args == {"lane": 0, "stage": 0, "cell": 0, "part": 1}


def test_recorded_step_of_units_is_drawn_like_the_simulated_one() -> None:
    simulated = timeline()
    slices = [
        Slice(
            process=span.row, thread=0, name=str(span.action), category=ACTION, start_ns=span.start_ns,
            end_ns=span.end_ns, args={},
        )
        for span in simulated.spans
        if span.action.op.computes
    ]  # fmt: skip
    waits = {"name": "llm.0:0RECV_F0<vision.0:0", "category": ACTION, "start_ns": 0, "end_ns": 0, "args": {}}
    slices.insert(0, Slice(process=0, thread=0, **waits))  # before anything is computed
    end_ns, known = simulated.iteration_ns, {"generation": 1, "step": 1, "pipeline": 0}
    for row in range(2):
        more = {"process": row, "thread": 0, "args": {**known, "row": row}}
        slices.append(Slice(name="step 1", category=STEP, start_ns=0, end_ns=end_ns + MS, **more))
        slices.append(Slice(name="commit", category=PART, start_ns=end_ns, end_ns=end_ns + MS, **more))
    trace = Trace(processes={0: "a", 1: "b"}, threads={(0, 0): "a", (1, 0): "b"}, slices=tuple(slices))
    chart = recorded_chart(trace)
    assert chart is not None
    assert chart.rows[0] == "node 0\npipeline 0, vision.0:0, llm.0:0"
    assert chart.odd_chunks == "vision"

    def computing(bars: tuple[Bar, ...]) -> list[tuple[int, str, str, int, int]]:
        return sorted((bar.row, bar.kind, bar.label, bar.chunk, bar.start_ns) for bar in bars if bar.kind in "FB")

    assert computing(chart.bars) == computing(simulated_chart("step", simulated).bars)
