from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import (
    CHUNK_KINDS,
    SPLIT_KINDS,
    ScheduleKind,
    chunks_of,
    held_counts,
)
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.validator import validate

FOUR_STAGES_EIGHT_MICROBATCHES = """
0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0F4 0SEND_F4 0RECV_B1 0B1 0F5 0SEND_F5 0RECV_B2 0B2
0F6 0SEND_F6 0RECV_B3 0B3 0F7 0SEND_F7 0RECV_B4 0B4 0RECV_B5 0B5 0RECV_B6 0B6 0RECV_B7 0B7 0REDUCE1 0REDUCE0

1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0
1RECV_F3 1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1F4 1SEND_F4 1RECV_B2 1B2 1SEND_B2
1RECV_F5 1F5 1SEND_F5 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1F6 1SEND_F6 1RECV_B4 1B4 1SEND_B4
1RECV_F7 1F7 1SEND_F7 1RECV_B5 1B5 1SEND_B5 1RECV_B6 1B6 1SEND_B6 1RECV_B7 1B7 1SEND_B7 1REDUCE2

2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1 2B1 2SEND_B1
2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2F4 2SEND_F4 2RECV_B3 2B3 2SEND_B3
2RECV_F5 2F5 2SEND_F5 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2F6 2SEND_F6 2RECV_B5 2B5 2SEND_B5
2RECV_F7 2F7 2SEND_F7 2RECV_B6 2B6 2SEND_B6 2RECV_B7 2B7 2SEND_B7 2REDUCE3

3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3 3SEND_B3
3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7 3F7 3B7 3SEND_B7
3REDUCE5 3REDUCE4 3REDUCE0
"""
STATES = [[0, 1], [2], [3], [0, 4, 5]]  # the last stage uses the state of layer 0 (tied)

COMPUTATIONS = {
    (ScheduleKind.GPIPE, 2, 3): "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
    (ScheduleKind.EAGER, 3, 4): """
        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    (ScheduleKind.INTERLEAVED, 2, 4): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    (ScheduleKind.ZB_H1, 3, 4): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    (ScheduleKind.SPLIT, 3, 4): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1W0 1F2 1I1 1W1 1F3 1I2 1W2 1I3 1W3
        2F0 2I0 2W0 2F1 2I1 2W1 2F2 2I2 2W2 2F3 2I3 2W3""",
    (ScheduleKind.INTERLEAVED_ZB, 2, 4): """
        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3""",
    (ScheduleKind.ZB_V, 2, 4): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3""",
    (ScheduleKind.ZB_H2, 2, 4): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3""",
}  # fmt: skip


def computations(schedule: Schedule) -> Schedule:
    return Schedule.of([action for action in actions if action.op.computes] for actions in schedule.rows)


def in_flight(actions: Sequence[Action]) -> int:
    """The most microbatches that wait for their backward at once."""
    ends = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return max(accumulate((a.op is Op.FORWARD) - (a.op in ends) for a in actions if a.op.computes))


def test_1f1b_of_four_stages_and_eight_microbatches_as_text() -> None:
    golden = "\n".join(" ".join(block.split()) for block in FOUR_STAGES_EIGHT_MICROBATCHES.split("\n\n"))
    assert str(generate(ScheduleKind.ONE_F_ONE_B, 4, 8, states=STATES)) == golden


