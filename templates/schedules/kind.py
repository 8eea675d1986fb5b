"""The kinds of schedules, and how many microbatches each keeps in flight."""

from __future__ import annotations

from enum import Enum

from resilient.errors import ArgumentError


class ScheduleKind(str, Enum):
    """The schedules there are, by the names that users give."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER = "eager-1f1b"
    INTERLEAVED = "interleaved-1f1b"
    SPLIT = "split-1f1b"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    INTERLEAVED_ZB = "interleaved-zb"
    ZB_V = "zb-v"
    FORWARD_ONLY = "forward-only"


SPLIT_KINDS = (
    ScheduleKind.SPLIT,
    ScheduleKind.ZB_H1,
    ScheduleKind.ZB_H2,
    ScheduleKind.INTERLEAVED_ZB,
    ScheduleKind.ZB_V,
)
"""Those that run the halves of backwards apart, and put off what parameters need."""

INTERLEAVED_KINDS = (ScheduleKind.INTERLEAVED, ScheduleKind.INTERLEAVED_ZB)
"""Those with any number of stages in each row."""

CHUNK_KINDS = (*INTERLEAVED_KINDS, ScheduleKind.ZB_V)
"""Those with several stages in each row."""

LATER_KINDS = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER, ScheduleKind.SPLIT)
"""Those that keep as many microbatches in flight as there are rows from each one on."""


def check_chunks(kind: ScheduleKind, num_chunks: int) -> None:
    """Check that rows of a kind can have so many stages.

    Raises:
        ArgumentError: They cannot.
    """
    if kind is ScheduleKind.ZB_V:
        fits, constraint, fix = num_chunks == 2, f"be 2 for {kind.value}", "its way leads down the rows and back"
    elif kind in CHUNK_KINDS:
        fits, constraint = num_chunks >= 2, f"be >= 2 for {kind.value}"
        fix = f"{ScheduleKind.ONE_F_ONE_B.value} is the schedule with one stage per row"
    else:
        fits, constraint = num_chunks == 1, f"be 1 for {kind.value}"
        fix = f"{ScheduleKind.INTERLEAVED.value} is a schedule with several stages per row"
    if not fits:
        raise ArgumentError("num_chunks", constraint, num_chunks, fix)


def chunks_of(kind: ScheduleKind, several: int) -> int:
    """Return the stages of each row of a kind, where it is ``several`` for those that can have any number."""
    if kind is ScheduleKind.ZB_V:
        return 2
    return several if kind in CHUNK_KINDS else 1


def rows_of_stages(kind: ScheduleKind, num_rows: int, num_chunks: int) -> tuple[int, ...]:
    """Return the row of each stage: down the rows, chunk after chunk; under zb-v down and back up."""
    down = tuple(range(num_rows))
    return down + down[::-1] if kind is ScheduleKind.ZB_V and num_chunks == 2 else down * num_chunks


def most_in_flight(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, per row, how many microbatches its memory must hold.

    1f1b, split-1f1b and eager-1f1b may count more than there are; eager-1f1b keeps to what the memory holds beyond
    1f1b's.

    Args:
        kind: One that trains, with one stage per row.
        num_rows: Rows of the pipeline.
        num_microbatches: The most that it can get.

    Raises:
        ValueError: The kind is another.
    """
    each = {ScheduleKind.GPIPE: num_microbatches, ScheduleKind.ZB_H1: num_rows, ScheduleKind.ZB_H2: 2 * num_rows - 1}
    if kind in each:
        return (min(each[kind], num_microbatches),) * num_rows
    if kind in LATER_KINDS:
        return tuple(range(num_rows, 0, -1))
    raise ValueError(f"kind must train with one stage per row, got {kind.value}; its memory is not counted here")


def most_deferred(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, per row, of how many microbatches gradients wait at most, between the parts of a split backward.

    Those of one where a backward for weights follows its other half.

    Args:
        kind: One that trains, with one stage per row.
        num_rows: Rows of the pipeline.
        num_microbatches: The most that it can get.
    """
    each = {
        ScheduleKind.SPLIT: lambda row: 1,
        ScheduleKind.ZB_H1: lambda row: row + 1,
        ScheduleKind.ZB_H2: lambda row: 2 * row + 1,
    }.get(kind, lambda row: 0)
    return tuple(min(each(row), num_microbatches) for row in range(num_rows))
