"""Shows what the rows of a pipeline do around some actions, for messages about what went wrong there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resilient.templates.schedules.schedule import Op, Schedule

_COLUMNS_BESIDE = 3
_ROWS_BESIDE = 4
_GAP = -1
_Message = tuple[int, int, int, int, int]


def action_table(schedule: Schedule, marked: Sequence[tuple[int, int]]) -> str:
    """Return the actions around some as a table: rows downwards, time to the right, these in brackets.

    Time is counted in actions, each as long as every other: it shows what comes after what, not how long it takes.

    Args:
        schedule: Of the whole pipeline; what waits in it for ever is shown as if it had gone on.
        marked: Rows and positions in them, at most one behind their last actions.
    """
    times = _times(schedule)
    columns = _around((times[row][position] for row, position in marked), _COLUMNS_BESIDE)
    lines = [["time", *("..." if time == _GAP else str(time) for time in columns)]]
    for row in _around((row for row, _ in marked), _ROWS_BESIDE, len(times)):
        if row == _GAP:
            lines.append(["...", *([""] * len(columns))])
            continue
        texts = {time: str(action) for time, action in zip(times[row], schedule.rows[row], strict=False)}
        here = {times[row][position] for at, position in marked if at == row}
        cells = (f"[{texts.get(time, '')}]" if time in here else texts.get(time, ".") for time in columns)
        lines.append([f"row {row}", *("" if time == _GAP else cell for time, cell in zip(columns, cells, strict=True))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _around(middles: Iterable[int], beside: int, end: int | None = None) -> list[int]:
    """Return the numbers near some, ascending, with gaps between those that are not neighbours."""
    near = {each for middle in middles for each in range(max(0, middle - beside), middle + beside + 1)}
    found: list[int] = []
    for each in sorted(near):
        if end is None or each < end:
            found += [_GAP, each] if found and each != found[-1] + 1 else [each]
    return found


def _times(schedule: Schedule) -> list[list[int]]:
    """Return, per row, when its actions come, each after the one before it and, receives, after the send; and its end.

    Where all rows wait, the first one goes on.
    """
    codes, starts = schedule.codes.tolist(), (0, *schedule.ends)
    times: list[list[int]] = [[] for _ in schedule.ends]
    sent_at: dict[_Message, int] = {}
    stuck = False
    while any(len(found) <= end - start for found, start, end in zip(times, starts, schedule.ends, strict=False)):
        progress = False
        for found, start, end in zip(times, starts, schedule.ends, strict=False):
            while len(found) <= end - start:
                begin = found[-1] + 1 if found else 0
                code = codes[start + len(found)] if start + len(found) < end else None
                if code is not None and code[0] in (Op.RECV_F, Op.RECV_B):
                    sent = sent_at.get(_message(code))
                    if sent is None and not stuck:
                        break
                    begin = max(begin, -1 if sent is None else sent + 1)
                elif code is not None and code[0] in (Op.SEND_F, Op.SEND_B):
                    sent_at[_message(code)] = begin
                found.append(begin)
                progress, stuck = True, False
        stuck = not progress
    return times


def _message(code: Sequence[int]) -> _Message:
    """Return what a send and its receipt have in common: the way, and the stage, cell and part, or the flow."""
    op, stage, index, part, flow = code
    back = int(op in (Op.SEND_B, Op.RECV_B))
    if flow >= 0:
        return back, 0, 0, 0, flow
    there = {Op.SEND_F: 1, Op.SEND_B: -1}.get(Op(op), 0)
    return back, stage + there, index, part, flow
