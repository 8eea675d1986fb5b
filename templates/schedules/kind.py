"""The kinds of schedules, and how many microbatches each keeps in flight."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

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


class Held(NamedTuple):
    """Microbatches that a row holds at a moment.

    Args:
        before: Those in flight whose backward, or the first part of it where it is split, is not over; with the one
            that is differentiated.
        waiting: Those between the two parts of a split backward.
    """

    before: int
    waiting: int


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


def held_counts(kind: ScheduleKind, num_rows: int, row: int, num_microbatches: int) -> tuple[Held, ...]:
    """Return what a row's memory must hold: its counts at the moments at one of which it holds most.

    1f1b, split-1f1b and eager-1f1b may count more microbatches than there are; eager-1f1b keeps to what the memory
    holds beyond 1f1b's.

    Args:
        kind: One that trains, with one stage per row.
        num_rows: Rows of the pipeline.
        row: One of them.
        num_microbatches: The most that it can get.

    Raises:
        ValueError: The kind is another.
    """
    following = num_rows - row
    if kind is ScheduleKind.GPIPE:
        return (Held(num_microbatches, 0),)
    if kind in LATER_KINDS:
        return (Held(following, 0),)
    most = {ScheduleKind.ZB_H1: Held(following, row), ScheduleKind.ZB_H2: Held(2 * following - 1, 2 * row)}.get(kind)
    if most is None:
        raise ValueError(f"kind must train with one stage per row, got {kind.value}; its memory is not counted here")
    before, waiting = min(most.before, num_microbatches), min(most.waiting, num_microbatches - 1)
    moments = (
        Held(before, min(waiting, num_microbatches - before)),
        Held(min(before, num_microbatches - waiting), waiting),
    )
    return moments[:1] if moments[0] == moments[1] else moments
