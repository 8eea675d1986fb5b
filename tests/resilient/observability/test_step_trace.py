"""What workers write down of their steps becomes one trace."""

from __future__ import annotations

import logging
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.observability.figures.bars import Bar, recorded_chart
from resilient.observability.step_trace import (
    PlannedRow,
    RecordedSpan,
    SpanRecorder,
    TracedStep,
    parse_steps,
    recorded_trace,
    traced_steps,
)
from resilient.observability.trace_events import ACTION, PART, RECOVERY, STEP, Trace
from resilient.templates.schedules.graph import Backward, LaneName, StepGraph, UnitLane, chain_graph
from resilient.templates.schedules.schedule import Action
from tests.resilient.observability.made_up_runs import START, Run

MS = 1_000_000


@pytest.mark.parametrize(("text", "steps"), [("", range(0)), ("10", range(10, 11)), ("1-12", range(1, 13))])
def test_steps_are_read(text: str, steps: range) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["0", "3-2", "0-2", "last", "3:5", "-3", " 3", "3-"])
def test_other_steps_are_refused(text: str, tmp_path: Path) -> None:
    message = (
        'must be a step or the first and the last of some, as in "10" or "10-12", '
        f"got {text!r}; the first step of a job is 1"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(f'trace_steps {message}')}$"):
        parse_steps(text)
    (tmp_path / "train.py").touch()
    options = ("--run-dir", str(tmp_path), str(tmp_path / "train.py"))
    ended = CliRunner().invoke(app, ["run", f"--trace-steps={text}", *options])
    assert (ended.exit_code, ended.output.split()) == (2, f"error: --trace-steps {message}".split())


def test_taken_down_is_what_was_done_in_the_order_in_which_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient.observability.step_trace.time", SimpleNamespace(time_ns=count(1).__next__))
    taken = SpanRecorder()
    with taken.during("of the step before"):
        pass
    taken.clear()
    with taken.during(Action.parse("2F0")), taken.during("load 0"):
        pass
    with pytest.raises(RuntimeError), taken.during("prepare"):
        raise RuntimeError("aborted")
    assert taken.spans() == ((ACTION, "2F0", 3, 6, 0), (PART, "load 0", 4, 5, 0), (PART, "prepare", 7, 8, 0))


def test_processor_time_is_taken_down_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 1000, "busy": 50_000}
    fakes = SimpleNamespace(time_ns=lambda: clock["now"], thread_time_ns=lambda: clock["busy"])
    monkeypatch.setattr("resilient.observability.step_trace.time", fakes)
    taken = SpanRecorder()
    taken.with_processor_time = True
    with taken.during("waiting"):
        clock["now"] += 9_000
    with taken.during("work"):
        clock["now"] += 9_000
        clock["busy"] += 6_500
    assert taken.spans() == ((PART, "waiting", 1000, 10_000, 0), (PART, "work", 10_000, 19_000, 6))


def at(time_ms: float) -> int:
    return int(START) * 1_000_000_000 + round(time_ms * MS)


def step(number: int, node: int, start_ms: float, *spans: tuple[str, str, float, float], **changes: Any) -> TracedStep:
    made = tuple(RecordedSpan(category, name, at(start), at(end), 7) for category, name, start, end in spans)
    graph = changes.pop("graph", chain_graph([0, 1], 2, 1))
    fields = {"generation": 1, "local_rank": 0, "pipeline": 0, "row": node, **changes}
    planned = PlannedRow(graph=graph, pipelines=(0,), row=fields["row"], action_ms=())
    return TracedStep(
        step=number, node=node, start_ns=at(start_ms), end_ns=made[-1].end_ns, busy_us=9, spans=made, planned=planned,
        **fields,
    )  # fmt: skip


def write_run(folder: Path, run: Run, *steps: TracedStep) -> None:
    lines = [msgspec.json.encode(event) + b"\n" for event in run.events]
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    for each in steps:
        each.write(folder)


def interrupted(folder: Path) -> Trace:
    """Node 1 is lost in step 2; node 0 does the step again alone. The start, and what comes later, is not traced."""
    run = Run(num_nodes=2)
    run.generation(-500, 1, "start", 0, [0, 1])
    run.installed(-450, -400)
    run.injected(120, 1)
    run.detected(130, [1], 2)
    run.generation(140, 2, "failure", 1, [0], lost_steps=1)
    run.installed(160, 190, node=0)
    run.installed(160, 170, node=7)
    run.generation(900, 3, "join", 2, [0, 1])
    run.installed(920, 950)
    write_run(
        folder,
        run,
        step(2, 1, 101, (ACTION, "1RECV_F0", 101, 112), (ACTION, "1F0", 112, 118)),
        step(2, 0, 100, (ACTION, "0F0", 100, 110), (ACTION, "0RECV_B0", 110, 133)),
        step(2, 0, 200, (ACTION, "0F0", 200, 220), (PART, "load 0", 200, 205), (ACTION, "0B0", 220, 260),
             (ACTION, "0REDUCE3", 260, 262), (PART, "prepare", 262, 265), (PART, "commit", 265, 270), generation=2),
    )  # fmt: skip
    trace = recorded_trace(folder, traced_steps(folder))
    assert trace is not None
    return trace


