"""DFLOP: devices are split for the data there is, and every step's samples are put into even microbatches.

Source: DFLOP, the data-aware optimizer and the online microbatch scheduler. For i microbatches of GBS samples, unit u
with dp replicas of pp stages of tp devices computes for each microbatch

    dur_u = GBS / (i * dp) * C_u(tp) / pp,    step = (i + sum(pp) - 1) * max(dur_u),

where the division by i * dp is missing in the paper's listing. C_u is the mean of the times of sampled data, which is
more than the time of the mean sample: attention is quadratic. A unit keeps activations until the gradient comes back
through all units after it: the first stage of an encoder for E_pp + L_pp microbatches. As in
:mod:`resilient.planners.disttrain`, layers stay whole, and what calls take beside counts; so there may be too many
microbatches as well as too few. No replica has less than one sample a microbatch.

The step is convex in i, so all splits are searched, each with the best i, and those left out that a lower bound
excludes. Parameters, gradients and optimizer are divided by pp and tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from resilient.planners.balance import Floats
from resilient.planners.buckets import fill_buckets
from resilient.planners.costs import UnitCosts
from resilient.planners.expected import expected, parallelism
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.samples import Ints, SampleTable
from resilient.planners.slots import slots


@dataclass(frozen=True)
class Dflop:
    """The planner.

    Args:
        time_limit_s: What HiGHS may take in every step. 0 leaves it out: then all processes find the same assignment.
    """

    time_limit_s: float = 0.0
    name: str = "dflop"
    source: str = "DFLOP, data-aware optimizer and online microbatch scheduler"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the parallelism and number of microbatches under which a step takes least; of equals, fewest devices.

        Args:
            setting: The job; its ``microbatch`` is not used.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        units = setting.costs.units
        if LLM not in setting.costs.by_name:
            raise ValueError(f"costs must have a unit {LLM!r}, got {[unit.name for unit in units]}; name it so")
        found, step_ms = _best([_options(unit, samples, setting) for unit in units], setting)
        if found is None:
            raise ValueError(
                f"num_nodes must be enough for the model's units side by side, got {setting.num_nodes} of "
                f"{setting.cluster.devices_per_node} devices; use more, or larger ones"
            )
        degrees, num_microbatches = found
        spread = {
            unit.name: parallelism(unit, samples.units[unit.name], dp, pp, tp)
            for unit, (tp, dp, pp) in zip(units, degrees, strict=True)
        }
        return Configuration(units=spread, num_microbatches=num_microbatches, predicted_ms=step_ms)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Put samples into microbatches such that the one that takes longest, in any unit, takes least.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        replica, microbatch, speeds = slots(replicas)
        weights = stage_weights(setting, configuration, batch)
        bucket = fill_buckets(weights, speeds, time_limit_s=self.time_limit_s)
        place = Place(replica=replica[bucket], microbatch=microbatch[bucket])
        return Assignment(units=dict.fromkeys(configuration.units, place))


def stage_weights(setting: Setting, configuration: Configuration, batch: SampleTable) -> Floats:
    """Return what each sample costs a stage of each unit, in ms. [num_units, num_samples]

    A unit with half the language model's replicas computes two of its microbatches in the time of one.
    """
    rows: list[Floats] = []
    for unit in setting.costs.units:
        spread = configuration.units[unit.name]
        share = configuration.units[LLM].dp / spread.dp / spread.pp
        rows.append(setting.sample_ms(unit.name, batch.units[unit.name], spread.tp, spread.cp) * share)
    return np.stack(rows)


def _options(unit: UnitCosts, samples: SampleTable, setting: Setting) -> Floats:
    """Return all (tp, dp, pp) of a unit that fit its state, as columns, in order of the time they take.

    Rows: tp, dp, pp; the slowest stage's time for the whole global batch as one microbatch, and for a call beside;
    the bytes of state; the bytes of that batch's activations on a device.
    """
    devices, batch = setting.num_devices, setting.global_batch
    found: list[Floats] = []
    for each in expected(unit, samples.units[unit.name], devices, setting.cluster.devices_per_node):
        limits = np.arange(1, min(batch, devices // each.tp) + 1), np.arange(1, len(each.slowest_ms) + 1)
        dp, pp = (grid.ravel() for grid in np.meshgrid(*limits, indexing="ij"))
        few = dp * pp * each.tp <= devices
        dp, pp = dp[few], pp[few]
        values = (
            np.full(dp.shape, each.tp),
            dp,
            pp,
            batch / dp * each.slowest_ms[pp - 1],
            each.call_ms / pp,
            unit.state_bytes / (pp * each.tp),
            batch / dp * each.activation_bytes / pp,
        )
        found.append(np.stack(values).astype(np.float64))
    table = np.concatenate(found, axis=1)
    if setting.cluster.memory_bytes is not None:
        least = table[6] * table[2] / (batch // table[1])
        table = table[:, (table[5] < setting.cluster.memory_bytes) & (table[5] + least <= setting.cluster.memory_bytes)]
    return table[:, np.argsort(table[3], kind="stable")]


_Found = tuple[list[tuple[int, int, int]], int]
"""(tp, dp, pp) of each unit, and the number of microbatches."""


def _best(tables: list[Floats], setting: Setting) -> tuple[_Found | None, float]:
    """Return the best of all options together, None if nothing fits, and the step's time in ms.

    Units that get devices in proportion to their work are searched first: what that takes excludes most of the rest.
    """
    if not all(table.shape[1] for table in tables):
        return None, np.inf
    work = np.array([(_size(table) * table[3]).min() for table in tables])
    shares = setting.num_devices * work / max(work.sum(), 1e-30)
    best_ns = np.inf
    for narrowest in (0.9, 0.5):
        near = [
            table[:, (_size(table) <= share) & (_size(table) >= narrowest * share)]
            for table, share in zip(tables, shares, strict=True)
        ]
        if all(table.shape[1] for table in near):
            best_ns = min(best_ns, _searched(near, setting)[1] * 1e6)
    tables = [table[:, table[3] * 1e6 <= best_ns + 1] for table in tables]
    fewest = [int(_size(table).min()) for table in tables]
    left = [setting.num_devices - sum(fewest) + own for own in fewest]
    if sum(fewest) > setting.num_devices:
        return None, np.inf
    tables = [table[:, _size(table) <= most] for table, most in zip(tables, left, strict=True)]
    return _searched(tables, setting, best_ns)


def _searched(tables: list[Floats], setting: Setting, best_ns: float = np.inf) -> tuple[_Found | None, float]:
    found = np.zeros(len(tables) + 1, np.int64)
    columns = np.ascontiguousarray(np.concatenate(tables, axis=1))
    ends = np.cumsum([0, *(table.shape[1] for table in tables)])
    memory = float(setting.cluster.memory_bytes or np.inf)
    step_ms = _kernel()(ends, columns, setting.global_batch, setting.num_devices, memory, best_ns, found)
    degrees = [
        (int(table[0, option]), int(table[1, option]), int(table[2, option]))
        for table, option in zip(tables, found[:-1], strict=True)
    ]
    return ((degrees, int(found[-1])) if found[-1] else None), float(step_ms)


def _size(table: Floats) -> Floats:
    return table[0] * table[1] * table[2]


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return njit(cache=True)(_search)


def _search(ends: Ints, columns: Floats, batch: int, devices: int, memory: float, best: float, found: Ints) -> float:
    """Choose one option per unit, depth first; fill in which, and the number of microbatches (0: there are none).

    Times are compared as whole nanoseconds.
    """
    count = len(ends) - 1
    size = (columns[0] * columns[1] * columns[2]).astype(np.int64)
    pp, whole, call = columns[2].astype(np.int64), columns[3], columns[4]
    # Of all units from one on: the least devices, the least time, the least device times.
    fewest = np.zeros(count + 1, np.int64)
    quickest = np.zeros(count + 1)
    least = np.zeros(count + 1)
    for unit in range(count - 1, -1, -1):
        first, end = ends[unit], ends[unit + 1]
        fewest[unit] = fewest[unit + 1] + size[first:end].min()
        quickest[unit] = max(quickest[unit + 1], whole[first:end].min())
        least[unit] = least[unit + 1] + (size[first:end] * whole[first:end]).min()
    at = ends[:-1].copy()
    used = np.zeros(count + 1, np.int64)
    deep = np.zeros(count + 1, np.int64)
    slow = np.zeros(count + 1)
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
            deep[below] = deep[depth] + pp[option]
            most[below] = min(most[depth], batch // int(columns[1, option]))
            slow[below] = max(slow[depth], whole[option])
            bound = max(slow[below], quickest[below])
            if below < count:
                bound = max(bound, least[below] / (devices - used[below]))
            bound *= 1 + (deep[below] + count - below - 1) / most[below]
            if bound * 1e6 <= best + 1:
                if below < count:
                    depth = below
                    continue
                # The fewest microbatches whose activations fit.
                low, behind = 1, 0
                for unit in range(count - 1, -1, -1):
                    behind += pp[at[unit]]
                    room = memory - columns[5, at[unit]]
                    low = max(low, int(np.ceil(columns[6, at[unit]] * behind / room)))
                high = most[count]
                if low <= high:
                    while low < high:
                        middle = (low + high) // 2
                        now, after = 0.0, 0.0
                        for unit in range(count):
                            now = max(now, whole[at[unit]] / middle + call[at[unit]])
                            after = max(after, whole[at[unit]] / (middle + 1) + call[at[unit]])
                        if (middle + behind) * after >= (middle + behind - 1) * now:
                            high = middle
                        else:
                            low = middle + 1
                    now = 0.0
                    for unit in range(count):
                        now = max(now, whole[at[unit]] / low + call[at[unit]])
                    step = np.rint((low + behind - 1) * now * 1e6)
                    if step < best or (step == best and used[below] < best_size):
                        best, best_size = step, used[below]
                        found[:count] = at - ends[:-1]
                        found[count] = low
        at[depth] += 1
    return best / 1e6
