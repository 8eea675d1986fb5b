from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.validator import ScheduleError, validate


def changed(old: str, new: str, kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B) -> Schedule:
    """A schedule of two stages and two microbatches with one piece of its text replaced."""
    text = str(generate(kind, 2, 2, states=[[0, 2], [1]]))
    assert text.count(old) == 1
    return Schedule.parse(text.replace(old, new))


def test_swapped_forward_and_backward_are_shown_in_the_table() -> None:
    table = """\
1B0 must come after 1F0
time   0    1         2         3         4    5         6
row 0  0F0  0SEND_F0  0F1       0SEND_F1  .    .         0RECV_B0
row 1  .    .         1RECV_F0  [1B0]     1F0  1SEND_B0  1RECV_F1"""
    with pytest.raises(ScheduleError, match=f"^{re.escape(table)}$"):
        validate(changed("1F0 1B0", "1B0 1F0"))


def test_only_what_is_near_is_shown() -> None:
    text = str(generate(ScheduleKind.ONE_F_ONE_B, 1, 20)).replace("0F10 0B10", "0B10 0F10")
    table = """\
0B10 must come after 0F10
time   17   18   19   20      21    22    23
row 0  0B8  0F9  0B9  [0B10]  0F10  0F11  0B11"""
    with pytest.raises(ScheduleError, match=f"^{re.escape(table)}$"):
        validate(Schedule.parse(text))


@pytest.mark.parametrize(
    ("old", "new", "problem", "marked"),
    [
        ("1RECV_F0 ", "", "1F0 must come after 1RECV_F0", "[1F0]"),
        ("0RECV_B1 ", "", "0B1 must come after 0RECV_B1", "[0B1]"),
        ("0SEND_F1 ", "", "0SEND_F1 is missing", "[]"),
        (" 1SEND_B0", "", "1SEND_B0 is missing", "[]"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 must come after 0F0", "[0SEND_F0]"),
        ("0F1", "0F1 0F1", "0F1 stands twice", "[0F1]"),
        ("1SEND_B1", "1SEND_B1 1SEND_F1", "1SEND_F1 has no place in row 1", "[1SEND_F1]"),
        ("1F1", "0F1", "0F1 has no place in row 1", "[0F1]"),
        ("0B1 0REDUCE2", "0REDUCE2 0B1", "0REDUCE2 must come after 0B1", "[0REDUCE2]"),
        ("0REDUCE2 0REDUCE0", "0REDUCE0 0REDUCE2", "0REDUCE2 must come before state 0's", "[0REDUCE2]"),
        ("0F0 0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0F0 0SEND_F0",
         "1RECV_F0 comes when microbatch 1 was sent before it", "[1RECV_F0]"),
    ],
)  # fmt: skip
def test_broken_schedule_is_refused_and_the_action_marked(old: str, new: str, problem: str, marked: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(problem)}\n") as raised:
        validate(changed(old, new))
    assert marked in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (" 1W1 1REDUCE1", "", "1W1 is missing"),
        ("0I0 0W0", "0W0 0I0", "0W0 must come after 0I0"),
        ("1I0 1SEND_B0", "1SEND_B0 1I0", "1SEND_B0 must come after 1I0"),
        ("1F0 1I0", "1I0 1F0", "1I0 must come after 1F0"),
        ("0I0 0W0", "0B0 0W0", "0B0 has no place in row 0"),
        ("0I1 0W1", "0I1 0B1 0W1", "0B1 has no place in row 0"),
        ("0W1 0REDUCE2", "0REDUCE2 0W1", "0REDUCE2 must come after 0W1"),
    ],
)
def test_broken_split_backward_is_refused(old: str, new: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(problem)}\n"):
        validate(changed(old, new, ScheduleKind.ZB_H1))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0 1F0 1B0 0B0", None),
        ("1F0 0F0 1B0 0B0", "1F0 must come after 0F0"),
        ("0F0 1F0 0B0 1B0", "0B0 must come after 1B0"),
        ("0F0 1F0 1B0 0B0 1REDUCE3 0REDUCE2", None),
        ("0F0 1F0 1B0 0B0 1REDUCE3 0REDUCE3", "0REDUCE3 must come before state 3's"),
        ("0F0 1F0 1I0 0B0 1W0", None),
        ("0F0 1F0 0B0 1I0 1W0", "0B0 must come after 1I0"),
        ("0F0 0SEND_F0 1F0 1B0 0B0", "0SEND_F0 has no place in row 0"),
        ("1F0 1B0", "stage 0 is in no row"),
    ],
)
def test_stages_of_one_row_follow_each_other_without_messages(text: str, problem: str | None) -> None:
    if problem is None:
        validate(Schedule.parse(text))
    else:
        with pytest.raises(ScheduleError, match=f"^{re.escape(problem)}(\n|$)"):
            validate(Schedule.parse(text))


