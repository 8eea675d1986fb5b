"""DistTrain: every unit has as many devices, and its own parallelism, as makes all of them equally fast.

Source: Zhang et al., "DistTrain" (SIGCOMM'25): disaggregated model orchestration and data reordering. With C the
forward and backward time of a sample, M the samples of a microbatch and BS those of a step, a unit u of dp replicas of
pp stages of tp devices computes, for each microbatch of all replicas of the language model at once,

    warm_u = DP_llm * M / dp * C_u(tp),    T_u = warm_u / pp,
    step = sum(warm_u) + max(T_u) * (BS / (DP_llm * M) - 1),

and keeps P / (pp * tp) + S / (pp * tp * dp) + L / tp bytes (parameters with gradients, the sharded optimizer, and the
activations of a microbatch). The paper relaxes pp to a convex problem. Here it is a whole number, and T_u is that of
the slowest stage when layers stay whole; what a call takes however few its samples are counts too. Beyond the paper,
samples are whole: M * DP_llm / dp is that of the fullest of dp replicas, of which each pipeline has a whole number, or
each a whole number of pipelines, and what that takes is at least the expected time of the longest of M samples.
The sum of gradients is added that takes longest, for the stage that has most of them, and memory has room for what
else is in flight. The search (:mod:`resilient.planners.published.disttrain.search`) is exact under these formulas: it
leaves out only what a lower bound excludes. The best for each number of the language model's replicas are then
simulated (:func:`~resilient.planners.evaluation.known_batches.fastest_simulated`). The paper divides the warm-up of the
language model by the stages that each of its devices has (virtual pipeline stages): of what is simulated the fastest
is compared with all of them with two stages each.

Samples are spread longest first over replicas by what they cost, and microbatches put into an order
(:mod:`resilient.planners.packing.microbatch_order`). Replicas here are of unequal speed, so they need not get equally
many samples: batches are packed, not padded. An order that needs more memory than there is is not taken; where memory
holds none, a replica has more microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.known_batches import fastest_simulated
from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.packing.memory_constrained_order import fastest_fitting, order_fits
from resilient.planners.packing.microbatch_order import fill_intervals, pipeline_ms, reorder
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.disttrain.search import disttrain_configurations, interleaved
from resilient.planners.stages.expected_step import stage_curves
from resilient.planners.stages.memory_budget import MemoryBudget, able
from resilient.planners.stages.redundancy import with_redundancy_noted
from resilient.templates.common.arrays import Floats, Ints


@dataclass(frozen=True)
class DistTrain:
    """The planner.

    Args:
        order: Puts microbatches into an order by their forwards and backwards on each stage;
            :func:`~resilient.planners.packing.microbatch_order.fill_intervals` is the paper's own.
    """

    name: str = "disttrain"
    source: str = "DistTrain (SIGCOMM'25), model orchestration and data reordering"
    order: Callable[[npt.ArrayLike, npt.ArrayLike], Ints] = reorder

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the parallelism of each unit under which a step takes least in simulation, of the best expected.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        candidates = disttrain_configurations(setting, samples)
        found = fastest_simulated(self, setting, candidates, samples)
        others = [each for each in candidates if each.units != found.units]
        found = fastest_simulated(self, setting, [found, *interleaved(setting, [found, *others], samples)], samples)
        return with_redundancy_noted(setting, found)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Spread samples over replicas and order each replica's microbatches; all units place a sample alike.

        Raises:
            ValueError: Memory is too small for a sample, even alone; the message names it.
        """
        forward, backward, calls = _stage_ms(setting, configuration, batch)
        budgets = MemoryBudget.of_each(setting, configuration, replicas)
        used = able(budgets, batch)
        replica = used[longest_first((forward + backward).sum(axis=0), [replicas[each].speed for each in used])]
        microbatch = np.zeros(len(batch), np.int64)
        for number in used.tolist():
            own = np.flatnonzero(replica == number)
            samples = _Samples(batch[own], forward[:, own], backward[:, own], calls)
            count, found = replicas[number].num_microbatches, None
            while found is None:
                found = self._microbatches(samples, count, budgets[number])
                count *= 2
            microbatch[own] = found
        place = Place(replica=replica, microbatch=microbatch)
        return Assignment(units=dict.fromkeys(configuration.units, place))

    def _microbatches(self, samples: _Samples, number: int, budget: MemoryBudget | None) -> Ints | None:
        """Return the microbatch of each sample of a replica, None where memory holds none that are tried.

        Where memory does not hold the order of the microbatches that samples come in, others are tried, as well as
        microbatches that are even in memory: the fastest of those that fit is taken.
        """
        fewest, more = divmod(len(samples.table), number)
        part = np.repeat(np.arange(number), fewest + (np.arange(number) < more))
        order = self.order(*samples.stage_ms(part, number))
        if budget is None or order_fits(order, budget.needs(samples.table, part, number), budget.windows):
            return np.argsort(order)[part]
        even, found = budget.even(samples.table, number), list[tuple[float, Ints]]()
        for each, orders in ((part, [order]), (even, [])):
            forward, backward = samples.stage_ms(each, number)
            descending = np.argsort(-(forward + backward).sum(axis=0), kind="stable")
            orders += [np.arange(number), fill_intervals(forward, backward), descending]
            needs = budget.needs(samples.table, each, number)
            best = fastest_fitting(orders, needs, budget.windows, forward, backward)
            if best is not None:
                found.append((pipeline_ms(best, forward, backward), np.argsort(best)[each]))
        return min(found, key=lambda each: each[0])[1] if found else None


@dataclass(frozen=True, eq=False)
class _Samples:
    """Those of a replica.

    Args:
        table: Their lengths.
        forward: Of each on each stage, in ms. [num_stages, num_samples]
        backward: Likewise.
        calls: What a forward and a backward take beside. [num_stages] twice
    """

    table: SampleTable
    forward: Floats
    backward: Floats
    calls: tuple[Floats, Floats]

    def stage_ms(self, microbatch: Ints, number: int) -> tuple[Floats, Floats]:
        """Return the forward and the backward of each microbatch on each stage. [num_stages, num_microbatches]"""
        used = np.bincount(microbatch, minlength=number) > 0
        forward, backward = (
            np.stack([loads(row, microbatch, number) for row in each]) + fixed[:, None] * used
            for each, fixed in zip((self.forward, self.backward), self.calls, strict=True)
        )
        return forward, backward


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
        stages = stage_curves(unit, spread)
        for row in range(spread.pp):
            forward, backward = (sum(each, Curve()) for each in zip(*stages[row :: spread.pp], strict=True))
            rows.append((forward.of(lengths) * share, backward.of(lengths) * share))
            fixed.append((forward.fixed, backward.fixed))
    calls = np.array(fixed)
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]), (calls[:, 0], calls[:, 1])
