"""Compiled search: of all templates on the same devices, none of whose stages is slower than a bound, the shortest sum.

A dynamic program over (devices left, layers left), from the end of the pipeline. The nodes' boundaries are then at the
multiples of a node's devices, for every number of nodes. States that no template under the bound can pass are left out:
the devices before must be able to reach the layer, those after to finish. Near the best bound few are left.

How many microbatches a stage must hold depends on the number of stages after it: it is more the more these are; where
backwards are split fewer of them wait between the halves then, which for some stages is less. So a state has
alternatives: another number of stages, or a shorter sum. Often they need not be told apart: the search first takes for
each stage the number with which it holds least, the fewest or the most that the devices left allow, which cannot cost
more than any template, and is done if what it finds holds what it has.

Ties: of the least sums the fewest stages; of those, stage by stage from the first, the one that takes longest, then the
one with the most layers, then the fewest devices. 1F1B hides waiting best where slow stages come early.

Import it where it is needed: it loads numba. The kernels are called one by one from here, because a compiled caller
would compile all of them once more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from resilient.templates.common.compiled import compiled
from resilient.templates.search.stage_cost_model import STAGE_BITS, CostTable, Tables

NEVER = 1 << 62
"""More than any label."""

COUNT = (1 << STAGE_BITS) - 1
"""The bits of a label that hold the number of stages from its state on; the others hold the sum of their times."""


class Found(NamedTuple):
    """The best template under a bound.

    Args:
        stages: ``(end_layer, option)`` of each.
        total: What all stages and the first one's gradient sum take, in nanoseconds.
        slowest: What the slowest stage takes, in nanoseconds.
    """

    stages: list[list[int]]
    total: int
    slowest: int


class BoundedSearch:
    """The search for templates under a bound on their stages; what it takes is computed when it is made.

    Args:
        tables: Costs of stages.
        bound: Most that a stage may take, in nanoseconds.
        num_devices: Devices of the template, a multiple of a node's.
        like: A search of the same but for what stages have in flight: there is less to be computed then.
    """

    def __init__(self, tables: Tables, bound: int, num_devices: int, like: BoundedSearch | None = None) -> None:
        bound <<= STAGE_BITS
        self._tables = tables
        self._whole = num_devices * tables.sums.shape[3]
        self._band = band = _band(tables, bound, num_devices)
        self._none = bool(band[0, 0] > band[0, 1] or band[num_devices, 0] > band[num_devices, 1])
        if not self._none:
            self._reach = _reach(tables, bound) if like is None or like._none else like._reach
            self._labels = _sums(tables, self._reach, band)

    @property
    def is_exact(self) -> bool:
        """Whether templates with :attr:`least` hold what they have in flight, of as many stages as that is of."""
        return bool((self._tables.most == self._tables.fewest).all())

    @property
    def least(self) -> int:
        """The label of the best template, where each stage holds no more than with the best number of stages behind."""
        return NEVER if self._none else int(self._labels[self._whole])

    def fewest(self) -> int:
        """Return the least number of stages there can be, where there is a template."""
        tables = self._tables
        timeless = tables._replace(sums=np.zeros_like(tables.sums), send=np.zeros_like(tables.send))
        return int(_sums(timeless, self._reach, self._band)[self._whole])

    def labels(self) -> list[int]:
        """Return the labels of templates, where there are any, by number of stages.

        At least those with a shorter sum than all of fewer stages.
        """
        start, labels = self._by_stages
        return labels[start[self._whole] : start[self._whole + 1]].tolist()

    def best(self, most_stages: int = COUNT) -> Found | None:
        """Return the best template of up to so many stages; None if there is none."""
        if self._none:
            return None
        tables, reach, band = self._tables, self._reach, self._band
        start = np.arange(len(self._labels) + 1)
        stages, total, slowest, holds = _stages(tables, reach, band, start, self._labels, COUNT, False)
        if not holds or len(stages) > most_stages:
            start, labels = self._by_stages
            stages, total, slowest, _ = _stages(tables, reach, band, start, labels, most_stages, True)
        return Found(stages.tolist(), total >> STAGE_BITS, slowest >> STAGE_BITS) if len(stages) else None

    @cached_property
    def _by_stages(self) -> tuple[CostTable, CostTable]:
        return _sums_by_stages(self._tables, self._reach, self._band)


@compiled
def _reach(tables: Tables, bound: int) -> CostTable:
    """Return the last end that the bound allows, the first layer where none. [forward again, starts a node, D, L]"""
    sums, send = tables.sums, tables.send
    num_options, num_layers = sums.shape[2], sums.shape[3] - 1
    reach = np.empty((2, 2, num_options, num_layers), dtype=np.int64)
    for again in range(2):
        for into in range(2):
            for q in range(num_options):
                for i in range(num_layers):
                    limit = sums[again, 0, q, i] + bound - send[into, q, i]
                    end, stop = i, num_layers
                    while end < stop:
                        middle = (end + stop + 1) >> 1
                        if sums[again, 0, q, middle] <= limit:
                            end = middle
                        else:
                            stop = middle - 1
                    reach[again, into, q, i] = end
    return reach


@compiled
def _band(tables: Tables, bound: int, num_devices: int) -> CostTable:
    """Return, by devices left, what of a template under the bound can be there. [devices + 1, 4]

    The first layer, the last layer, and the fewest and the most stages from there on, with one of which a stage before
    holds least. Messages are not counted, and a stage holds no more than one that begins earlier may, so that a later
    start always allows a later end.
    """
    sums, farthest, devices, counts = tables.sums, tables.farthest, tables.devices, tables.fewest
    most, num_layers, size = tables.most, sums.shape[3] - 1, len(counts) - 1
    band = np.empty((num_devices + 1, 4), dtype=np.int64)
    for e in range(num_devices + 1):
        band[e, 0] = num_layers + 1
        band[e, 1] = -1
        band[e, 2] = e // size * counts[size] + counts[e % size]
        band[e, 3] = min(e // size * most[size] + most[e % size], num_layers - 1)
    band[num_devices, 1] = 0
    for e in range(num_devices, 0, -1):
        for q in range(len(devices)):
            rest = e - devices[q]
            if devices[q] <= (e - 1) % size + 1 and band[e, 1] >= 0 and band[rest, 2] < num_layers:
                i = j = min(band[e, 1], num_layers - 1)
                fitting = max(farthest[q, i, band[rest, 2] + 1], farthest[q, i, band[rest, 3] + 1])
                while j < fitting and sums[0, 0, q, j + 1] <= sums[0, 0, q, i] + bound:
                    j += 1
                band[rest, 1] = max(band[rest, 1], j)
    band[0, 0] = num_layers
    for e in range(1, num_devices + 1):
        for q in range(len(devices)):
            rest = e - devices[q]
            if devices[q] <= (e - 1) % size + 1 and band[rest, 0] <= num_layers and band[rest, 2] < num_layers:
                i = j = band[rest, 0]
                while i > 0 and sums[0, 0, q, i - 1] >= sums[0, 0, q, j] - bound:
                    if max(farthest[q, i - 1, band[rest, 2] + 1], farthest[q, i - 1, band[rest, 3] + 1]) < j:
                        break
                    i -= 1
                band[e, 0] = min(band[e, 0], i)
    for e in range(num_devices + 1):
        band[e, 0] = max(band[e, 0], band[num_devices - e, 2])
        band[e, 1] = min(band[e, 1], num_layers - band[e, 2])
    return band


@compiled
def _sums(tables: Tables, reach: CostTable, band: CostTable) -> CostTable:
    """Return the label of each state, ``devices left * (L + 1) + layer``, with its least sum.

    Each stage holds no more than with the best number of stages for the devices left. States outside the band have no
    label.
    """
    sums, send, ends, devices = tables.sums, tables.send, tables.ends, tables.devices
    next_backward = tables.next_backward
    num_layers, num_devices, size = sums.shape[3] - 1, len(band) - 1, len(tables.fewest) - 1
    labels = np.full((num_devices + 1) * (num_layers + 1), NEVER)
    labels[num_layers] = 0
    for e in range(1, num_devices + 1):
        into, first = int(e % size == 0), int(e == num_devices)
        state = labels[e * (num_layers + 1) : (e + 1) * (num_layers + 1)]
        for q in range(len(devices)):
            rest = e - devices[q]
            if devices[q] > (e - 1) % size + 1 or band[rest, 2] >= num_layers:
                continue
            after = labels[rest * (num_layers + 1) : (rest + 1) * (num_layers + 1)]
            few, many = band[rest, 2] + 1, band[rest, 3] + 1
            earliest, latest = band[rest, 0], band[rest, 1]
            for again in range(2):
                before, until, farthest = sums[again, 0, q], sums[again, first, q], reach[again, into, q]
                for i in range(band[e, 0], band[e, 1] + 1):
                    fit = max(ends[1, q, i, few], ends[1, q, i, many])
                    free = max(ends[0, q, i, few], ends[0, q, i, many], min(fit, next_backward[i]))
                    begin, end = i + 1, min(free, latest)
                    if again:
                        begin, end = max(begin, free + 1), min(fit, latest)
                    least = NEVER
                    for j in range(max(begin, earliest), min(end, farthest[i]) + 1):
                        least = min(least, until[j] + after[j])
                    if least < NEVER:
                        state[i] = min(state[i], least - before[i] + send[into, q, i] + 1)
    return labels


@compiled
def _sums_by_stages(tables: Tables, reach: CostTable, band: CostTable) -> tuple[CostTable, CostTable]:
    """Return the labels of all states: by number of stages, those with a shorter sum than any with fewer stages.

    State k has ``labels[start[k] : start[k + 1]]``. A stage has in flight what its number of stages says. Where stages
    before may hold less the more there are, each number of stages has its label.
    """
    sums, send, ends, devices = tables.sums, tables.send, tables.ends, tables.devices
    next_backward = tables.next_backward
    num_layers, num_devices, size = sums.shape[3] - 1, len(band) - 1, len(tables.fewest) - 1
    start = np.zeros((num_devices + 1) * (num_layers + 1) + 1, dtype=np.int64)
    labels = np.zeros(len(start), dtype=np.int64)
    least, all_numbers = np.full(num_layers + 1, NEVER), (tables.most != tables.fewest).any()
    start[num_layers + 1] = count = 1
    for e in range(1, num_devices + 1):
        into, first = int(e % size == 0), int(e == num_devices)
        for i in range(num_layers + 1):
            most = 0
            for q in range(len(devices)):
                rest = e - devices[q]
                outside = i < band[e, 0] or i > band[e, 1]
                if outside or devices[q] > (e - 1) % size + 1 or band[rest, 2] >= num_layers:
                    continue
                few, many = band[rest, 2] + 1, band[rest, 3] + 1
                end = min(reach[0, into, q, i], max(ends[1, q, i, few], ends[1, q, i, many]), band[rest, 1])
                for j in range(max(i + 1, band[rest, 0]), end + 1):
                    state = rest * (num_layers + 1) + j
                    for k in range(start[state], start[state + 1]):
                        stages = (labels[k] & COUNT) + 1
                        again = int(j > max(ends[0, q, i, stages], next_backward[i]))
                        if j > min(ends[1, q, i, stages], reach[again, into, q, i]):
                            if all_numbers:
                                continue
                            break
                        total = labels[k] + sums[again, first, q, j] - sums[again, 0, q, i] + send[into, q, i] + 1
                        least[stages] = min(least[stages], total)
                        most = max(most, stages)
            if count + most > len(labels):
                shorter = labels
                labels = np.empty(2 * len(shorter) + most, dtype=np.int64)
                for k in range(count):
                    labels[k] = shorter[k]
            shortest = NEVER >> STAGE_BITS
            for stages in range(1, most + 1):
                if least[stages] >> STAGE_BITS < shortest:
                    labels[count] = least[stages]
                    count += 1
                    if not all_numbers:
                        shortest = least[stages] >> STAGE_BITS
                least[stages] = NEVER
            start[e * (num_layers + 1) + i + 1] = count
    return start, labels


@compiled
def _stages(
    tables: Tables,
    reach: CostTable,
    band: CostTable,
    start: CostTable,
    labels: CostTable,
    most_stages: int,
    by_stages: bool,
) -> tuple[CostTable, int, int, bool]:
    """Return the stages of the least label, it, the slowest stage, and whether they hold what is in flight.

    Only labels of up to ``most_stages`` count.
    """
    sums, send, ends, devices = tables.sums, tables.send, tables.ends, tables.devices
    next_backward = tables.next_backward
    num_layers, e, size = sums.shape[3] - 1, len(band) - 1, len(tables.fewest) - 1
    chosen = np.empty((num_layers, 2), dtype=np.int64)
    label = NEVER
    for k in range(start[e * (num_layers + 1)], start[e * (num_layers + 1) + 1]):
        if labels[k] & COUNT <= most_stages:
            label = min(label, labels[k])
    total, holds = label, True
    count = i = slowest = 0
    while i < num_layers and label < NEVER:
        into, first = int(e % size == 0), int(count == 0)
        longest, next_i, next_e, next_label = -1, 0, 0, 0
        for q in range(len(devices)):
            rest = e - devices[q]
            if devices[q] > (e - 1) % size + 1 or band[rest, 2] >= num_layers:
                continue
            few, many = (label & COUNT, label & COUNT) if by_stages else (band[rest, 2] + 1, band[rest, 3] + 1)
            kept, fitting = max(ends[0, q, i, few], ends[0, q, i, many]), max(ends[1, q, i, few], ends[1, q, i, many])
            for j in range(max(i + 1, band[rest, 0]), min(fitting, band[rest, 1]) + 1):
                again = int(j > max(kept, next_backward[i]))
                if j > reach[again, into, q, i]:
                    break
                time = sums[again, 0, q, j] - sums[again, 0, q, i] + send[into, q, i]
                before = label - time - 1 - (sums[again, first, q, j] - sums[again, 0, q, j])
                state = rest * (num_layers + 1) + j
                for k in range(start[state], start[state + 1]):
                    if labels[k] == before and (time > longest or (time == longest and j > next_i)):
                        longest, next_i, next_e, next_label = time, j, rest, before
                        chosen[count, 0], chosen[count, 1] = j, q
        assert longest >= 0
        q, in_flight = chosen[count, 1], label & COUNT
        again = int(next_i > max(ends[0, q, i, in_flight], next_backward[i]))
        time = sums[again, 0, q, next_i] - sums[again, 0, q, i] + send[into, q, i]
        holds = holds and time == longest and next_i <= ends[1, q, i, in_flight]
        slowest = max(slowest, longest)
        count += 1
        i, e, label = next_i, next_e, next_label
    return chosen[:count], total, slowest, holds


def least_sum_of_depths(
    search_of: Callable[[int, BoundedSearch | None], BoundedSearch],
    depths: range,
    most_total: int,
    *,
    bound: int,
    impossible: dict[int, int],
) -> Found | None:
    """Return the best template where what all stages have in flight grows with their number; None if none is of use.

    The zero-bubble schedules are such. Templates of a number of stages are among those whose stages hold what fewer
    have in flight. So the least sums of these, by number of stages, bound those of all numbers from there on: numbers
    that cannot be better than what was found are never searched.

    Args:
        search_of: Returns the search for stages that hold what so many stages have in flight, like another.
        depths: The numbers of stages there can be.
        most_total: The greatest sum that is of use, in nanoseconds.
        bound: Of the searches: the most that a stage may take, in nanoseconds.
        impossible: By number of stages, the greatest bound under which no template of as many devices is known to be
            so deep. What is found out is added.
    """
    searches: dict[int, BoundedSearch] = {}

    def search(depth: int) -> BoundedSearch:
        if depth not in searches:
            searches[depth] = search_of(depth, next(iter(searches.values()), None))
        return searches[depth]

    best = useful = min(most_total << STAGE_BITS | COUNT, NEVER - 1)
    # Depths, and labels of templates that include theirs, by rising number of stages.
    ranges = [(depths.start, depths.stop, [0])]
    while ranges:
        first, stop, labels = ranges.pop()
        first = max(first, next((label & COUNT for label in labels if label <= best), stop))
        while first < stop and impossible.get(first, -1) >= bound:
            first += 1
        if first >= stop or search(first).least > best:
            continue
        if search(first).is_exact and search(first).least & COUNT <= first:
            best = search(first).least
            continue
        fewest = search(first).fewest()
        if fewest > first:
            impossible |= {depth: max(bound, impossible.get(depth, bound)) for depth in range(first, fewest)}
            ranges.append((fewest, stop, [0]))
            continue
        labels = search(first).labels()
        best = min([best, *(label for label in labels if label & COUNT <= first)])
        deeper = [label for label in labels if label & COUNT > first]
        middle = (first + 1 + stop) // 2
        ranges += [(first + 1, middle, deeper), (middle, stop, deeper)]
    return None if best == useful else search(best & COUNT).best(best & COUNT)
