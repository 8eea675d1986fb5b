from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    forward_only,
    one_f_one_b,
    validate,
)

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


def test_1f1b_of_four_stages_and_eight_microbatches_as_text():
    golden = "\n".join(" ".join(block.split()) for block in FOUR_STAGES_EIGHT_MICROBATCHES.split("\n\n"))
    assert str(one_f_one_b(4, 8, STATES)) == golden


def test_forward_only_as_text():
    assert str(forward_only(2, 2)) == "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1"


counts = st.integers(1, 7)


@given(counts, counts)
def test_generated_schedules_are_valid_and_read_back(num_stages: int, num_microbatches: int):
    for schedule in (
        one_f_one_b(num_stages, num_microbatches, [[stage, 9] for stage in range(num_stages)]),
        forward_only(num_stages, num_microbatches),
    ):
        validate(schedule)
        assert Schedule.parse(str(schedule)) == schedule


@given(counts, counts)
def test_1f1b_keeps_at_most_as_many_microbatches_as_stages_follow(num_stages: int, num_microbatches: int):
    schedule = one_f_one_b(num_stages, num_microbatches, [[]] * num_stages)
    for stage, actions in enumerate(schedule.stages):
        in_flight, most = 0, 0
        for action in actions:
            in_flight += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            most = max(most, in_flight)
        assert most == min(num_stages - stage, num_microbatches)


@pytest.mark.parametrize("text", ["2F0", "1SEND_F0", "1RECV_F12", "10B3", "3SEND_B1", "0RECV_B1", "0REDUCE3"])
def test_action_prints_as_it_is_read(text: str):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 "])
def test_text_that_is_no_action_is_refused(text: str):
    message = f"an action must be stage, op, index as in '2F0' or '1SEND_F0', got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Action.parse(text)


def changed(old: str, new: str) -> Schedule:
    """1F1B of two stages and two microbatches with one piece of its text replaced."""
    text = str(one_f_one_b(2, 2, [[0], [1]]))
    assert text.count(old) == 1
    return Schedule.parse(text.replace(old, new))


def test_swapped_forward_and_backward_are_shown_in_the_table():
    table = """\
1B0 must come after 1F0
   stage 0     stage 1
0   0F0         1RECV_F0
1   0SEND_F0   >1B0<
2   0F1         1F0
3   0SEND_F1    1SEND_B0
4   0RECV_B0    1RECV_F1
5   0B0         1F1
6   0RECV_B1    1B1
7   0B1         1SEND_B1
8   0REDUCE0    1REDUCE1"""
    with pytest.raises(ScheduleError, match=f"^{re.escape(table)}$"):
        validate(changed("1F0 1B0", "1B0 1F0"))


@pytest.mark.parametrize(
    ("old", "new", "problem", "marked"),
    [
        ("1RECV_F0 ", "", "1F0 must come after 1RECV_F0", ">1F0<"),
        ("0RECV_B1 ", "", "0B1 must come after 0RECV_B1", ">0B1<"),
        ("0SEND_F1 ", "", "0SEND_F1 is missing", "><"),
        (" 1SEND_B0", "", "1SEND_B0 is missing", "><"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 must come after 0F0", ">0SEND_F0<"),
        ("0F1", "0F1 0F1", "0F1 stands twice", ">0F1<"),
        ("1SEND_B1", "1SEND_B1 1SEND_F1", "1SEND_F1 has no place in stage 1", ">1SEND_F1<"),
        ("1F1", "0F1", "0F1 has no place in stage 1", ">0F1<"),
        ("0B1 0REDUCE0", "0REDUCE0 0B1", "0REDUCE0 must come after 0B1", ">0REDUCE0<"),
        ("0F0 0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0F0 0SEND_F0",
         "1RECV_F0 comes when microbatch 1 was sent before it", ">1RECV_F0<"),
    ],
)  # fmt: skip
def test_broken_schedule_is_refused_and_the_action_marked(old: str, new: str, problem: str, marked: str):
    with pytest.raises(ScheduleError, match=f"^{re.escape(problem)}\n") as raised:
        validate(changed(old, new))
    assert marked in str(raised.value)


def test_deadlock_is_found_by_the_dry_run():
    # Stage 0 waits for a gradient that stage 1 can only compute from what stage 0 sends afterwards.
    broken = changed("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0")
    message = "deadlock: 0RECV_B0, 1RECV_F0 wait for messages that are never sent"
    with pytest.raises(ScheduleError, match=f"^{message}\n") as raised:
        validate(broken)
    assert re.search(r"0  >0RECV_B0<  >1RECV_F0<", str(raised.value))


def test_evaluation_sums_no_gradients():
    with pytest.raises(ScheduleError, match=r"^0REDUCE0 has no place in stage 0\n"):
        validate(Schedule.parse("0F0 0REDUCE0"))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0)])
def test_empty_schedules_are_refused(num_stages: int, num_microbatches: int):
    with pytest.raises(ValueError, match=r"^num_stages and num_microbatches must be >= 1, got"):
        one_f_one_b(num_stages, num_microbatches, [[]] * num_stages)
    with pytest.raises(ValueError, match=r"^num_stages and num_microbatches must be >= 1, got"):
        forward_only(num_stages, num_microbatches)


def test_states_must_be_given_for_every_stage():
    with pytest.raises(ValueError, match=r"^states must list each of the 2 stages, got 1; list one per stage$"):
        one_f_one_b(2, 2, [[0]])