@pytest.mark.parametrize(("kind", "num_rows", "num_microbatches"), COMPUTATIONS)
def test_computations_as_text(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> None:
    golden = Schedule.parse(COMPUTATIONS[kind, num_rows, num_microbatches])
    assert computations(generate(kind, num_rows, num_microbatches, num_chunks=chunks_of(kind, 2))) == golden


def test_forward_only_as_text() -> None:
    assert str(generate(ScheduleKind.FORWARD_ONLY, 2, 2)) == "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1"


def test_backward_for_inputs_is_sent_before_the_one_for_weights() -> None:
    text = str(generate(ScheduleKind.ZB_H1, 2, 1, states=[[0], [1]]))
    assert text == "0F0 0SEND_F0 0RECV_B0 0I0 0W0 0REDUCE0\n1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE1"


def test_stages_of_one_row_send_nothing_to_each_other_and_sum_a_shared_state_once() -> None:
    text = str(generate(ScheduleKind.INTERLEAVED, 1, 1, num_chunks=2, states=[[0, 1], [0, 2]]))
    assert text == "0F0 1F0 1B0 0B0 1REDUCE2 0REDUCE1 0REDUCE0"


@given(st.sampled_from(list(ScheduleKind)), st.integers(1, 6), st.integers(1, 14), st.integers(2, 4))
def test_generated_schedules_are_valid_and_read_back(
    kind: ScheduleKind, num_rows: int, num_microbatches: int, num_chunks: int
) -> None:
    num_chunks = chunks_of(kind, num_chunks)
    states = None if kind is ScheduleKind.FORWARD_ONLY else [[stage, 99] for stage in range(num_rows * num_chunks)]
    schedule = generate(kind, num_rows, num_microbatches, num_chunks=num_chunks, states=states)
    validate(schedule)
    assert len(schedule.graph.row_of) == num_rows * num_chunks
    assert schedule.graph.num_cells == num_microbatches
    assert Schedule.parse(str(schedule)) == schedule


@given(st.integers(1, 7), st.integers(1, 20))
def test_no_kind_keeps_more_in_flight_than_memory_is_planned_for(num_rows: int, num_microbatches: int) -> None:
    limited = {ScheduleKind.EAGER, ScheduleKind.FORWARD_ONLY, *CHUNK_KINDS}
    for kind in set(ScheduleKind) - limited:
        schedule = generate(kind, num_rows, num_microbatches)
        for row, actions in enumerate(schedule.rows):
            held = held_counts(kind, num_rows, row, num_microbatches)
            assert in_flight(actions) <= max(map(sum, held)), kind


@given(st.integers(1, 6), st.integers(1, 14))
def test_microbatches_in_flight_are_what_the_kinds_promise(num_rows: int, num_microbatches: int) -> None:
    promised = {
        ScheduleKind.GPIPE: lambda row: num_microbatches,
        ScheduleKind.ONE_F_ONE_B: lambda row: num_rows - row,
        ScheduleKind.SPLIT: lambda row: num_rows - row,
        ScheduleKind.EAGER: lambda row: 2 * (num_rows - row) - 1,
        ScheduleKind.ZB_H1: lambda row: num_rows,
        ScheduleKind.ZB_H2: lambda row: 2 * num_rows - 1,
    }
    for kind, most in promised.items():
        schedule = generate(kind, num_rows, num_microbatches)
        assert [in_flight(row) for row in schedule.rows] == [
            min(most(row), num_microbatches) for row in range(num_rows)
        ], kind


@given(st.sampled_from(SPLIT_KINDS), st.integers(1, 6), st.integers(1, 40))
def test_gradients_wait_of_as_many_microbatches_as_memory_is_planned_for(
    kind: ScheduleKind, num_rows: int, num_microbatches: int
) -> None:
    assume(kind not in CHUNK_KINDS)
    schedule = generate(kind, num_rows, num_microbatches)
    costs = ActionCosts(forward_ms=1, backward_input_ms=1, backward_weight_ms=1, deferred_bytes=1)
    held = [held_counts(kind, num_rows, row, num_microbatches) for row in range(num_rows)]
    assert simulate(schedule, costs).peak_bytes == tuple(1 + max(each.waiting for each in of_row) for of_row in held)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 14))
def test_eager_1f1b_keeps_to_the_memory_of_every_row(limits: list[int], num_microbatches: int) -> None:
    schedule = generate(ScheduleKind.EAGER, len(limits), num_microbatches, max_in_flight=limits)
    validate(schedule, limits)
    assert all(in_flight(row) <= most for row, most in zip(schedule.rows, limits, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0}, "num_rows and num_microbatches must be >= 1, got 0 and 4; "
         "give every pipeline a stage and a microbatch"),
        ({"num_microbatches": 0}, "num_rows and num_microbatches must be >= 1, got 2 and 0; "
         "give every pipeline a stage and a microbatch"),
        ({"states": [[0]]}, "states must list each of the 2 stages, got 1; list one per stage"),
        ({"num_chunks": 2}, "num_chunks must be 1 for 1f1b, got 2; interleaved-1f1b is a schedule with several stages "
         "per row"),
        ({"kind": ScheduleKind.INTERLEAVED}, "num_chunks must be >= 2 for interleaved-1f1b, got 1; 1f1b is the "
         "schedule with one stage per row"),
        ({"kind": ScheduleKind.ZB_V, "num_chunks": 3}, "num_chunks must be 2 for zb-v, got 3; its way leads down the "
         "rows and back"),
        ({"max_in_flight": [3, 3]}, "max_in_flight must be None for all but eager-1f1b, got [3, 3] for 1f1b; "
         "the others keep as many microbatches in flight as their order needs"),
        ({"kind": ScheduleKind.EAGER, "max_in_flight": [3]}, "max_in_flight must be >= 1 for each of the 2 rows, got "
         "[3]; a row whose memory holds no microbatch cannot run"),
        ({"kind": ScheduleKind.EAGER, "max_in_flight": [3, 0]}, "max_in_flight must be >= 1 for each of the 2 rows, "
         "got [3, 0]; a row whose memory holds no microbatch cannot run"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        generate(**{"kind": ScheduleKind.ONE_F_ONE_B, "num_rows": 2, "num_microbatches": 4, **arguments})
