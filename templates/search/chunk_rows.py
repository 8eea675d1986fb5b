"""Rows that chunks are cut for: whether their memory holds stages, and how much all of them can take at most.

Import it where it is needed: it loads numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.search.stage_cost_model import UNLIMITED, SingleDeviceCosts

NO_TIME = 1 << 62
"""More than any time."""


class StageTables(NamedTuple):
    """What stages take, by their layers.

    Args:
        stages: Bytes of layers i .. j - 1, as the costs have them: what is there once, of each microbatch before its
            backward or the first part of it is over, of each that waits between the parts, and what is used besides;
            with checkpoints of each of these, and besides. [L, L + 1, 7]
        least: The least bytes of so many layers, or more. [1, L + 1, 7]
        most_work: The most work of so many layers, in nanoseconds. [L + 1]
        part: How much of a stage's time with checkpoints is work, at most.
    """

    stages: Ints
    least: Ints
    most_work: Ints
    part: float


class Room(NamedTuple):
    """The rows that chunks are cut for.

    Args:
        tables: What their stages take.
        source: Where messages before the rows' stages come from, as the first dimension of the costs' ``send``.
            [chunks, rows]
        moments: At each moment the microbatches of the last of the chunks before and between the parts of their
            backward, the same of the first one of two, and bytes of the rows' other stages with activations kept and
            with checkpoints. [rows, moments, 6]
        others: What these take: time with activations kept and with checkpoints, in nanoseconds, and the bytes that one
            of them uses besides with both. [rows, 4]
        time: Most nanoseconds of a row.
        memory: Most bytes of a row.
        first_end: Where the first row's stage of the first chunk ends at the latest.
    """

    tables: StageTables
    source: Ints
    moments: Ints
    others: Ints
    time: int
    memory: int
    first_end: int


def stage_tables(costs: SingleDeviceCosts) -> StageTables:
    """Return what stages take.

    Args:
        costs: Of layers.
    """
    plain = (costs.held, costs.kept, costs.waiting, costs.workspace)
    stages = np.stack([*plain, costs.inputs, costs.waiting_inputs, costs.largest], axis=-1)
    num_layers = len(stages)
    least = np.zeros((num_layers + 1, stages.shape[-1]), dtype=np.int64)
    most_work = np.zeros(num_layers + 1, dtype=np.int64)
    for number in range(1, num_layers + 1):
        first = np.arange(num_layers + 1 - number)
        least[number] = stages[first, first + number].min(axis=0)
        most_work[number] = (costs.work[first + number] - costs.work[first]).max()
    least[1:] = np.minimum.accumulate(least[:0:-1], axis=0)[::-1]
    work, again = np.diff(costs.work), np.diff(costs.work + costs.forward)
    part = float((work[again > 0] / again[again > 0]).max(initial=0.0))
    all_run_again = bool((costs.next_backward == np.arange(num_layers)).all())
    return StageTables(stages, least[None], most_work, part if all_run_again else 1.0)


@compiled
def times_of_layers(costs: SingleDeviceCosts, source: int, i: int, j: int) -> tuple[int, int]:
    """Return time with activations kept and with checkpoints, of layers ``i .. j - 1``.

    Args:
        costs: Of layers.
        source: Where the stage's messages come from, as the first dimension of the costs' ``send``.
        i: First layer.
        j: One past the last one.
    """
    plain = costs.work[j] - costs.work[i] + costs.send[source, i]
    return plain, plain + (costs.forward[j] - costs.forward[i] if costs.next_backward[i] < j else 0)


@compiled
def row_fits(
    stages: Ints,
    moments: Ints,
    others: Ints,
    row: int,
    first: int,
    end: int,
    i: int,
    j: int,
    memory: int,
) -> int:
    """Return 0 if a row's memory holds two stages beside others with activations kept, 1 with checkpoints, else -1.

    Args:
        stages: Bytes of stages, as of :class:`StageTables`.
        moments: As of :class:`Room`, as are ``others`` and ``memory``.
        row: It.
        first: First layer of the stage that is begun with.
        end: One past its last one; ``first`` where there is none.
        i: First layer of the other stage.
        j: One past its last one.
    """
    # numbers, and no views: what a call takes counts here
    held, kept, waiting = stages[i, j, 0], stages[i, j, 1], stages[i, j, 2]
    inputs, inputs_waiting = stages[i, j, 4], stages[i, j, 5]
    used, largest = max(others[row, 2], stages[i, j, 3]), max(others[row, 3], stages[i, j, 6])
    kept_begun = waiting_begun = inputs_begun = inputs_waiting_begun = 0
    if first < end:
        held += stages[first, end, 0]
        used, largest = max(used, stages[first, end, 3]), max(largest, stages[first, end, 6])
        kept_begun, waiting_begun = stages[first, end, 1], stages[first, end, 2]
        inputs_begun, inputs_waiting_begun = stages[first, end, 4], stages[first, end, 5]
    left = memory - held - used
    fits = left >= 0
    for at in range(moments.shape[1] if fits else 0):
        moving = moments[row, at, 0] * kept + moments[row, at, 1] * waiting
        moving += moments[row, at, 2] * kept_begun + moments[row, at, 3] * waiting_begun
        if moments[row, at, 4] + moving > left:
            fits = False
            break
    if fits:
        return 0
    left = memory - held - largest
    for at in range(moments.shape[1] if left >= 0 else 0):
        moving = moments[row, at, 0] * inputs + moments[row, at, 1] * inputs_waiting
        moving += moments[row, at, 2] * inputs_begun + moments[row, at, 3] * inputs_waiting_begun
        if moments[row, at, 5] + moving > left:
            return -1
    return 1 if left >= 0 else -1


@compiled
def left_to_rows(costs: SingleDeviceCosts, room: Room) -> Ints:
    """Return the work, in nanoseconds, and the layers that rows from each one on can take at most. [rows + 1, 2]

    No cut can leave them more. If rows might take longer, the layers would be as many, and each row's work more by that
    time at most.
    """
    num_rows, num_layers = room.source.shape[1], len(costs.work) - 1
    left = np.zeros((num_rows + 1, 2), dtype=np.int64)
    kept = again = num_layers - 1  # layers of the second chunk, as many as the row before could have
    for row in range(num_rows - 1, -1, -1):
        messages = costs.send[room.source[0, row]].min() + costs.send[room.source[1, row]].min()
        work, layers = room.time - room.others[row, 0] - messages, num_layers
        if room.memory < UNLIMITED:
            _, with_kept, kept = _most_of_row(room, row, 0, kept)
            layers, _, again = _most_of_row(room, row, 1, again)
            with_checkpoints = int(room.tables.part * max(0, room.time - room.others[row, 1] - messages)) + 1
            work = min(work, max(with_kept, with_checkpoints))
        left[row, 0], left[row, 1] = left[row + 1, 0] + work, left[row + 1, 1] + layers
    return left


@compiled
def _most_of_row(room: Room, row: int, checkpoints: int, second: int) -> tuple[int, int, int]:
    """Return the layers and the work that a row's memory holds at most of two chunks.

    Args:
        room: The rows; two chunks.
        row: It.
        checkpoints: 0 with activations kept, 1 where it may checkpoint.
        second: Layers of the second chunk to begin with.

    Returns:
        Layers; work, in nanoseconds; and the most layers of the second chunk beside one of the first.
    """
    layers, work, num_layers, beside_one = 0, 0, room.tables.least.shape[1] - 1, 1
    for first in range(1, num_layers):
        if first == 1:
            while second < num_layers - 1 and _least_fits(room, row, first, second + 1, checkpoints):
                second += 1
        while second > 0 and not _least_fits(room, row, first, second, checkpoints):
            second -= 1
        if first == 1:
            beside_one = max(1, second)
        if second == 0:
            break
        layers = max(layers, first + second)
        work = max(work, room.tables.most_work[first] + room.tables.most_work[second])
    return layers, work, beside_one


@compiled
def _least_fits(room: Room, row: int, first: int, second: int, checkpoints: int) -> bool:
    """Return whether a row's memory would hold so many layers of two chunks if they were those that need least."""
    fits = row_fits(room.tables.least, room.moments, room.others, row, 0, first, 0, second, room.memory)
    return 0 <= fits <= checkpoints
