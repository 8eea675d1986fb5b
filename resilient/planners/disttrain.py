"""DistTrain: every unit has as many devices, and its own parallelism, as makes all of them equally fast.

Source: Zhang et al., "DistTrain" (SIGCOMM'25): disaggregated model orchestration and data reordering. With C the
forward and backward time of a sample, M the samples of a microbatch and BS those of a step, a unit u of dp replicas of
pp stages of tp devices computes, for each microbatch of all replicas of the language model at once,

    warm_u = DP_llm * M / dp * C_u(tp),    T_u = warm_u / pp,
    step = sum(warm_u) + max(T_u) * (BS / (DP_llm * M) - 1),

and keeps P / (pp * tp) + S / (pp * tp * dp) + L / tp bytes (parameters with gradients, the sharded optimizer, and the
activations of a microbatch). The paper relaxes pp to a convex problem. Here it is a whole number, and T_u is that of
the slowest stage when layers stay whole; what a call takes however few its samples are counts too. Beyond the paper,
the sum of gradients is added that takes longest, for the stage that has most of them. The search is exact under these
formulas: it leaves out only what a lower bound excludes.

Samples are spread longest first over replicas by what they cost, and microbatches put into an order
(:mod:`resilient.planners.microbatch_order`). Replicas here are of unequal speed, so they need not get equally many
samples: batches are packed, not padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from resilient.planners.balance import Floats, longest_first
from resilient.planners.costs import UnitCosts
from resilient.planners.expected import Expected, expected, parallelism, stage_curves
from resilient.planners.microbatch_order import reorder
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.samples import Ints, SampleTable


@dataclass(frozen=True)
class DistTrain:
    """The planner."""

    name: str = "disttrain"
    source: str = "DistTrain (SIGCOMM'25), model orchestration and data reordering"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the parallelism of each unit under which a step takes least; of equals, one on the fewest devices.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        total = -(-setting.global_batch // setting.microbatch)
        units = sorted(setting.costs.units, key=lambda unit: unit.name != LLM)
        if units[0].name != LLM:
            raise ValueError(f"costs must have a unit {LLM!r}, got {[unit.name for unit in units]}; name it so")
        tables = [
            _Options.of(unit, samples, setting, _divisors(total if unit.name == LLM else total * setting.microbatch))
            for unit in units
        ]
        best_ns, devices, chosen, dp_llm = np.iinfo(np.int64).max, setting.num_devices + 1, [0] * len(units), 0
        for dp in _divisors(total):
            picked: list[_Picked] = []
            for table in tables:
                picked.append(table.for_samples(dp * setting.microbatch, None if picked else dp, setting))
                if not len(picked[-1].index):
                    break
            if not len(picked[-1].index):
                continue
            found = np.zeros(len(units), np.int64)
            step_ns, used = _kernel()(
                np.cumsum([0, *(len(each.index) for each in picked)]),
                np.concatenate([each.num_devices for each in picked]),
                np.concatenate([each.warm_ns for each in picked]),
                np.concatenate([each.stage_ns for each in picked]),
                np.concatenate([each.sum_ns for each in picked]),
                total // dp - 1,
                setting.num_devices,
                best_ns,
                devices,
                found,
            )
            if (step_ns, used) < (best_ns, devices):
                best_ns, devices, dp_llm = int(step_ns), int(used), dp
                chosen = [int(each.index[i]) for each, i in zip(picked, found, strict=True)]
        if not dp_llm:
            raise ValueError(
                f"num_nodes must be enough for the model's units side by side, got {setting.num_nodes} of "
                f"{setting.cluster.devices_per_node} devices; use more, or a smaller microbatch"
            )
        spread = {
            unit.name: parallelism(unit, samples.units[unit.name], int(table.dp[i]), int(table.pp[i]), int(table.tp[i]))
            for unit, table, i in zip(units, tables, chosen, strict=True)
        }
        return Configuration(
            units={unit.name: spread[unit.name] for unit in setting.costs.units},
            num_microbatches=total // dp_llm,
            predicted_ms=best_ns / 1e6,
        )

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Spread samples over replicas and order each replica's microbatches; all units place a sample alike.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        forward, backward, calls = _stage_ms(setting, configuration, batch)
        replica = longest_first((forward + backward).sum(axis=0), [each.speed for each in replicas])
        microbatch = np.zeros(len(batch), np.int64)
        for number, each in enumerate(replicas):
            parts = np.array_split(np.flatnonzero(replica == number), each.num_microbatches)
            times = [
                np.stack([one[:, part].sum(axis=1) + call * bool(len(part)) for part in parts], axis=1)
                for one, call in zip((forward, backward), calls, strict=True)
            ]
            for position, index in enumerate(reorder(*times)):
                microbatch[parts[index]] = position
        place = Place(replica=replica, microbatch=microbatch)
        return Assignment(units=dict.fromkeys(configuration.units, place))


def _stage_ms(
    setting: Setting, configuration: Configuration, batch: SampleTable
) -> tuple[Floats, Floats, tuple[Floats, Floats]]:
    """Return each sample's forward and backward on each stage, in ms, and what calls take beside.

    A replica of an encoder works for several of the language model, or several for one: times are those of a microbatch
    of the language model. [num_stages, num_samples] twice, [num_stages] twice.
    """
    replicas = configuration.units[LLM].dp
    rows: list[tuple[Floats, Floats]] = []
    fixed: list[tuple[float, float]] = []
    for unit in setting.costs.units:
        spread, lengths = configuration.units[unit.name], batch.units[unit.name]
        share = replicas / spread.dp * setting.correction.factor(unit.name, spread.tp, lengths.longest)
        for forward, backward in stage_curves(unit, spread):
            rows.append((forward.of(lengths) * share, backward.of(lengths) * share))
            fixed.append((forward.fixed, backward.fixed))
    calls = np.array(fixed)
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]), (calls[:, 0], calls[:, 1])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Picked:
    """Options of one unit for one degree of data parallelism of the language model."""

    index: npt.NDArray[np.intp]
    num_devices: Ints
    warm_ns: Ints
    stage_ns: Ints
    sum_ns: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """All (tp, dp, pp) of a unit on at most all devices, as columns."""

    tp: Ints
    dp: Ints
    pp: Ints
    sample_ms: Floats
    call_ms: Floats
    slowest_ms: Floats
    sum_ns: Ints
    kept_bytes: Floats
    state_bytes: Floats

    @classmethod
    def of(cls, unit: UnitCosts, samples: SampleTable, setting: Setting, replicas: Sequence[int]) -> _Options:
        held = sum(layer.parameter_bytes + layer.gradient_bytes for layer in unit.layers)
        sharded = sum(layer.optimizer_bytes for layer in unit.layers)
        degrees = expected(unit, samples.units[unit.name], setting.num_devices, setting.cluster.devices_per_node)
        columns = [_columns(each, replicas, setting) for each in degrees]
        tp, dp, pp, sample_ms, call_ms, slowest_ms, sum_ms, kept = (
            np.concatenate(each) for each in zip(*columns, strict=True)
        )
        return cls(
            tp=tp.astype(np.int64),
            dp=dp.astype(np.int64),
            pp=pp.astype(np.int64),
            sample_ms=sample_ms,
            call_ms=call_ms,
            slowest_ms=slowest_ms,
            sum_ns=np.rint(sum_ms * 1e6).astype(np.int64),
            kept_bytes=kept,
            state_bytes=(held + sharded / dp) / (pp * tp),
        )

    def for_samples(self, samples: int, dp: int | None, setting: Setting) -> _Picked:
        """Return what fits when a microbatch of all replicas has so many samples, fastest first."""
        share = samples / self.dp
        fits = samples % self.dp == 0 if dp is None else self.dp == dp
        if setting.cluster.memory_bytes is not None:
            fits &= self.state_bytes + self.kept_bytes * share <= setting.cluster.memory_bytes
        index = np.flatnonzero(fits)
        share = share[index]
        warm = share * self.sample_ms[index] + self.call_ms[index]
        stage = share * self.slowest_ms[index] + self.call_ms[index] / self.pp[index]
        warm_ns, stage_ns = np.rint(warm * 1e6).astype(np.int64), np.rint(stage * 1e6).astype(np.int64)
        order = np.argsort(stage_ns, kind="stable")
        num_devices = (self.tp * self.dp * self.pp)[index]
        return _Picked(
            index=index[order],
            num_devices=num_devices[order],
            warm_ns=warm_ns[order],
            stage_ns=stage_ns[order],
            sum_ns=self.sum_ns[index[order]],
        )


def _columns(each: Expected, replicas: Sequence[int], setting: Setting) -> tuple[Floats, ...]:
    dp, pp = (grid.ravel() for grid in np.meshgrid(replicas, np.arange(1, len(each.slowest_ms) + 1), indexing="ij"))
    few = dp * pp * each.tp <= setting.num_devices
    dp, pp = dp[few], pp[few]
    slowest_ms, sum_ms = each.slowest_ms[pp - 1], each.sum_ms(dp, pp, setting.cluster)
    values = (each.tp, dp, pp, each.sample_ms, each.call_ms, slowest_ms, sum_ms, each.activation_bytes)
    return tuple(np.broadcast_to(np.asarray(value, dtype=np.float64), dp.shape) for value in values)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return njit(cache=True)(_search)


def _search(
    ends: Ints,
    size: Ints,
    warm: Ints,
    stage: Ints,
    after: Ints,
    steady: int,
    devices: int,
    best: int,
    best_size: int,
    found: Ints,
) -> tuple[int, int]:
    """Choose one option per unit, depth first, and fill in which; leave out what cannot beat (best, best_size)."""
    count = len(ends) - 1
    # Of all units from one on: the least devices, warm-up and stage time, device times, and sums of gradients.
    least = np.zeros((5, count + 1), np.int64)
    for unit in range(count - 1, -1, -1):
        first, end = ends[unit], ends[unit + 1]
        least[0, unit] = least[0, unit + 1] + size[first:end].min()
        least[1, unit] = least[1, unit + 1] + warm[first:end].min()
        least[2, unit] = max(least[2, unit + 1], stage[first:end].min())
        least[3, unit] = least[3, unit + 1] + (size[first:end] * stage[first:end]).min()
        least[4, unit] = max(least[4, unit + 1], after[first:end].min())
    at = ends[:-1].copy()
    sums = np.zeros((4, count + 1), np.int64)
    depth = 0
    while depth >= 0:
        option = at[depth]
        if option == ends[depth + 1]:
            at[depth] = ends[depth]
            depth -= 1
            if depth >= 0:
                at[depth] += 1
            continue
        used = sums[0, depth] + size[option]
        warmed = sums[1, depth] + warm[option]
        slowest = max(sums[2, depth], stage[option])
        longest = max(sums[3, depth], after[option])
        fewest = used + least[0, depth + 1]
        if fewest <= devices:
            bound = max(slowest, least[2, depth + 1])
            if depth + 1 < count:
                bound = max(bound, least[3, depth + 1] // (devices - used))
            step = warmed + least[1, depth + 1] + steady * bound + max(longest, least[4, depth + 1])
            if step < best or (step == best and fewest < best_size):
                if depth + 1 < count:
                    sums[0, depth + 1], sums[1, depth + 1] = used, warmed
                    sums[2, depth + 1], sums[3, depth + 1] = slowest, longest
                    depth += 1
                    continue
                best, best_size = step, used
                found[:] = at - ends[:-1]
        at[depth] += 1
    return best, best_size
