"""Compiled loops of :mod:`resilient.planners.packing.microbatch_order`. Import them late: they load numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled


@compiled
def search_order(order: Ints, forward: Ints, backward: Ints, tries: int, ends: Ints) -> int:
    """Time 1F1B, then exchange two microbatches of ``order`` as long as it gets faster, at most ``tries`` times.

    ``ends`` receives the ends of the forwards and backwards timed last.
    """
    num_stages, count = len(forward), len(order)
    done = np.empty(num_stages, np.int64)
    clock = np.empty(num_stages, np.int64)
    best, first, second, since = -1, 0, 0, 0
    # Pairs are tried far apart, so that few tries are not all of the first microbatches.
    num_pairs = count * (count - 1) // 2
    pair, stride = 0, int(0.618 * num_pairs) + 1
    while np.gcd(stride, num_pairs) > 1:
        stride += 1
    while True:
        done[:] = 0
        clock[:] = 0
        for number in range(count):
            for stage in range(num_stages):
                while done[stage] < min(count, number + num_stages - stage):
                    k = done[stage]
                    if stage and ends[0, stage - 1, k] > clock[stage]:
                        clock[stage] = ends[0, stage - 1, k]
                    clock[stage] += forward[stage, order[k]]
                    ends[0, stage, k] = clock[stage]
                    done[stage] += 1
            for stage in range(num_stages - 1, -1, -1):
                if stage + 1 < num_stages and ends[1, stage + 1, number] > clock[stage]:
                    clock[stage] = ends[1, stage + 1, number]
                clock[stage] += backward[stage, order[number]]
                ends[1, stage, number] = clock[stage]
        if best < 0 or clock[0] < best:
            best, since = clock[0], 0
        else:
            order[first], order[second] = order[second], order[first]
            since += 1
        if tries == 0 or since == num_pairs:
            return best
        tries -= 1
        pair = (pair + stride) % num_pairs
        second = int((1 + np.sqrt(1 + 8 * pair)) / 2)
        first = pair - second * (second - 1) // 2
        order[first], order[second] = order[second], order[first]


@compiled
def fill_order(order: Ints, placed: int, forward: Ints, backward: Ints) -> None:
    """Put those that follow the first ``placed`` ones where their forwards fit the first stage's intervals best.

    They ascend by these forwards; of two that fit as well the shorter one is taken.
    """
    num_stages, count = len(forward), len(order)
    ends = np.empty((2, num_stages, count), np.int64)
    for position in range(placed, count):
        # The first stages' backwards so far depend on no later microbatch than those already placed.
        search_order(order[:position], forward, backward, 0, ends)
        number = position - num_stages
        interval = ends[1, 1, number + 1] - ends[1, 0, number]
        best = position
        for other in range(position + 1, count):
            if abs(forward[0, order[other]] - interval) < abs(forward[0, order[best]] - interval):
                best = other
        chosen = order[best]
        for other in range(best, position, -1):
            order[other] = order[other - 1]
        order[position] = chosen
