"""Makes schedules of chains: GPipe, 1F1B, its eager and interleaved forms, zero-bubble orders, and forwards alone.

All of them but ZB-V are one pattern. A row runs its forwards and its backwards each in a fixed order, some forwards
first (the warm-up), then a forward and a backward in turn, then the backwards that are left. Where the backward is
split, the part for the weights follows the part for the inputs some microbatches later. The kinds differ in these two
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.schedules.graph import Backward, chain_graph
from resilient.templates.schedules.kind import SPLIT_KINDS, ScheduleKind, check_chunks, rows_of_stages
from resilient.templates.schedules.schedule import Op, Schedule
from resilient.templates.schedules.unit_delays import less_and_less


def generate(
    kind: ScheduleKind,
    num_rows: int,
    num_microbatches: int,
    *,
    states: Sequence[Sequence[int]] | None = None,
    num_chunks: int = 1,
    max_in_flight: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule of a pipeline for one step.

    - gpipe: all forwards, then all backwards.
    - 1f1b: as many forwards as rows follow, then one forward and one backward in turn; at most ``num_rows - row``
      microbatches are in flight.
    - eager-1f1b: 1F1B with up to twice the forwards first: it hides messages, and evens out microbatches of unequal
      length, for up to ``2 (num_rows - row) - 1`` microbatches in flight, no more beyond 1F1B's than in the row before.
    - interleaved-1f1b: ``num_chunks`` stages in each row, stage ``s`` in row ``s % num_rows``, in turn by groups of
      ``num_rows`` microbatches (the left-over ones join the first groups): the pipeline fills ``num_chunks`` times
      faster, for more messages and activations.
    - split-1f1b: 1F1B whose backward for the inputs goes on before the one for the weights, in the memory of 1F1B.
    - zb-h1: 1F1B whose backward for the weights comes ``row`` microbatches late; every row then holds what row 0 does
      in 1F1B, and a third of the bubble is left when all three parts take equally long.
    - zb-h2: twice the forwards first and twice as late; no bubble is left between a row's first and last action, for
      ``2 num_rows - 1`` microbatches in flight. With free messages the step is no shorter than zb-h1's: it ends with
      the last row.
    - interleaved-zb: interleaved as above, with half the forwards first and a backward for the weights that comes
      ``row`` places late: a ``num_chunks``-th of zb-h1's bubble, in its memory.
    - zb-v: two stages in each row, on the way down the rows and back up: half of zb-h1's bubble, in its memory.
    - forward-only: for evaluation.

    The REDUCE actions stand last in every row, in descending order of states, so all holders of states wait for the
    sums in the same order. The executor *starts* a state's sum as soon as its gradient is final.

    Args:
        kind: Which one.
        num_rows: Workers (device groups) of the pipeline.
        num_microbatches: The pipeline's share of the step.
        states: Per stage, the indices of the layer states it holds (the owners' indices, where layers share); without
            it, gradients are not summed.
        num_chunks: Stages per row: 2 or more where they are interleaved, 2 for zb-v.
        max_in_flight: Per row, for eager-1f1b, how many microbatches its memory holds, where that is fewer.

    Raises:
        ValueError: A number is out of its range, or does not belong to the kind.
    """
    _check(kind, num_rows, num_microbatches, num_chunks, max_in_flight)
    num_stages = num_rows * num_chunks
    if states is None:
        states = [()] * num_stages
    if len(states) != num_stages:
        raise ArgumentError("states", f"list each of the {num_stages} stages", len(states), "list one per stage")
    row_of = np.array(rows_of_stages(kind, num_rows, num_chunks))
    rounds = max(1, num_microbatches // num_rows)
    groups = np.array_split(np.arange(num_microbatches), rounds)
    chunk_order = np.concatenate([np.repeat(np.arange(num_chunks), len(group)) for group in groups])
    microbatch_order = np.concatenate([np.tile(group, num_chunks) for group in groups])
    allowed = _allowed(max_in_flight or [num_microbatches] * num_rows, num_microbatches)
    tables: list[NDArray[np.int32]] = []
    for row in range(num_rows):
        following = num_rows - 1 - row
        warmup = {
            ScheduleKind.GPIPE: num_microbatches,
            ScheduleKind.ONE_F_ONE_B: following,
            ScheduleKind.EAGER: min(2 * following, int(allowed[row]) - 1),
            ScheduleKind.INTERLEAVED: (num_chunks - 1) * len(groups[0]) + 2 * following,
            ScheduleKind.SPLIT: following,
            ScheduleKind.ZB_H1: following,
            ScheduleKind.ZB_H2: 2 * following,
            ScheduleKind.INTERLEAVED_ZB: (num_chunks - 1) * len(groups[0]) + following,
            ScheduleKind.ZB_V: 0,
            ScheduleKind.FORWARD_ONLY: num_microbatches,
        }[kind]
        lag = row * {ScheduleKind.SPLIT: 0, ScheduleKind.ZB_H2: 2}.get(kind, 1)
        forwards = _codes(Op.FORWARD, chunk_order * num_rows + row, microbatch_order)
        backwards = _codes(Op.BACKWARD, (num_chunks - 1 - chunk_order) * num_rows + row, microbatch_order)
        if kind is ScheduleKind.FORWARD_ONLY:
            computations = forwards
        elif kind is ScheduleKind.ZB_V:
            computations = there_and_back(row, num_rows, num_microbatches)
        else:
            computations = _in_turn(
                forwards, backwards, min(warmup, len(forwards)), lag if kind in SPLIT_KINDS else None
            )
        own = np.flatnonzero(row_of == row).tolist()
        held = {state: stage for stage in own[::-1] for state in states[stage]}
        order = sorted(held, reverse=True)
        reduces = _codes(Op.REDUCE, np.array([held[state] for state in order], int), np.array(order, int))
        tables.append(np.concatenate([_with_messages(computations, row_of), reduces]))
    backward = Backward.NONE if kind is ScheduleKind.FORWARD_ONLY else Backward.ALL
    graph = chain_graph(row_of.tolist(), num_rows, num_microbatches, backward)
    return Schedule(graph, np.concatenate(tables), tuple(np.cumsum([len(table) for table in tables]).tolist()))


def _allowed(max_in_flight: Sequence[int], num_microbatches: int) -> Ints:
    """Return what rows may keep in flight."""
    most = np.array(max_in_flight)
    most[most >= num_microbatches] = num_microbatches + len(most)  # memory for all is no limit
    return less_and_less(most, np.arange(len(most), 0, -1))


def _check(
    kind: ScheduleKind, num_rows: int, num_microbatches: int, num_chunks: int, max_in_flight: Sequence[int] | None
) -> None:
    if num_rows < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_rows and num_microbatches must be >= 1, got {num_rows} and {num_microbatches}; "
            f"give every pipeline a stage and a microbatch"
        )
    check_chunks(kind, num_chunks)
    if max_in_flight is not None and kind is not ScheduleKind.EAGER:
        raise ArgumentError(
            "max_in_flight",
            f"be None for all but {ScheduleKind.EAGER.value}",
            f"{list(max_in_flight)} for {kind.value}",
            "the others keep as many microbatches in flight as their order needs",
        )
    if max_in_flight is not None and (len(max_in_flight) != num_rows or min(max_in_flight) < 1):
        raise ArgumentError(
            "max_in_flight",
            f"be >= 1 for each of the {num_rows} rows",
            list(max_in_flight),
            "a row whose memory holds no microbatch cannot run",
        )


