"""DFLOP: devices are split for the data there is, and every step's samples are put into even microbatches.

Source: DFLOP, the data-aware optimizer (:mod:`resilient.planners.published.dflop.search`) and the online microbatch
scheduler, which puts samples into microbatches such that the longest one is as short as can be
(:mod:`resilient.planners.published.dflop.vector_packing`).

Which replica runs a microbatch, and when, the paper leaves open. It matters where single samples are longer than a mean
microbatch: no scheduler divides them, and stages wait for each other. Here replicas deal out microbatches such that
each has equally much, and run the longest first, so that those that are in a pipeline together are about equally long;
a replica then takes the sum of its microbatches on one stage, and the longest one's way through the others. Memory may
not hold so many large ones in a row: then the order is changed as little as must be
(:mod:`resilient.planners.packing.memory_constrained_order`).

The paper runs its scheduler for the next batch while a step is computed, has units exchange activations between unequal
numbers of replicas, and normalises gradients by the global number of tokens. That is the runtime's business: ``assign``
is a function of the lengths of a batch, whenever they are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.known_batches import fastest_simulated
from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.packing.memory_constrained_order import fit_order
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.dflop.search import dflop_configurations
from resilient.planners.published.dflop.vector_packing import pack_vectors
from resilient.planners.stages.memory_budget import MemoryBudget, able
from resilient.planners.stages.memory_shares import kept_shares
from resilient.planners.stages.redundancy import with_redundancy_noted
from resilient.templates.common.arrays import Floats, Ints

_FILLED = (1.0, 0.875, 0.75, 0.625, 0.5)
"""Parts of the microbatches that are tried where memory is short."""


@dataclass(frozen=True)
class Dflop:
    """The planner.

    Args:
        time_limit_s: What the scheduler may take in every step with HiGHS in it. 0, as usual, leaves HiGHS out: what it
            finds in time depends on the machine and its load, and processes that assign by themselves must agree. With
            a limit one process must assign for all.
    """

    time_limit_s: float = 0.0
    name: str = "dflop"
    source: str = "DFLOP, data-aware optimizer and online microbatch scheduler"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the parallelism and microbatches under which a step takes least in simulation, of the best expected.

        Args:
            setting: The job; its ``microbatch`` is not used.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        found = fastest_simulated(self, setting, dflop_configurations(setting, samples), samples)
        return with_redundancy_noted(setting, found)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Put samples into microbatches such that the one that takes longest, in any unit, takes least.

        Where memory does not hold them in any order that is tried, samples are put into microbatches by memory instead,
        into some of them at last: those without any may be next to one that needs all the memory that is left. Where
        that is not enough there are more microbatches.

        Raises:
            ValueError: Memory is too small for a sample, even alone; the message names it.
        """
        budgets = MemoryBudget.of_each(setting, configuration, replicas)
        used = able(budgets, batch)
        own, budgets = [replicas[each] for each in used], [budgets[each] for each in used]
        weights = stage_weights(setting, configuration, batch)
        shares = kept_shares(setting, configuration, batch, replicas)
        while True:
            for bucket in self._packed(weights, shares, slots(own)[2]):
                place, most = _ordered(bucket, weights, batch, own, budgets)
                if most <= 1:
                    place = replace(place, replica=used[place.replica])
                    return Assignment(units=dict.fromkeys(configuration.units, place))
            own = [replace(each, num_microbatches=2 * each.num_microbatches) for each in own]

    def _packed(self, weights: Floats, shares: Floats, speeds: Floats) -> Iterator[Ints]:
        """Yield the microbatch of each sample, the fastest ones first."""
        yield pack_vectors(weights, speeds, time_limit_s=self.time_limit_s)
        for part in _FILLED:
            count = int(np.ceil(part * len(speeds)))
            filled = np.arange(count) * len(speeds) // count
            yield filled[longest_first(shares, np.ones(count))]


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


def _ordered(
    bucket: Ints,
    weights: Floats,
    batch: SampleTable,
    replicas: Sequence[Replica],
    budgets: Sequence[MemoryBudget | None],
) -> tuple[Place, float]:
    """Return where samples of these microbatches are, and what part of a stage's budget is used most.

    A replica runs the longest one first, then the next, as far as memory holds them; where it holds them in no such
    order, large ones are evenly among the others.
    """
    number = sum(each.num_microbatches for each in replicas)
    size = np.stack([loads(row, bucket, number) for row in weights]).max(axis=0)
    replica, microbatch = np.empty(number, np.int64), np.empty(number, np.int64)
    dealt = _dealt(size, replicas)
    for index, own in enumerate(dealt):
        replica[own], microbatch[own] = index, np.arange(len(own))
    order = np.argsort(replica[bucket], kind="stable")
    ends = np.cumsum(np.bincount(replica[bucket], minlength=len(replicas)))
    used = 0.0
    for own, samples, budget in zip(dealt, np.split(order, ends[:-1]), budgets, strict=True):
        if budget is not None:
            table, place = batch[samples], microbatch[bucket[samples]]
            needs = budget.needs(table, place, len(own))
            found = fit_order(np.arange(len(own)), needs, budget.windows)
            microbatch[own] = budget.apart(needs.max(axis=0)) if found is None else np.argsort(found)
            place = microbatch[bucket[samples]]
            used = max(used, budget.used(table, place, place, len(own)))
    return Place(replica=replica[bucket], microbatch=microbatch[bucket]), used


def _dealt(size: Floats, replicas: Sequence[Replica]) -> list[Ints]:
    """Return each replica's microbatches, the longest first.

    Replicas that are alike deal theirs out anew: of as many of the longest as there are replicas, the longest goes to
    the one that has least so far. Without this the first replica would have all that are longer than the others.

    Args:
        size: Of the microbatches of all replicas, in their order.
        replicas: Those that the microbatches belong to.
    """
    replica, _, _ = slots(replicas)
    found = [np.empty(0, np.int64)] * len(replicas)
    for alike in dict.fromkeys(replicas):
        members = [index for index, each in enumerate(replicas) if each == alike]
        own = np.flatnonzero(np.isin(replica, members))
        turns = own[np.argsort(-size[own], kind="stable")].reshape(alike.num_microbatches, len(members))
        done = np.zeros(len(members))
        for turn in turns:
            least = np.argsort(done, kind="stable")
            done[least] += size[turn]
            turn[least] = turn.copy()
        for index, mine in zip(members, turns.T, strict=True):
            found[index] = mine.copy()
    return found
