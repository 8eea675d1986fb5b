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
def _step_ms(number: int, stretch: float, chosen: Ints, columns: Floats, language: int) -> float:
    """Return what so many microbatches take, without sums of gradients."""
    slowest, num_stages, longest, replicas = 0.0, 0.0, 0.0, columns[DP, chosen[language]]
    for unit in range(len(chosen)):
        option = chosen[unit]
        slowest = max(slowest, columns[WHOLE, option] / number + columns[CALL, option])
        num_stages = _passed(num_stages, columns[PP, option], unit, language)
        longest = _passed(longest, columns[LONGEST, option] * max(1.0, replicas / columns[DP, option]), unit, language)
    return (number - 1) * stretch * slowest + max(num_stages * slowest, longest)


@compiled
def _fits(chosen: Ints, columns: Floats, tails: Floats, language: int, memory: float) -> tuple[float, float]:
    """Return with how many microbatches what is kept fits, when one of those kept is the largest sample, and by how
    much it takes longer that memory does not hold as many of the larger ones as there are stages."""
    fewest, stretch, behind, replicas = 1.0, 1.0, 0.0, columns[DP, chosen[language]]
    for unit in range(len(chosen) - 1, -1, -1):
        option = chosen[unit]
        through = behind + columns[PP, option]
        if unit >= language:
            behind = through
        room = memory - columns[STATE, option]
        largest = columns[LARGEST, option] * max(1.0, replicas / columns[DP, option])
        if largest > room:
            return np.inf, 1.0
        fewest = max(fewest, np.ceil(columns[KEPT, option] * through / room))
        if through > 1 and columns[KEPT, option] > 0:
            fewest = max(fewest, np.ceil(columns[KEPT, option] * (through - 1) / max(room - largest, 1e-30)))
        if largest * through > room:
            size, time, weighted = tails[int(columns[TAIL, option])]
            below = np.searchsorted(size, room / (largest * through), side="right")
            stretch = max(stretch, time[below] + (weighted[-1] - weighted[below]) * largest * through / room)
    return fewest, stretch


@compiled
def fastest_split(
    ends: Ints,
    columns: Floats,
    tails: Floats,
    language: int,
    batch: int,
    devices: int,
    memory: float,
    best: float,
    found: Ints,
) -> float:
    """Choose one option per unit, depth first; fill in which, and the number of microbatches (0: there are none).

    Times are compared as whole nanoseconds.

    Args:
        ends: Where each unit's options end, and 0 before.
        columns: Of the options, as :mod:`resilient.planners.published.dflop.search` names the rows; each unit's ascend
            by
            ``WHOLE``.
        tails: What ``TAIL`` counts.
        language: Which unit is the language model.
        batch: Samples of a step.
        devices: Of all units.
        memory: Of a device.
        best: A step's time to beat or reach, in ns.
        found: Filled with the option of each unit, and the microbatches. [num_units + 1]

    Returns:
        The step's time in ms.
    """
    count = len(ends) - 1
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
    best_size, depth = devices + 1, 0
    while depth >= 0:
        option = at[depth]
        # Options ascend by time: those after one that is too slow are slower.
        if option == ends[depth + 1] or whole[option] * 1e6 > best + 1:
            at[depth] = ends[depth]
            depth -= 1
            if depth >= 0:
                at[depth] += 1
            continue
        below = depth + 1
        used[below] = used[depth] + size[option]
        if used[below] + fewest[below] <= devices:
            deep[below] = _passed(deep[depth], columns[PP, option], depth, language)
            most[below] = min(most[depth], batch // int(columns[DP, option]))
            slow[below] = max(slow[depth], whole[option])
            longest[below] = _passed(longest[depth], columns[LONGEST, option], depth, language)
            sums[below] = max(sums[depth], columns[SUMS, option])
            bound = max(slow[below], quickest[below])
            if below < count:
                bound = max(bound, least[below] / (devices - used[below]))
            bound *= 1 + (deep[below] + count - max(below, language) - 1) / most[below]
            bound = max(bound, longest[below] + shortest[below]) + sums[below]
            if bound * 1e6 <= best + 1:
                if below < count:
                    depth = below
                    continue
                replicas = int(columns[DP, at[language]])
                low, stretch = _fits(at, columns, tails, language, memory)
                last, samples = np.inf, 1
                while samples * replicas <= batch:
                    number = batch // (samples * replicas)
                    samples = batch // (number * replicas) + 1
                    if number > most[count]:
                        continue
                    now = _step_ms(number, stretch, at, columns, language)
                    if number < low or now > last:
                        break
                    last = now
                    step = np.rint((now + sums[count]) * 1e6)
                    if step < best or (step == best and used[below] < best_size):
                        best, best_size = step, used[below]
                        found[:count] = at - ends[:-1]
                        found[count] = number
        at[depth] += 1
    return best / 1e6
