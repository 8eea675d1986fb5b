"""Orders are those of torch.distributed.pipelining, as its schedules show them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind

SINGLE = {ScheduleKind.GPIPE: ScheduleGPipe, ScheduleKind.ONE_F_ONE_B: Schedule1F1B}
SEVERAL = {
    ScheduleKind.INTERLEAVED: ScheduleInterleaved1F1B,
    ScheduleKind.ZB_H1: ScheduleInterleavedZeroBubble,
    ScheduleKind.INTERLEAVED_ZB: ScheduleInterleavedZeroBubble,
    ScheduleKind.ZB_V: ScheduleZBVZeroBubble,
}


def stage(index: int, num_rows: int, num_stages: int) -> Any:
    """As much of a stage as orders depend on; a real one wants a process group."""
    return SimpleNamespace(
        stage_index=index, num_stages=num_stages, group_size=num_rows, group_rank=index % num_rows,
        is_first=index == 0, is_last=index == num_stages - 1, has_backward=True, submod=nn.Identity(),
    )  # fmt: skip


def theirs(schedule: Any) -> list[list[str]]:
    return [
        [str(action) for action in row if action is not None and "REDUCE" not in str(action)]
        for _, row in sorted(schedule.pipeline_order.items())
    ]


def ours(kind: ScheduleKind, num_rows: int, num_microbatches: int, num_chunks: int = 1) -> list[list[str]]:
    schedule = generate(kind, num_rows, num_microbatches, num_chunks=num_chunks)
    return [[str(action) for action in row if action.op.computes] for row in schedule.rows]


@pytest.mark.parametrize("kind", SINGLE)
@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(1, 3), (2, 5), (4, 4), (4, 9)])
def test_orders_of_one_stage_per_row(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> None:
    expected = theirs(SINGLE[kind](stage(0, num_rows, num_rows), num_microbatches))
    own = ours(kind, num_rows, num_microbatches)
    assert own[:-1] == expected[:-1]
    # what torch shows of its 1F1B counts the last row's forwards from 1, which is not what it runs
    last = [text for text in expected[-1] if kind is ScheduleKind.GPIPE or "B" in text]
    assert [text for text in own[-1] if text in last] == last


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_microbatches", "num_chunks"),
    [
        (ScheduleKind.INTERLEAVED, 2, 4, 2),
        (ScheduleKind.INTERLEAVED, 4, 8, 3),
        (ScheduleKind.INTERLEAVED, 4, 10, 2),
        (ScheduleKind.INTERLEAVED, 4, 3, 2),
        (ScheduleKind.ZB_H1, 2, 4, 1),
        (ScheduleKind.ZB_H1, 4, 10, 1),
        (ScheduleKind.INTERLEAVED_ZB, 2, 4, 2),
        (ScheduleKind.INTERLEAVED_ZB, 4, 8, 3),
        (ScheduleKind.INTERLEAVED_ZB, 4, 10, 2),
        (ScheduleKind.INTERLEAVED_ZB, 4, 3, 2),
        (ScheduleKind.ZB_V, 1, 3, 2),
        (ScheduleKind.ZB_V, 2, 1, 2),
        (ScheduleKind.ZB_V, 2, 4, 2),
        (ScheduleKind.ZB_V, 4, 3, 2),
        (ScheduleKind.ZB_V, 4, 16, 2),
    ],
)
def test_orders_of_interleaved_and_split_schedules(
    kind: ScheduleKind, num_rows: int, num_microbatches: int, num_chunks: int
) -> None:
    num_stages = num_rows * num_chunks
    stages = [stage(index, num_rows, num_stages) for index in range(0, num_stages, num_rows)]
    assert ours(kind, num_rows, num_microbatches, num_chunks) == theirs(SEVERAL[kind](stages, num_microbatches))
