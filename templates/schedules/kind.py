"""The kinds of schedules, and how many microbatches each keeps in flight."""

from __future__ import annotations

from enum import Enum

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints


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


def most_deferred(kind: ScheduleKind, num_rows: int, num_chunks: int, num_microbatches: int) -> Ints:
    """Return of how many microbatches gradients wait at most, between the parts of a split backward. [rows, chunks]

    Those of one where a backward for weights follows its other half. Of several stages in a row not all have theirs at
    the same time.

    Args:
        kind: One that trains.
        num_rows: Rows of the pipeline.
        num_chunks: Stages of each.
        num_microbatches: The most that it can get.
    """
    row, chunk = np.arange(num_rows)[:, None], np.arange(num_chunks)
    most = {
        ScheduleKind.SPLIT: 1,
        ScheduleKind.ZB_H1: row + 1,
        ScheduleKind.ZB_H2: 2 * row + 1,
        ScheduleKind.INTERLEAVED_ZB: row + 1,
        ScheduleKind.ZB_V: np.maximum(1, row + 1 - chunk),
    }.get(kind, 0)
    return np.broadcast_to(np.minimum(most, num_microbatches), (num_rows, num_chunks))


def chunks_in_flight(kind: ScheduleKind, num_rows: int, num_chunks: int, num_microbatches: int) -> Ints:
    """Return how many microbatches of each chunk of each row are in flight at most. [rows, chunks]

    Under zb-v the first chunk's first backward ends after ``2 rows - row`` of its forwards, the second one's after
    ``row + 1``; then there is one of each in turn.

    Of the interleaved kinds a chunk's backward is ``(num_chunks - 1 - 2 chunk) * group`` places further in its order
    than its forward in the other, and the warm-up and what weights are put off further away: so what is in flight are
    the chunk's forwards among so many in a row, of which each round has a group. Numbers of microbatches differ in the
    sizes of their groups alone, and from some number on these are ``num_rows`` and one more.

    Args:
        kind: One of ``CHUNK_KINDS``.
        num_rows: Rows of the pipeline.
        num_chunks: Stages of each.
        num_microbatches: The most that it can get.
    """
    row, chunk = np.arange(num_rows)[:, None], np.arange(num_chunks)
    if num_chunks == 1:
        return np.minimum(num_rows - row, num_microbatches)
    if kind is ScheduleKind.ZB_V:
        return np.minimum(np.where(chunk == 0, 2 * num_rows - row, row + 1), num_microbatches)
    further = 2 * (num_rows - 1 - row) if kind is ScheduleKind.INTERLEAVED else np.full_like(row, num_rows - 1)
    numbers = np.arange(1, min(num_microbatches, num_rows * (num_rows + 2)) + 1)
    rounds = np.maximum(1, numbers // num_rows)
    groups = np.stack([numbers // rounds, -(-numbers // rounds)])  # the smallest and the largest
    last = np.append((np.diff(groups) != 0).any(axis=0), True)  # of equal ones the greatest number has the most
    smallest, largest, number = (each[last][:, None, None] for each in (*groups, numbers))
    warmup = (num_chunks - 1) * largest + further
    later = num_chunks - 1 - 2 * chunk
    among = warmup + later * np.where(later > 0, largest, smallest) + 1
    full, rest = np.divmod(among, num_chunks * smallest)
    return np.minimum(full * largest + np.minimum(rest, largest), number).max(axis=0)
