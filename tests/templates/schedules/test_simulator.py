from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate
from resilient.templates.schedules.validator import ScheduleError
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.templates.jobs import template
from tests.templates.simulated_steps import simulate_template

MS = 1_000_000
TRAINING = [kind for kind in ScheduleKind if kind is not ScheduleKind.FORWARD_ONLY]
small = st.integers(0, 9)


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: Schedule
    costs: ActionCosts


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any schedule; every cost differs by stage and microbatch."""
    kind = draw(st.sampled_from(list(ScheduleKind)))
    rows, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    num_chunks = chunks_of(kind, draw(st.integers(2, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    stages, borders = (rows * num_chunks, num_microbatches), (rows * num_chunks - 1, num_microbatches)
    costs = ActionCosts(
        forward_ms=rng.integers(0, 9, stages),
        backward_input_ms=rng.integers(0, 9, stages),
        backward_weight_ms=rng.integers(0, 9, stages),
        latency_ms=rng.integers(0, 4, borders),
        transfer_ms=rng.integers(0, 9, borders),
    )
    return Case(schedule=generate(kind, rows, num_microbatches, num_chunks=num_chunks), costs=costs)


def in_plain_words(case: Case) -> list[tuple[int, int]]:
    """Start and end of every action, from what each has to wait for."""
    rows, costs = case.schedule.rows, case.costs
    place = {action: (row, i) for row, actions in enumerate(rows) for i, action in enumerate(actions)}

    def cost(values: Any, stage: int, index: int) -> int:
        return int(values[stage, index]) * MS

    def partner(action: Action) -> Action:
        step = 1 if action.op in (Op.SEND_F, Op.RECV_B) else -1
        other = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
        return Action(action.stage + step, other[action.op], action.index)

    @cache
    def done(row: int, i: int) -> int:
        """When the worker is done with its action i."""
        if i < 0:
            return 0
        action, before = rows[row][i], done(row, i - 1)
        if action.op in (Op.RECV_F, Op.RECV_B):
            sent = partner(action)
            border = min(action.stage, sent.stage)
            return max(before, carried(*place[sent]) + cost(costs.latency_ms, border, action.index))
        parts = {
            Op.FORWARD: (costs.forward_ms,),
            Op.BACKWARD: (costs.backward_input_ms, costs.backward_weight_ms),
            Op.BACKWARD_INPUT: (costs.backward_input_ms,),
            Op.BACKWARD_WEIGHT: (costs.backward_weight_ms,),
        }.get(action.op, ())
        return before + sum(cost(part, action.stage, action.index) for part in parts)

    @cache
    def begun(row: int, i: int) -> int:
        """When the link takes up a message: the worker has come to it, and earlier ones to the same row are through."""
        target = place[partner(rows[row][i])][0]
        earlier = [
            j for j in range(i)
            if rows[row][j].op in (Op.SEND_F, Op.SEND_B) and place[partner(rows[row][j])][0] == target
        ]  # fmt: skip
        return max([done(row, i), *(carried(row, j) for j in earlier[-1:])])

    def carried(row: int, i: int) -> int:
        action = rows[row][i]
        border = min(action.stage, partner(action).stage)
        return begun(row, i) + cost(costs.transfer_ms, border, action.index)

    return [
        (begun(row, i), carried(row, i)) if action.op in (Op.SEND_F, Op.SEND_B) else (done(row, i - 1), done(row, i))
        for row, actions in enumerate(rows)
        for i, action in enumerate(actions)
    ]


@given(cases())
def test_everything_happens_as_soon_as_what_it_waits_for(case: Case) -> None:
    timeline = simulate(case.schedule, case.costs)
    assert list(zip(timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True)) == in_plain_words(case)


@given(cases(), st.sampled_from(["forward_ms", "backward_input_ms", "backward_weight_ms", "latency_ms", "transfer_ms"]))
def test_more_of_any_cost_never_makes_anything_earlier(case: Case, name: str) -> None:
    more = np.array(getattr(case.costs, name))
    more[: len(more) // 2 + 1] += 2
    before, after = simulate(case.schedule, case.costs), simulate(case.schedule, replace(case.costs, **{name: more}))
    assert (after.end_ns >= before.end_ns).all()


@given(cases())
def test_iteration_is_at_least_what_a_row_computes_and_what_a_microbatch_takes(case: Case) -> None:
    timeline = simulate(case.schedule, case.costs)
    assert min(timeline.bubble_ms) >= 0
    computing = timeline.schedule.codes[:, 0] <= Op.BACKWARD_INPUT
    for microbatch in range(case.schedule.graph.num_cells):
        chain = computing & (case.schedule.codes[:, 2] == microbatch)
        assert timeline.iteration_ns >= (timeline.end_ns - timeline.start_ns)[chain].sum()


def run(
    kind: ScheduleKind, num_rows: int, num_microbatches: int, times: tuple[float, float, float], **costs: Any
) -> Timeline:
    chunks = chunks_of(kind, 2)
    forward, inputs, weights = (ms / chunks for ms in times)
    schedule = generate(kind, num_rows, num_microbatches, num_chunks=chunks)
    return simulate(
        schedule, ActionCosts(forward_ms=forward, backward_input_ms=inputs, backward_weight_ms=weights, **costs)
    )


@given(st.integers(1, 8), st.integers(0, 12), small, small, small)
def test_bubbles_without_messages_are_the_published_ones(
    rows: int, more: int, forward: int, inputs: int, weights: int
) -> None:
    """With at least 2 S - 1 microbatches; source: Megatron-LM (SC'21), section 2.2; Zero Bubble (ICLR'24), table 1."""
    num_microbatches = 2 * rows - 1 + more
    times = (forward, inputs, weights)
    whole = sum(times)
    expected: dict[ScheduleKind, float] = {
        ScheduleKind.GPIPE: (rows - 1) * whole,
        ScheduleKind.ONE_F_ONE_B: (rows - 1) * whole,
        ScheduleKind.EAGER: (rows - 1) * whole,
    }
    if num_microbatches % rows == 0:
        expected[ScheduleKind.INTERLEAVED] = (rows - 1) * whole / 2
    if weights <= min(forward, inputs):
        expected[ScheduleKind.ZB_H1] = (rows - 1) * (forward + inputs - weights)
    for kind, bubble in expected.items():
        timeline = run(kind, rows, num_microbatches, times)
        assert timeline.iteration_ms == num_microbatches * whole + bubble, kind
        assert timeline.bubble_ms == (bubble,) * rows, kind


@given(st.integers(1, 8), st.integers(0, 12), st.integers(1, 9))
def test_no_row_waits_between_its_first_and_last_action_under_zb_h2(rows: int, more: int, ms: int) -> None:
    num_microbatches = 2 * rows - 1 + more
    timeline = run(ScheduleKind.ZB_H2, rows, num_microbatches, (ms, ms, ms))
    computing = timeline.schedule.codes[:, 0] <= Op.BACKWARD_WEIGHT
    starts = np.split(np.where(computing, timeline.start_ns, np.iinfo(np.int64).max), timeline.schedule.ends[:-1])
    ends = np.split(np.where(computing, timeline.end_ns, 0), timeline.schedule.ends[:-1])
    for first, last in zip(starts, ends, strict=True):
        assert last.max() - first.min() == num_microbatches * 3 * ms * MS
    assert timeline.iteration_ms == 3 * ms * num_microbatches + (rows - 1) * ms, "the last row starts so much later"


def test_forwards_alone_take_one_fill() -> None:
    timeline = simulate(generate(ScheduleKind.FORWARD_ONLY, 4, 6), ActionCosts(forward_ms=2, backward_input_ms=9))
    assert timeline.iteration_ms == 2 * (6 + 3)


def test_peak_memory_is_that_of_the_microbatches_in_flight() -> None:
    by_stage = [5, 3, 2, 1]
    peaks = {kind: run(kind, 4, 8, (1, 1, 1), activation_bytes=by_stage).peak_bytes for kind in TRAINING[:3]}
    assert peaks[ScheduleKind.GPIPE] == (40, 24, 16, 8)
    assert peaks[ScheduleKind.ONE_F_ONE_B] == (20, 9, 4, 1), "S - k microbatches"
    assert peaks[ScheduleKind.EAGER] == (35, 15, 6, 1)
    assert run(ScheduleKind.ZB_H1, 4, 8, (1, 1, 1), activation_bytes=by_stage).peak_bytes == (20, 12, 8, 4), (
        "until the W"
    )
    assert run(ScheduleKind.INTERLEAVED, 2, 4, (1, 1, 1), activation_bytes=[1, 10, 100, 1000]).peak_bytes == (203, 1020)


def test_gradients_are_held_from_one_half_of_a_backward_to_the_other() -> None:
    both = {"activation_bytes": [100, 100], "deferred_bytes": [0, 10]}
    assert run(ScheduleKind.ZB_H1, 2, 3, (1, 1, 1), **both).peak_bytes == (200, 220), (
        "of both microbatches in the last row"
    )
    assert run(ScheduleKind.SPLIT, 2, 3, (1, 1, 1), **both).peak_bytes == (200, 110)
    assert run(ScheduleKind.ONE_F_ONE_B, 2, 3, (1, 1, 1), **both).peak_bytes == (200, 100)


def test_peak_memory_counts_unequal_microbatches_apart() -> None:
    schedule = generate(ScheduleKind.ONE_F_ONE_B, 2, 4)
    sizes = np.array([[1, 7, 2, 4], [3, 1, 1, 5]])
    timeline = simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1, activation_bytes=sizes))
    assert timeline.peak_bytes == (9, 5)


def test_messages_hide_behind_more_forwards_at_first() -> None:
    late = {kind: run(kind, 4, 16, (1, 1, 1), latency_ms=1).iteration_ms - 48 for kind in ScheduleKind}
    assert late[ScheduleKind.ONE_F_ONE_B] == 37
    assert late[ScheduleKind.EAGER] == late[ScheduleKind.GPIPE] == 15, "the fill's computations, and each message once"
    assert (
        late[ScheduleKind.ZB_H2] < late[ScheduleKind.EAGER] < late[ScheduleKind.ZB_H1] < late[ScheduleKind.ONE_F_ONE_B]
    )


def test_messages_of_one_direction_follow_each_other() -> None:
    timeline = run(ScheduleKind.GPIPE, 2, 3, (1, 2, 0), transfer_ms=4, latency_ms=10)
    sends = [
        (str(span.action), span.start_ns // MS, span.end_ns // MS)
        for span in timeline.spans
        if "SEND" in str(span.action)
    ]
    assert sends == [
        ("0SEND_F0", 1, 5), ("0SEND_F1", 5, 9), ("0SEND_F2", 9, 13),
        ("1SEND_B0", 26, 30), ("1SEND_B1", 30, 34), ("1SEND_B2", 34, 38),
    ]  # fmt: skip
    assert timeline.iteration_ms == 38 + 10 + 2


SUMS = Schedule.parse(
    "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE2 0REDUCE1 0REDUCE0\n1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE3 1REDUCE0"
)


def sums(**costs: Any) -> tuple[list[tuple[str, int, int]], int]:
    timeline = simulate(SUMS, ActionCosts(forward_ms=10, backward_input_ms=10, backward_weight_ms=10, **costs))
    spans = [(str(s.action), s.start_ns // MS, s.end_ns // MS) for s in timeline.spans if s.action.op is Op.REDUCE]
    return spans, timeline.iteration_ns // MS


def test_sums_follow_each_other_after_the_last_backward() -> None:
    # stage 1 is done at 40, stage 0 at 60; state 0 is held by both
    assert sums(reduce_ms={0: 5, 1: 6, 2: 7, 3: 8}) == (
        [("0REDUCE2", 60, 67), ("0REDUCE1", 67, 73), ("0REDUCE0", 73, 78), ("1REDUCE3", 40, 48), ("1REDUCE0", 73, 78)],
        78,
    )
    assert [(start, end) for _, start, end in sums()[0]] == [(60, 60)] * 3 + [(40, 40)] * 2, "free of charge"


def test_sums_of_later_layers_start_within_the_last_backward() -> None:
    spans, end = sums(reduce_ms={0: 5, 1: 6, 2: 7, 3: 8}, layer_backward_ms={0: 2, 1: 10, 2: 8, 3: 20})
    assert spans == [
        ("0REDUCE2", 48, 55), ("0REDUCE1", 58, 64), ("0REDUCE0", 64, 69), ("1REDUCE3", 38, 46), ("1REDUCE0", 64, 69),
    ]  # fmt: skip
    assert end == 69


def test_sums_never_start_before_the_last_backward_does() -> None:
    spans, _ = sums(reduce_ms={2: 1}, layer_backward_ms={0: 100})
    assert spans[0] == ("0REDUCE2", 40, 41)


def test_spans_are_what_there_is_to_draw() -> None:
    timeline = run(ScheduleKind.ONE_F_ONE_B, 2, 1, (1, 2, 0), transfer_ms=1)
    assert [(span.row, str(span.action), span.start_ns // MS, span.end_ns // MS) for span in timeline.spans] == [
        (0, "0F0", 0, 1), (0, "0SEND_F0", 1, 2), (0, "0B0", 6, 8), 
        (1, "1F0", 2, 3), (1, "1B0", 3, 5), (1, "1SEND_B0", 5, 6),
    ]  # fmt: skip
    assert timeline.bubble_ms == (5, 5)


def test_deadlock_is_an_error_with_the_table() -> None:
    schedule = Schedule.parse("0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    message = "deadlock: 0RECV_B0, 1RECV_F0 wait for messages that are never sent"
    with pytest.raises(ScheduleError, match=f"^{message}\n") as raised:
        simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1))
    assert "[1RECV_F0]" in str(raised.value)


@pytest.mark.parametrize("text", ["0F0 0SEND_F0", "0F0 0B0 0SEND_B0"])
def test_message_to_nowhere_cannot_be_sent(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"^deadlock: 0SEND_[FB]0 wait for"):
        simulate(Schedule.parse(text), ActionCosts(forward_ms=1, backward_input_ms=1))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward_ms": [1, 1]}, "forward_ms must be one number, 3 or 3 x 2 numbers, got (2,); give one for all, one "
         "for each stage (border), or one for each of its microbatches"),
        ({"transfer_ms": np.ones((3, 2))}, "transfer_ms must be one number, 2 or 2 x 2 numbers, got (3, 2); give one "
         "for all, one for each stage (border), or one for each of its microbatches"),
        ({"backward_weight_ms": [0, -1, 0]}, "backward_weight_ms must be >= 0, got -1; give times and sizes"),
        ({"forward_ms": float("nan")}, "forward_ms must be >= 0, got nan; give times and sizes"),
        ({"transfer_ms": float("inf")}, "transfer_ms must be at most 1.126e+09, got inf; give times and sizes"),
        ({"reduce_ms": {0: -1}}, "reduce_ms must be >= 0, got -1; give times and sizes"),
        ({"layer_backward_ms": {0: float("nan")}}, "layer_backward_ms must be >= 0, got nan; give times and sizes"),
        ({"activation_bytes": -5}, "activation_bytes must be >= 0, got -5; give times and sizes"),
    ],
)  # fmt: skip
def test_costs_that_do_not_fit_are_refused(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        simulate(
            generate(ScheduleKind.ONE_F_ONE_B, 3, 2), ActionCosts(**{"forward_ms": 1, "backward_input_ms": 1, **costs})
        )


def test_costs_of_any_form_run_in_the_same_compiled_loop() -> None:
    from resilient.templates.schedules.simulator_loops import run_timed

    schedule = generate(ScheduleKind.ONE_F_ONE_B, 1, 1)
    simulate(schedule, ActionCosts(forward_ms=np.ones((1, 1)), backward_input_ms=np.ones((1, 1, 1))))
    compiled = len(cast(Any, run_timed).signatures)
    simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=[1], backward_weight_ms=np.ones((1, 1, 1))))
    assert len(cast(Any, run_timed).signatures) == compiled


times = st.integers(0, 9)


def of_times(*stages: tuple[float, float, float], sync_ms: float = 0) -> PipelineTemplate:
    """A template of one-device stages: forward, backward, and the messages over the boundary before."""
    return PipelineTemplate(
        num_nodes=len(stages),
        stages=tuple(
            StageSpec(
                first_layer=i, end_layer=i + 1, node_index=i, forward_ms=forward, backward_ms=backward, send_ms=send,
            )
            for i, (forward, backward, send) in enumerate(stages)
        ),
        sync_ms=sync_ms,
    )  # fmt: skip


@given(st.lists(times, min_size=1, max_size=6), st.integers(0, 4), st.integers(1, 12), times)
@settings(max_examples=200)
def test_objective_of_templates_is_never_below_1f1b_of_proportional_stages(
    forwards: list[int], backward_factor: int, num_microbatches: int, sync: int
) -> None:
    made = of_times(*((forward, backward_factor * forward, 0) for forward in forwards), sync_ms=sync)
    assert simulate_template(made, num_microbatches).iteration_ms <= made.iteration_ms(num_microbatches)


@given(st.lists(st.tuples(times, times, times), min_size=1, max_size=6), times)
@settings(max_examples=100)
def test_objective_of_one_microbatch_is_exact(stages: list[tuple[int, int, int]], sync: int) -> None:
    made = of_times((*stages[0][:2], 0), *stages[1:], sync_ms=sync)
    assert simulate_template(made, 1).iteration_ms == made.iteration_ms(1)


def test_objective_is_below_1f1b_that_waits_for_a_later_forward() -> None:
    """The middle stage has a backward to run from 9 ms on, and first waits for the second forward, until 18 ms."""
    uneven = of_times((9, 0, 0), (0, 9, 0), (0, 0, 0))
    assert simulate_template(uneven, 2).iteration_ms == 36
    assert uneven.iteration_ms(2) == 27


def test_objective_is_exact_for_equal_stages_without_messages() -> None:
    even = template(6, 6, 6, 6, sync_ms=2)
    assert simulate_template(even, 16).iteration_ms == even.iteration_ms(16) == 24 + 15 * 6 + 2


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 12), st.sampled_from([0, 0.25, 1]))
def test_eager_1f1b_takes_no_longer_than_1f1b_whichever_rows_have_more_memory(
    more: list[int], num_microbatches: int, send_ms: float
) -> None:
    """As many in flight in a row as in the one before made both wait for each other."""
    num_rows = len(more)
    limits = [num_rows - row + each for row, each in enumerate(more)]
    costs = ActionCosts(forward_ms=1, backward_input_ms=1, backward_weight_ms=1, transfer_ms=send_ms)
    plain = generate(ScheduleKind.ONE_F_ONE_B, num_rows, num_microbatches)
    eager = generate(ScheduleKind.EAGER, num_rows, num_microbatches, max_in_flight=limits)
    assert simulate(eager, costs).iteration_ms <= simulate(plain, costs).iteration_ms
