"""The kinds of schedules, and how many microbatches each keeps in flight."""

from __future__ import annotations

from enum import Enum

import numpy as np

from resilient.templates.common.arrays import Ints


class ScheduleKind(str, Enum):
    """The schedules there are, by the names that users give."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER = "eager-1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    FORWARD_ONLY = "forward-only"


SPLIT_KINDS = (ScheduleKind.ZB_H1, ScheduleKind.ZB_H2)
"""Those that run the halves of backwards apart, and put off what parameters need."""


def most_in_flight(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, per row, how many microbatches its memory must hold.

    1f1b and eager-1f1b may count more than there are; eager-1f1b keeps to what the memory holds beyond 1f1b's.

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
    if kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER):
        return tuple(range(num_rows, 0, -1))
    raise ValueError(f"kind must train with one stage per row, got {kind.value}; its memory is not counted here")


def chunks_in_flight(num_rows: int, num_chunks: int, num_microbatches: int) -> Ints:
    """Return how many microbatches of each chunk of each row interleaved 1F1B keeps in flight at most. [rows, chunks]

    A chunk's backward is ``(num_chunks - 1 - 2 chunk) * group`` places further in its order than its forward in the
    other, and the warm-up further away: so what is in flight are the chunk's forwards among so many in a row, of which
    each round has a group. Numbers of microbatches differ in the sizes of their groups alone, and from some number on
    these are ``num_rows`` and one more.

    Args:
        num_rows: Rows of the pipeline.
        num_chunks: Stages of each.
        num_microbatches: The most that it can get.
    """
    following, chunk = np.arange(num_rows)[::-1, None], np.arange(num_chunks)
    most = np.zeros((num_rows, num_chunks), dtype=np.int64)
    for number in range(1, min(num_microbatches, num_rows * (num_rows + 2)) + 1):
        rounds = max(1, number // num_rows)
        smallest, largest = number // rounds, -(-number // rounds)
        warmup = (num_chunks - 1) * largest + 2 * following
        later = num_chunks - 1 - 2 * chunk
        among = warmup + later * np.where(later > 0, largest, smallest) + 1
        full, rest = np.divmod(among, num_chunks * smallest)
        most = np.maximum(most, np.minimum(full * largest + np.minimum(rest, largest), number))
    return most