def _codes(op: Op, stages: Ints, indices: Ints) -> NDArray[np.int32]:
    codes = np.zeros((len(stages), 5), np.int32)
    codes[:, 0], codes[:, 1], codes[:, 2], codes[:, 4] = op, stages, indices, -1
    return codes


def _in_turn(
    forwards: NDArray[np.int32], backwards: NDArray[np.int32], warmup: int, weight_lag: int | None
) -> NDArray[np.int32]:
    """Return a row's computations: ``warmup`` forwards, then one of each in turn; split where there is a lag.

    Turn ``i`` is the forward ``i + warmup``, the backward ``i``, and the backward for the weights ``i - weight_lag``.
    """
    turns = np.arange(len(forwards))
    parts, keys = [forwards, backwards], [3 * (turns - warmup), 3 * turns + 1]
    if weight_lag is not None:
        inputs, weights = backwards.copy(), backwards.copy()
        inputs[:, 0], weights[:, 0] = Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
        parts, keys = [forwards, inputs, weights], [*keys, 3 * (turns + weight_lag) + 2]
    return np.concatenate(parts)[np.argsort(np.concatenate(keys))]


def there_and_back(row: int, num_rows: int, num_microbatches: int) -> NDArray[np.int32]:
    """Return a row's computations of ZB-V, in order, as codes of actions. [actions, 5]

    They fall into phases, in each of which some actions take turns: forwards of the stage on the way down; these and
    forwards of the one on the way up; whole microbatches of the latter; all of both; backwards for the inputs of both,
    then of the former with those for its weights; and what is left of these. Phases are those of a step that fills the
    pipeline, of which fewer microbatches leave actions out.

    Source: Zero Bubble Pipeline Parallelism (ICLR'24), section 6.
    """
    size, following = max(num_microbatches, 2 * num_rows - 1), num_rows - row
    down, up = row, 2 * num_rows - 1 - row
    phases = (
        ((Op.FORWARD, down), ((0, 2 * following - 1, 0), (1, row, 1), (3, size, 0))),
        ((Op.FORWARD, up), ((1, row, 0), (2, following, 0), (3, size, 3))),
        ((Op.BACKWARD_INPUT, up), ((2, following, 1), (3, size - num_rows, 4), (4, size, 1))),
        ((Op.BACKWARD_WEIGHT, up), ((2, following, 2), (3, size - num_rows, 5), (6, size, 0))),
        ((Op.BACKWARD_INPUT, down), ((3, size - num_rows, 1), (4, row, 0), (5, size, 0))),
        ((Op.BACKWARD_WEIGHT, down), ((3, size - num_rows, 2), (5, following, 1), (7, size, 0))),
    )
    turns = np.arange(size)
    codes: list[NDArray[np.int32]] = []
    keys: list[Ints] = []
    for (op, stage), parts in phases:
        phase = np.repeat([part[0] for part in parts], [part[1] for part in parts])[:size]
        turn = np.concatenate([np.arange(part[1]) for part in parts])[:size]
        place = np.repeat([part[2] for part in parts], [part[1] for part in parts])[:size]
        codes.append(_codes(op, np.full(size, stage), turns))
        keys.append((phase * size + turn) * len(phases) + place)
    table = np.concatenate(codes)[np.argsort(np.concatenate(keys))]
    return table[table[:, 2] < num_microbatches]


def _with_messages(computations: NDArray[np.int32], row_of: Ints) -> NDArray[np.int32]:
    """Put each receive right before the computation that needs it, each send right after the one it comes from."""
    op, stage = computations[:, 0], computations[:, 1]
    forward, backward = op == Op.FORWARD, (op == Op.BACKWARD) | (op == Op.BACKWARD_INPUT)
    crossed = np.concatenate([[False], np.diff(row_of) != 0, [False]])  # the border before each stage
    has_previous, has_next = crossed[stage], crossed[stage + 1]
    table = np.repeat(computations[:, None], 3, axis=1)  # of each computation: receive, itself, send
    table[:, 0, 0] = np.where(forward, Op.RECV_F, Op.RECV_B)
    table[:, 2, 0] = np.where(forward, Op.SEND_F, Op.SEND_B)
    kept = np.ones(table.shape[:2], dtype=bool)
    kept[:, 0] = (forward & has_previous) | (backward & has_next)
    kept[:, 2] = (forward & has_next) | (backward & has_previous)
    return table[kept]
