"""Items with several weights into buckets, such that no bucket is heavy in any of them.

Source: DFLOP, the online microbatch scheduler: an item has a weight for the encoder and one for the language model.
The paper's integer program hardly gets beyond its start within the time a step leaves. So exchanges between the
heaviest bucket and the others come first, which take milliseconds, and HiGHS goes on from there while there is time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from resilient.common.extras import require
from resilient.planners.packing.balance import longest_first
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled

_SEARCH = 2**22
"""Exchanges that may be considered: some ten milliseconds."""

_ENOUGH = 1.0001
"""Of an even share: where exchanges end."""

_SOLVED = 2**14
"""Items times buckets up to which HiGHS is asked: it needs longer than a step for its first relaxation of more."""


_LEFT = 0.9
"""Of what is left of the limit, what HiGHS is given: it looks at the clock now and then, and is read afterwards."""


def pack_vectors(
    weights: npt.ArrayLike,
    speeds: npt.ArrayLike,
    *,
    time_limit_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> Ints:
    """Put items into buckets such that the largest of :func:`peak` is small.

    It is never larger than when each item counts by its largest weight alone and the longest goes first. Without a time
    limit the answer is the same everywhere; what HiGHS finds in time depends on the machine, so then one process must
    decide for all.

    Args:
        weights: What each item costs in each unit, in ms, ``[num_units, num_items]``, >= 0.
        speeds: Work per time of each bucket, ``[num_buckets]``, > 0.
        time_limit_s: Of the whole call, if HiGHS is to go on from the exchanges in what they leave of it. 0 leaves
            HiGHS out, and so do problems that are too large for it: they take as long as exchanges do.
        clock: Seconds, of which HiGHS's part of the limit is found.

    Returns:
        The bucket of each item, ``[num_items]``.

    Raises:
        ValueError: There is no bucket, a weight is negative or a speed is not positive.
        MissingPackageError: There is a time limit, but no HiGHS.
    """
    begun = clock()
    table = np.rint(np.atleast_2d(np.asarray(weights, dtype=np.float64)) * 1e6).astype(np.int64)
    rates = np.asarray(speeds, dtype=np.float64)
    start = longest_first(table.max(axis=0), rates)
    improved = start.copy()
    least = least_peak(table, rates)
    compiled(_exchange)(table, rates, improved, table.sum(axis=1).max() / rates.sum() * _ENOUGH, _SEARCH)
    found = [improved, start]
    if (
        time_limit_s > 0
        and table.shape[1] * len(rates) <= _SOLVED
        and peak(table, improved, rates) > least * (1 + 1e-9)
    ):
        found.append(_solve(table, rates, improved, lambda: _LEFT * (begun + time_limit_s - clock())))
    return min(found, key=lambda bucket: peak(table, bucket, rates))


def peak(weights: npt.ArrayLike, bucket: Ints, speeds: npt.ArrayLike) -> float:
    """Return how long the slowest bucket takes in any unit."""
    rates = np.asarray(speeds, dtype=np.float64)
    rows = np.atleast_2d(np.asarray(weights, dtype=np.float64))
    return max(float((np.bincount(bucket, weights=row, minlength=len(rates)) / rates).max()) for row in rows)


def least_peak(weights: npt.ArrayLike, speeds: npt.ArrayLike) -> float:
    """Return what :func:`peak` cannot be less than: work shared evenly, or the longest item where it is fastest."""
    rates = np.asarray(speeds, dtype=np.float64)
    rows = np.atleast_2d(np.asarray(weights, dtype=np.float64))
    return max(float(rows.sum(axis=1).max() / rates.sum()), float(rows.max(initial=0.0) / rates.max()))


def _solve(weights: Ints, speeds: Floats, start: Ints, left_s: Callable[[], float]) -> Ints:
    """Let HiGHS improve on ``start``: binary x[item, bucket], and the peak, to be minimised, above all loads.

    Args:
        weights: In whole ns.
        speeds: As there.
        start: A bucket of each item.
        left_s: Returns how long HiGHS may take from now on.
    """
    require("highspy", "Dflop(time_limit_s=...)")
    import highspy

    num_units, num_items = weights.shape
    num_buckets = len(speeds)
    scale = peak(weights, start, speeds)
    size = num_items * num_buckets
    # Column by column: that an item is in one bucket, and what it adds to the bucket's load in each unit.
    item, bucket = np.divmod(np.arange(size), num_buckets)
    loads_of = num_items + np.arange(num_units)[:, None] * num_buckets + bucket
    rows = np.concatenate((item[None], loads_of)).T
    shares = weights[:, item] / scale / speeds[bucket]
    values = np.concatenate((np.ones((1, size)), shares)).T
    num_loads = num_units * num_buckets

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = size + 1, num_items + num_loads
    model.col_cost_ = np.concatenate((np.zeros(size), [1.0]))
    model.col_lower_ = np.concatenate((np.zeros(size), [least_peak(weights, speeds) / scale]))
    model.col_upper_ = np.ones(size + 1)
    model.row_lower_ = np.concatenate((np.ones(num_items), np.full(num_loads, -highspy.kHighsInf)))
    model.row_upper_ = np.concatenate((np.ones(num_items), np.zeros(num_loads)))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.append(np.arange(size + 1) * (1 + num_units), rows.size + num_loads).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate((rows.ravel(), num_items + np.arange(num_loads))).astype(np.int32)
    model.a_matrix_.value_ = np.concatenate((values.ravel(), np.full(num_loads, -1.0)))
    model.integrality_ = [highspy.HighsVarType.kInteger] * size + [highspy.HighsVarType.kContinuous]
    highspy.Highs.resetGlobalScheduler(True)  # whoever solved before in this process may have had other threads
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("presolve", "off")  # it finds nothing here, and does not look at the clock
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.passModel(model)
    known = highspy.HighsSolution()
    chosen = np.zeros(size + 1)
    chosen[np.arange(num_items) * num_buckets + start] = 1.0
    chosen[-1] = 1.0
    known.col_value = chosen.tolist()
    solver.setSolution(known)
    limit_s = left_s()
    if limit_s <= 0:
        return start
    solver.setOptionValue("time_limit", limit_s)
    if solver.run() == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS must solve what it is given, got an error; plan with time_limit_s=0, without it")
    found = np.array(solver.getSolution().col_value)
    # Without a solution in time there are no values.
    return found[:size].reshape(num_items, num_buckets).argmax(axis=1) if len(found) > size else start


def _exchange(weights: Ints, speeds: Floats, bucket: Ints, enough: float, work: int) -> None:
    """Move an item out of the slowest bucket, or exchange two, as long as both buckets are then faster than it was.

    Where that is not possible the bucket is left alone, and the next one is the slowest.
    """
    num_units, num_items = weights.shape
    num_buckets = len(speeds)
    load = np.zeros((num_units, num_buckets), np.int64)
    for item in range(num_items):
        for unit in range(num_units):
            load[unit, bucket[item]] += weights[unit, item]
    left_alone = np.zeros(num_buckets, np.bool_)
    while work > 0:
        slowest, highest = 0, -1.0
        for each in range(num_buckets):
            for unit in range(num_units):
                if not left_alone[each] and load[unit, each] / speeds[each] > highest:
                    slowest, highest = each, load[unit, each] / speeds[each]
        if highest <= enough:
            return
        best, leaves, enters, other = highest, -1, -1, -1
        for item in range(num_items):
            if bucket[item] != slowest:
                continue
            # Partners: first nothing in each bucket, then each item.
            for partner in range(-num_buckets, num_items):
                into = partner + num_buckets if partner < 0 else bucket[partner]
                if left_alone[into] or into == slowest:
                    continue
                work -= 1
                value = 0.0
                for unit in range(num_units):
                    moved = weights[unit, item] - (weights[unit, partner] if partner >= 0 else 0)
                    value = max(value, (load[unit, slowest] - moved) / speeds[slowest])
                    value = max(value, (load[unit, into] + moved) / speeds[into])
                    if value >= best:
                        break
                if value < best:
                    best, leaves, enters, other = value, item, partner, into
        if leaves < 0:
            left_alone[slowest] = True
            continue
        for unit in range(num_units):
            moved = weights[unit, leaves] - (weights[unit, enters] if enters >= 0 else 0)
            load[unit, slowest] -= moved
            load[unit, other] += moved
        bucket[leaves] = other
        if enters >= 0:
            bucket[enters] = slowest
