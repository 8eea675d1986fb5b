from __future__ import annotations

import re

import pytest

from resilient.templates.schedules.graph import Backward, chain_graph
from resilient.templates.schedules.schedule import Action, Op, Schedule

TWO_ROWS = "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE1 0REDUCE0\n1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE0"


@pytest.mark.parametrize(
    "text", ["2F0", "1SEND_F0", "1RECV_F12", "10B3", "3SEND_B1", "0RECV_B1", "0REDUCE3", "4I1", "4W1"]
)
def test_action_prints_as_it_is_read(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "٢F0", "0F9999999999"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    message = (
        f"an action must be stage, op, index as in '2F0' or '1SEND_F0', of units as in 'llm.0:2B7.1' or "
        f"'vision.0:1SEND_F3.1>llm.0:7', got {text!r}; ops are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Action.parse(text)


def test_schedule_prints_as_it_is_read() -> None:
    schedule = Schedule.parse(TWO_ROWS)
    assert str(schedule) == TWO_ROWS
    assert schedule.rows[1][2] == Action(1, Op.BACKWARD_INPUT, 0)
    assert [op for op in Op if op.computes] == [action.op for action in Schedule.parse("0F0 0B0 0I0 0W0").rows[0]]


def test_schedules_are_equal_when_their_rows_are() -> None:
    schedule = Schedule.parse(TWO_ROWS)
    assert schedule == Schedule.of(schedule.rows)
    assert hash(schedule) == hash(Schedule.of(schedule.rows))
    assert schedule != Schedule.parse(TWO_ROWS.replace("1W0", "1W1"))
    assert schedule != Schedule.parse(TWO_ROWS.replace("\n", " ")), "the same actions in one row"


def test_schedule_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match=r"^assignment destination is read-only$"):
        Schedule.parse(TWO_ROWS).codes[0] = 1


def test_stages_are_found_in_their_rows() -> None:
    graph = Schedule.parse("0F0 2F0\n1F0 3F0 4F1 3REDUCE7").graph
    assert graph == chain_graph([0, 1, 0, 1, 1], 2, 2, Backward.NONE), "a state's index is no microbatch's"
    assert Schedule.parse("1F0\n0F0 1B0").graph == chain_graph([1, 0], 2, 1), "rows are those of the first actions"
    assert Schedule.parse("1F0 1B0").graph.row_of == (-1, 0)
