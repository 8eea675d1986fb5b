"""Traces hold what schedules do, and are what viewers read."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from resilient.observability.trace_events import ACTION, STEP, Slice, Trace, simulated_trace
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate

MS = 1_000_000


def timeline(kind: ScheduleKind, num_chunks: int = 1, **costs: Any) -> Timeline:
    states = [[stage] for stage in range(3 * num_chunks)]
    schedule = generate(kind, 3, 4, num_chunks=num_chunks, states=states)
    return simulate(schedule, ActionCosts(forward_ms=1.0, backward_input_ms=1.5, backward_weight_ms=0.5, **costs))


def small() -> Trace:
    step = Slice(
        process=4, thread=1, name="step 7", category=STEP, start_ns=5 * MS, end_ns=9 * MS + 3, args={"step": 7}
    )
    action = Slice(process=4, thread=1, name="2F0", category=ACTION, start_ns=5 * MS, end_ns=6 * MS, args={"step": 7})
    return Trace(processes={4: "node 4"}, threads={(4, 1): "worker 1"}, slices=(action, step))


def test_file_is_in_the_trace_event_format() -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    worker = {"pid": 4, "tid": 1}
    assert json.loads(small().to_json()) == {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 4, "tid": 0, "args": {"name": "node 4"}},
            {"ph": "M", "name": "process_sort_index", "pid": 4, "tid": 0, "args": {"sort_index": 0}},
            {"ph": "M", "name": "thread_name", **worker, "args": {"name": "worker 1"}},
            {"ph": "M", "name": "thread_sort_index", **worker, "args": {"sort_index": 0}},
            # the step first: viewers take what starts with it and ends before for a part of it
            {"ph": "X", "name": "step 7", "cat": "step", **worker, "ts": 0, "dur": 4000.003, "args": {"step": 7}},
            {"ph": "X", "name": "2F0", "cat": "action", **worker, "ts": 0, "dur": 1000, "args": {"step": 7}},
        ],
        "displayTimeUnit": "ms",
    }


def test_what_is_written_is_read_again_from_its_first_slice_on() -> None:
    read = Trace.from_json(small().to_json())
    assert (read.processes, read.threads) == (small().processes, small().threads)
    (step,), (action,) = read.of(4, 1, STEP), read.of(4, 1, ACTION)
    assert (step.start_ns, step.end_ns, action.start_ns, action.end_ns) == (0, 4 * MS + 3, 0, MS)
    assert Trace.from_json(read.to_json()) == read
    assert read.of(4, 0, ACTION) == []


@pytest.mark.parametrize("data", [b"", b"[]", b'{"traceEvents": [{"ph": "X"}]}'])
def test_files_of_another_kind_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(Input data was truncated|Expected `object`|Object missing required)"):
        Trace.from_json(data)


def test_an_empty_trace_can_be_written() -> None:
    assert Trace.from_json(Trace(processes={}, threads={}, slices=()).to_json()).slices == ()


@pytest.mark.parametrize("kind", ScheduleKind)
def test_simulated_workers_do_their_computations_in_order(kind: ScheduleKind) -> None:
    simulated = timeline(kind, chunks_of(kind, 2), transfer_ms=0.25, latency_ms=0.125)
    trace = Trace.from_json(simulated_trace({"a": simulated, "b": simulated}).to_json())
    assert trace.processes == {0: "a", 1: "b"}
    for process in trace.processes:
        own = [thread for (at, thread), name in trace.threads.items() if at == process and "stage" in name]
        assert len(own) == 3
        for thread, actions in zip(own, simulated.schedule.rows, strict=True):
            found = trace.of(process, thread, ACTION)
            assert [each.name for each in found] == [str(action) for action in actions if action.op.computes]
    for process, thread in trace.threads:
        for before, after in pairwise(trace.of(process, thread, ACTION)):
            assert before.end_ns <= after.start_ns, "a thread does one thing at a time"


def test_simulated_times_are_those_of_the_timeline() -> None:
    simulated = timeline(ScheduleKind.ONE_F_ONE_B, transfer_ms=0.25)
    trace = simulated_trace({"1f1b": simulated})
    expected = {(span.action, span.start_ns, span.end_ns) for span in simulated.spans if span.end_ns > span.start_ns}
    assert {(each.name, each.start_ns, each.end_ns) for each in trace.slices} == {
        (str(action), start_ns, end_ns) for action, start_ns, end_ns in expected
    }
    assert max(each.end_ns for each in trace.slices) == simulated.iteration_ns
    first = trace.of(0, 0, ACTION)[0]
    assert first.args == {"stage": 0, "microbatch": 0}


def test_messages_and_sums_have_threads_of_their_own_below_their_workers() -> None:
    trace = simulated_trace({"1f1b": timeline(ScheduleKind.ONE_F_ONE_B, transfer_ms=0.25, reduce_ms={0: 1.0, 2: 1.0})})
    assert list(trace.threads.values()) == [
        "worker 0: stage 0", "worker 0: gradient sums", "worker 0 sends to 1",
        "worker 1: stage 1", "worker 1 sends to 0", "worker 1 sends to 2",
        "worker 2: stage 2", "worker 2: gradient sums", "worker 2 sends to 1",
    ]  # fmt: skip
    ops = [{each.name.strip("0123456789") for each in trace.of(0, thread, ACTION)} for _, thread in trace.threads]
    assert ops == [
        {"F", "B"}, {"REDUCE"}, {"SEND_F"}, {"F", "B"}, {"SEND_B"}, {"SEND_F"}, {"F", "B"}, {"REDUCE"}, {"SEND_B"},
    ]  # fmt: skip
    (total,) = trace.of(0, 1, ACTION)
    assert total.args == {"stage": 0, "state": 0}


def test_what_takes_no_time_is_left_out() -> None:
    trace = simulated_trace({"interleaved": timeline(ScheduleKind.INTERLEAVED, 2)})
    assert list(trace.threads.values()) == [f"worker {row}: stages {row}, {row + 3}" for row in range(3)]
    assert not any(Op.SEND_F.text in each.name for each in trace.slices)
