"""Compiled loops of :mod:`resilient.planners.published.dflop.search`. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.planners.published.dflop.columns import (
    CALL,
    DP,
    KEPT,
    LARGEST,
    LONGEST,
    PP,
    STATE,
    SUMS,
    TAIL,
    TP,
    WHOLE,
)
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled


@compiled
def _passed(before: float, own: float, unit: int, language: int) -> float:
    """Return how long the way through the units up to one is: encoders are side by side, others come after."""
    return max(before, own) if unit < language else before + own


@compiled
def _uneven(option: int, replicas: int, columns: Floats) -> float:
    """Return how many times an even share of its replicas a unit's has where it is most: pipelines have whole lanes."""
    own = int(columns[DP, option])
    return own / (own // replicas * replicas) if own >= replicas else own * -(-replicas // own) / replicas


@compiled
def _lane_ms(number: int, replicas: int, option: int, batch: int, columns: Floats, tails: Floats) -> float:
    """Return how long the slowest stage has a microbatch, on the lane with most of its whole samples."""
    even = columns[WHOLE, option] / number * _uneven(option, replicas, columns)
    lanes = int(columns[DP, option]) // replicas
    if lanes <= 1 or even == 0:
        return even
    # In times of the mean sample: what lanes have if it is even, and the longest sample of each microbatch.
    times, sums = tails[int(columns[TAIL, option]), 3:]
    share, longest = batch / (number * lanes * replicas), (len(times) - 1) * number * replicas / batch
    above = len(times) - 1 - np.searchsorted(times[:-1], share, side="right")
    if above < longest:
        return even * (sums[above] + (longest - above) * share) / (longest * share)
    below = int(longest)
    return even * (sums[below] + (longest - below) * times[len(times) - 2 - below]) / (longest * share)


@compiled
def _step_ms(
    number: int, stretch: float, chosen: Ints, columns: Floats, tails: Floats, language: int, batch: int
) -> float:
    """Return what so many microbatches take, without sums of gradients."""
    slowest, num_stages, longest, replicas = 0.0, 0.0, 0.0, int(columns[DP, chosen[language]])
    for unit in range(len(chosen)):
        option = chosen[unit]
        lane_ms = _lane_ms(number, replicas, option, batch, columns, tails)
        slowest = max(slowest, lane_ms + columns[CALL, option])
        num_stages = _passed(num_stages, columns[PP, option], unit, language)
        several = -(-replicas // int(columns[DP, option]))
        longest = _passed(longest, columns[LONGEST, option] * several, unit, language)
    return (number - 1) * stretch * slowest + max(num_stages * slowest, longest)


@compiled
def _fits(chosen: Ints, columns: Floats, tails: Floats, language: int, memory: float) -> tuple[float, float]:
    """Return with how many microbatches what is kept fits, when one of those kept is the largest sample, and by how
    much it takes longer that memory does not hold as many of the larger ones as there are stages."""
    fewest, stretch, behind, replicas = 1.0, 1.0, 0.0, int(columns[DP, chosen[language]])
    for unit in range(len(chosen) - 1, -1, -1):
        option = chosen[unit]
        through = behind + columns[PP, option]
        if unit >= language:
            behind = through
        room = memory - columns[STATE, option]
        largest = columns[LARGEST, option] * -(-replicas // int(columns[DP, option]))
        kept = columns[KEPT, option] * _uneven(option, replicas, columns)
        if largest > room:
            return np.inf, 1.0
        fewest = max(fewest, np.ceil(kept * through / room))
        if through > 1 and kept > 0:
            fewest = max(fewest, np.ceil(kept * (through - 1) / max(room - largest, 1e-30)))
        if largest * through > room:
            size, time, weighted = tails[int(columns[TAIL, option]), :3]
            below = np.searchsorted(size, room / (largest * through), side="right")
            stretch = max(stretch, time[below] + (weighted[-1] - weighted[below]) * largest * through / room)
    return fewest, stretch


@compiled
def fastest_splits(
    ends: Ints,
    columns: Floats,
    tails: Floats,
    language: int,
    batch: int,
    devices: tuple[int, int],
    memory: float,
    slack: float,
    limit: float,
    best: Floats,
    found: Ints,
) -> None:
    """Choose one option per unit, depth first, for each number of the language model's replicas.

    Times are compared as whole nanoseconds.

    Args:
        ends: Where each unit's options end, and 0 before.
        columns: Of the options, as :mod:`resilient.planners.published.dflop.search` names the rows; each unit's ascend
            by
            ``WHOLE``.
        tails: What ``TAIL`` counts.
        language: Which unit is the language model.
        batch: Samples of a step.
        devices: Of all units, at most and at least.
        memory: Of a device.
        slack: How many times the best step's time those with other numbers of replicas may take.
        limit: What a step may take, in ns.
        best: Filled with the least time of a step, in ns, by the number of replicas. [batch + 1]
        found: Likewise with the option of each unit, and the microbatches (0: there are none). [batch + 1,
            num_units + 1]
    """
    count, (most_devices, least_devices) = len(ends) - 1, devices
    size = (columns[TP] * columns[DP] * columns[PP]).astype(np.int64)
    whole = columns[WHOLE]
    # Of all units from one on: the least devices, the least time, the least device times; of the longest sample.
    fewest = np.zeros(count + 1, np.int64)
    quickest = np.zeros(count + 1)
    least = np.zeros(count + 1)
    shortest = np.zeros(count + 1)
    for unit in range(count - 1, -1, -1):
        first, end = ends[unit], ends[unit + 1]
        fewest[unit] = fewest[unit + 1] + size[first:end].min()
        quickest[unit] = max(quickest[unit + 1], whole[first:end].min())
        least[unit] = least[unit + 1] + (size[first:end] * whole[first:end]).min()
        shortest[unit] = shortest[unit + 1] + columns[LONGEST, first:end].min() * (unit >= language)
    at = ends[:-1].copy()
    used = np.zeros(count + 1, np.int64)
    deep = np.zeros(count + 1)
    slow = np.zeros(count + 1)
    longest = np.zeros(count + 1)
    sums = np.zeros(count + 1)
    most = np.full(count + 1, batch)
    best_size, depth = np.full(batch + 1, most_devices + 1), 0
    best[:] = np.inf
    while depth >= 0:
        option = at[depth]
        # Options ascend by time: those after one that is too slow are slower.
        if option == ends[depth + 1] or whole[option] * 1e6 > limit + 1:
            at[depth] = ends[depth]
            depth -= 1
            if depth >= 0:
                at[depth] += 1
            continue
        below = depth + 1
        used[below] = used[depth] + size[option]
        if used[below] + fewest[below] <= most_devices and (below < count or used[below] >= least_devices):
            deep[below] = _passed(deep[depth], columns[PP, option], depth, language)
            most[below] = min(most[depth], batch // int(columns[DP, option]))
            slow[below] = max(slow[depth], whole[option])
            replicas = int(columns[DP, at[language]])
            if depth >= language:
                for unit in range(below):
                    slow[below] = max(slow[below], whole[at[unit]] * _uneven(at[unit], replicas, columns))
            longest[below] = _passed(longest[depth], columns[LONGEST, option], depth, language)
            sums[below] = max(sums[depth], columns[SUMS, option])
            bound = max(slow[below], quickest[below])
            if below < count:
                bound = max(bound, least[below] / (most_devices - used[below]))
            bound *= 1 + (deep[below] + count - max(below, language) - 1) / most[below]
            bound = max(bound, longest[below] + shortest[below]) + sums[below]
            enough = limit if depth < language else min(limit, best[replicas])
            if bound * 1e6 <= enough + 1:
                if below < count:
                    depth = below
                    continue
                low, stretch = _fits(at, columns, tails, language, memory)
                samples = 1
                while samples * replicas <= batch:
                    number = batch // (samples * replicas)
                    samples = batch // (number * replicas) + 1
                    if number > most[count]:
                        continue
                    # Even shares take that long with these, and longer with fewer.
                    least_ms = slow[count] * (1 + (deep[count] - 1) / number) + sums[count]
                    if number < low or least_ms * 1e6 > min(limit, best[replicas]) + 1:
                        break
                    step_ms = _step_ms(number, stretch, at, columns, tails, language, batch) + sums[count]
                    step = np.rint(step_ms * 1e6)
                    if step > limit:
                        continue
                    if step < best[replicas] or (step == best[replicas] and used[below] < best_size[replicas]):
                        best[replicas], best_size[replicas] = step, used[below]
                        found[replicas, :count] = at - ends[:-1]
                        found[replicas, count] = number
                        limit = min(limit, slack * step)
        at[depth] += 1