def test_workers_files_become_one_trace_with_the_recoveries_between(tmp_path: Path) -> None:
    trace = interrupted(tmp_path)
    assert trace.processes == {0: "node 0", 1: "node 1", 7: "node 7", 8: "coordinator"}
    assert trace.threads == {(0, 0): "worker 0", (1, 0): "worker 0", (7, 0): "worker 0", (8, 0): "membership"}
    recoveries = {
        process: [(s.name, s.args["generation"]) for s in trace.of(process, 0, RECOVERY)] for process in trace.processes
    }
    installed = [("regroup", 2), ("copy", 2)]
    assert recoveries == {0: installed, 1: [], 7: installed, 8: [("detect", 2), ("agree", 2)]}
    assert [(s.name, s.args["generation"]) for s in trace.of(0, 0, STEP)] == [("step 2", 1), ("step 2", 2)]
    assert [s.name for s in trace.of(0, 0, ACTION)] == ["0F0", "0RECV_B0", "0F0", "0B0", "0REDUCE3"]
    known = {"step": 2, "generation": 2, "pipeline": 0, "row": 0}
    assert trace.of(0, 0, STEP)[1].args == {**known, "busy_us": 9}
    assert trace.of(0, 0, ACTION)[2].args == {**known, "busy_us": 7}
    (agreed,) = [s for s in trace.slices if s.name == "agree"]
    assert [round((t - at(0)) / MS) for t in (agreed.start_ns, agreed.end_ns)] == [130, 140]


def test_workers_of_units_are_named_by_all_stages_that_they_had(tmp_path: Path) -> None:
    def graph(*lanes: tuple[str, tuple[int, ...]]) -> StepGraph:
        made = (
            UnitLane(name=LaneName(unit), rows=rows, cells=(), backwards=(Backward.ALL,) * len(rows))
            for unit, rows in lanes
        )
        return StepGraph(lanes=tuple(made), num_rows=2)

    forward = (ACTION, "vision.0:0F0", 101, 112)
    before, after = graph(("vision", (0,)), ("llm", (1,))), graph(("vision", (0, 1)), ("llm", (1, 0)))
    write_run(
        tmp_path,
        Run(),
        step(2, 0, 100, forward, graph=before),
        step(3, 0, 200, forward, graph=after, generation=2),
        step(3, 1, 200, forward, graph=after, generation=2),
    )
    trace = recorded_trace(tmp_path, traced_steps(tmp_path))
    assert trace is not None
    assert trace.threads == {(0, 0): "worker 0: vision.0:0, llm.0:1", (1, 0): "worker 0: vision.0:1, llm.0:0"}


def test_picture_is_of_the_first_step_that_all_finished(tmp_path: Path) -> None:
    chart = recorded_chart(interrupted(tmp_path))
    assert chart is not None
    assert (chart.title, chart.rows, chart.length_ns) == (
        "step 2 as it was run: 70 ms", ("node 0\npipeline 0, stage 0",), 70 * MS
    )  # fmt: skip
    assert chart.bars == (
        Bar(row=0, kind="F", start_ns=0, end_ns=20 * MS, label="0"),
        Bar(row=0, kind="B", start_ns=20 * MS, end_ns=60 * MS, label="0"),
        Bar(row=0, kind="sum", start_ns=60 * MS, end_ns=62 * MS),
        Bar(row=0, kind="load", start_ns=0, end_ns=5 * MS),
        Bar(row=0, kind="prepare", start_ns=62 * MS, end_ns=65 * MS),
        Bar(row=0, kind="commit", start_ns=65 * MS, end_ns=70 * MS),
    )
    assert chart.busy == (60 / 70,)


def test_run_in_which_no_traced_step_was_finished_has_no_picture(tmp_path: Path) -> None:
    write_run(tmp_path, Run(), step(2, 0, 100, (ACTION, "0F0", 100, 110)))
    trace = recorded_trace(tmp_path, traced_steps(tmp_path))
    assert trace is not None
    assert recorded_chart(trace) is None


def test_line_that_a_killed_worker_did_not_finish_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, Run(), step(2, 0, 100, (ACTION, "0F0", 100, 110)))
    with (tmp_path / "logs" / "node-0" / "worker-0.trace.jsonl").open("a") as file:
        file.write('{"step": 3, "gener')
    trace = recorded_trace(tmp_path, traced_steps(tmp_path))
    assert trace is not None
    assert [s.name for s in trace.of(0, 0, STEP)] == ["step 2"]


def test_run_without_traced_steps_has_no_trace(tmp_path: Path) -> None:
    assert recorded_trace(tmp_path, traced_steps(tmp_path)) is None


def test_step_that_cannot_be_written_down_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").touch()
    with caplog.at_level(logging.WARNING):
        step(2, 0, 100, (ACTION, "0F0", 100, 110)).write(tmp_path)
    assert caplog.messages[0].startswith("step 2 is missing in the trace: ")