def test_deadlock_is_found_by_the_dry_run() -> None:
    # Stage 0 waits for a gradient that stage 1 can only compute from what stage 0 sends afterwards.
    broken = changed("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0")
    message = "deadlock: 0RECV_B0, 1RECV_F0 wait for messages that are never sent"
    with pytest.raises(ScheduleError, match=f"^{message}\n") as raised:
        validate(broken)
    assert str(raised.value).splitlines()[2:] == [
        "row 0  [0RECV_B0]  0F0  0SEND_F0  0F1         0SEND_F1  0B0  .",
        "row 1  .           .    .         [1RECV_F0]  1F0       1B0  1SEND_B0",
    ]


def test_more_microbatches_in_flight_than_fit_are_refused() -> None:
    schedule = generate(ScheduleKind.ZB_H1, 2, 4)
    validate(schedule, [2, 2])
    message = "row 1 must keep at most 1 microbatches in flight, got 2"
    with pytest.raises(ScheduleError, match=f"^{message}\n") as raised:
        validate(schedule, [2, 1])
    assert "[1F1]" in str(raised.value)


def test_evaluation_sums_no_gradients() -> None:
    with pytest.raises(ScheduleError, match=r"^0REDUCE0 has no place in row 0\n"):
        validate(Schedule.parse("0F0 0REDUCE0"))


@pytest.mark.parametrize("text", ["0F0 0B0 0F999999999", "0F0 0B0\n999999999F0"])
def test_what_no_chain_can_be_is_refused_at_once(text: str) -> None:
    message = (
        f"an action of a chain must have numbers below 3, as many as there are actions, got {text.split()[-1]}; number "
        f"stages and microbatches from 0"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        Schedule.parse(text)


def test_stage_that_nobody_runs_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"^stage 0 is in no row$"):
        validate(Schedule.parse(""))


@st.composite
def mutated(draw: st.DrawFn) -> Schedule:
    """A schedule of any kind with a few actions moved, doubled, left out or made others."""
    kind = draw(st.sampled_from(ScheduleKind))
    chunks = chunks_of(kind, 2)
    made = generate(kind, draw(st.integers(1, 3)), draw(st.integers(1, 4)), num_chunks=chunks)
    rows, graph = [list(row) for row in made.rows], made.graph
    stages, cells = st.integers(0, graph.num_stages - 1), st.integers(0, graph.num_cells - 1)
    for _ in range(draw(st.integers(1, 3))):
        row, target = draw(st.sampled_from(rows)), draw(st.sampled_from(rows))
        if not row:
            continue
        position, place = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(target)))
        change = draw(st.sampled_from(["move", "swap", "double", "leave out", "other"]))
        if change == "swap":
            row[position], row[place % len(row)] = row[place % len(row)], row[position]
        elif change == "double":
            target.insert(place, row[position])
        elif change == "other":
            row[position] = Action(draw(stages), draw(st.sampled_from(Op)), draw(cells))
        else:
            action = row.pop(position)
            if change == "move":
                target.insert(min(place, len(target)), action)
    return Schedule.of(rows, graph)


@settings(max_examples=150)
@given(mutated())
def test_what_is_not_refused_runs_to_its_end_and_what_is_is_marked(schedule: Schedule) -> None:
    refusal = None
    try:
        validate(schedule)
    except ScheduleError as error:
        refusal = str(error)
    if refusal is not None:
        assert re.search(r"\[\w*\]", refusal)
        return
    timeline = simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1, transfer_ms=1))
    assert (timeline.end_ns >= timeline.start_ns).all()
    assert timeline.peak_bytes == (0,) * len(schedule.rows)
    computed = [action for row in schedule.rows for action in row if action.op.computes]
    trains = Backward.ALL in schedule.graph.lanes[0].backwards
    num_passes = schedule.graph.num_stages * schedule.graph.num_cells
    assert sum(action.op is not Op.BACKWARD_WEIGHT for action in computed) == (1 + trains) * num_passes
