"""The table of actions around one of them."""

from __future__ import annotations

from resilient.templates.schedules.action_table import action_table
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from resilient.templates.schedules.schedule import Action, Schedule


def table(schedule: Schedule, row: int, action: str) -> str:
    return action_table(schedule, [(row, schedule.rows[row].index(Action.parse(action)))])


def test_rows_and_time_around_an_action() -> None:
    schedule = generate(ScheduleKind.ONE_F_ONE_B, 2, 3)
    assert table(schedule, 1, "1B0").splitlines() == [
        "time   1         2         3         4      5         6         7",
        "row 0  0SEND_F0  0F1       0SEND_F1  .      .         0RECV_B0  0B0",
        "row 1  .         1RECV_F0  1F0       [1B0]  1SEND_B0  1RECV_F1  1F1",
    ]


def test_table_of_a_long_pipeline_shows_the_rows_nearby() -> None:
    schedule = generate(ScheduleKind.GPIPE, 32, 8)
    lines = table(schedule, 20, "20F7").splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["time", *(f"row {row}" for row in range(16, 25))]
    assert max(map(len, lines)) < 120


def test_every_action_has_a_place_whatever_the_kind() -> None:
    for kind in ScheduleKind:
        chunks = chunks_of(kind, 2)
        schedule = generate(kind, 3, 4, num_chunks=chunks, states=[[stage] for stage in range(3 * chunks)])
        for row, actions in enumerate(schedule.rows):
            for action in actions:
                assert table(schedule, row, str(action)).count(f"[{action}]") == 1
