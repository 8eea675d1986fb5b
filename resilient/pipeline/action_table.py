"""Shows what the rows of a pipeline do around one action, for messages about what went wrong there."""

from __future__ import annotations

from resilient.templates.schedules.schedule import Action, Op, Schedule

_COLUMNS_BESIDE = 3
_ROWS_BESIDE = 4

_SEND_OF = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, 1)}
"""A receive -> the send that it waits for, and how far from its own that stage is."""


def action_table(schedule: Schedule, row: int, action: Action) -> str:
    """Return the actions around one as a table: rows downwards, time to the right, that one in brackets.

    Time is counted in actions, each as long as every other: it shows what comes after what, not how long it takes.

    Args:
        schedule: A valid schedule of the whole pipeline.
        row: The row of the action.
        action: One of that row.
    """
    times = _times(schedule)
    middle = times[row][schedule.rows[row].index(action)]
    columns = range(max(0, middle - _COLUMNS_BESIDE), middle + _COLUMNS_BESIDE + 1)
    lines = [["time", *map(str, columns)]]
    for shown in range(max(0, row - _ROWS_BESIDE), min(len(times), row + _ROWS_BESIDE + 1)):
        at = dict(zip(times[shown], schedule.rows[shown], strict=True))
        cells = [str(at.get(time, ".")) for time in columns]
        if shown == row:
            cells[middle - columns.start] = f"[{action}]"
        lines.append([f"row {shown}", *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _times(schedule: Schedule) -> list[list[int]]:
    """Return, per row, when each of its actions comes: after the one before it and, receives, after the send."""
    times: list[list[int]] = [[] for _ in schedule.rows]
    sent_at: dict[Action, int] = {}
    progress = True
    while progress:
        progress = False
        for actions, found in zip(schedule.rows, times, strict=True):
            for action in actions[len(found) :]:
                begin = found[-1] + 1 if found else 0
                if action.op in _SEND_OF:
                    op, away = _SEND_OF[action.op]
                    send = Action(action.stage + away, op, action.index)
                    if send not in sent_at:
                        break
                    begin = max(begin, sent_at[send] + 1)
                found.append(begin)
                sent_at[action] = begin
                progress = True
    return times
