"""Entrain: devices in proportion to work, microbatches even for the encoder, deferral for the language model.

Source: Entrain (chapter 4 of Jang's dissertation), section 4.4: the configuration is
:mod:`resilient.planners.published.entrain.search`'s business, microbatches are
:mod:`resilient.planners.published.entrain.deferral`'s. Samples are given to replicas in order of the encoder's work,
each to the one that is first done with its work for the language model.

With several encoders their work is added up. Replicas may be of unequal speed and have unequal numbers of microbatches:
a sample's work is divided by the speed, and each replica's microbatches are put together on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.balance import give_out
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.entrain.allocation import settle
from resilient.planners.published.entrain.deferral import defer, encoder_microbatches
from resilient.planners.published.entrain.search import entrain_configuration
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.templates.common.arrays import Floats, Ints


@dataclass(frozen=True)
class Entrain:
    """The planner."""

    name: str = "entrain"
    source: str = "Entrain (Jang's dissertation, chapter 4), section 4.4"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the configuration that takes least for the mean sample.

        It has a note when other samples as many as these could well have led to another allocation.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        configuration = entrain_configuration(setting, samples)
        spread = configuration.units
        sizes = [each.tp * each.cp for each in spread.values()]
        work: list[Floats] = []
        for unit, size in zip(setting.costs.units, sizes, strict=True):
            curve, lengths = unit.work(spread[unit.name].tp, spread[unit.name].cp), samples.units[unit.name]
            # With each sample's share of what a microbatch takes beside, as the search counts it.
            fixed = curve.fixed / setting.microbatch if lengths.tokens.any() else 0.0
            work.append(size * (curve.of(lengths) + fixed))
        settled = settle(np.stack(work), sizes, setting.num_devices // spread[LLM].dp)
        if not settled.settled:
            return replace(configuration, notes=(str(settled),))
        if settled.num_samples > len(samples):
            return replace(configuration, notes=(f"only {settled}, and got {len(samples)}; give more",))
        return configuration

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Place samples; the language model processes those that are deferred one microbatch after the encoders.

        Raises:
            ValueError: Memory is too small for a sample, even alone; the message names it.
        """
        names = list(configuration.units)
        language = names.index(LLM)
        encoder_ms = _work_ms(setting, configuration, batch, names[:language])
        llm_ms = _work_ms(setting, configuration, batch, names[language:])
        order = np.argsort(-encoder_ms, kind="stable")
        replica = give_out(llm_ms, [each.speed for each in replicas], order)
        encoder, llm = np.zeros_like(replica), np.zeros_like(replica)
        budgets = MemoryBudget.of_each(setting, configuration, replicas)
        for index, (each, budget) in enumerate(zip(replicas, budgets, strict=True)):
            own = np.flatnonzero(replica == index)
            if budget is not None:
                budget.check(batch, own)
            encoder[own], llm[own] = _microbatches(
                encoder_ms[own], llm_ms[own], each.num_microbatches, batch[own], budget
            )
        early, late = Place(replica=replica, microbatch=encoder), Place(replica=replica, microbatch=llm)
        return Assignment(units={name: early if name in names[:language] else late for name in names})


def _work_ms(setting: Setting, configuration: Configuration, batch: SampleTable, names: Iterable[str]) -> Floats:
    """Return what each sample costs some units together. [num_samples]"""
    total = np.zeros(len(batch))
    for name in names:
        spread = configuration.units[name]
        total += setting.sample_ms(name, batch.units[name], spread.tp, spread.cp)
    return total


def _microbatches(
    encoder_ms: Floats, llm_ms: Floats, num_microbatches: int, samples: SampleTable, budget: MemoryBudget | None
) -> tuple[Ints, Ints]:
    """Return the microbatch of each sample in encoders and in the language model.

    Where microbatches that are even in work do not fit into memory, more of them are tried, then those without
    deferral, then such as are even in memory. If nothing fits, what exceeds it least is returned.
    """
    ways = _ways(encoder_ms, llm_ms, num_microbatches, samples, budget)
    if budget is None:
        return next(ways)
    least, best = np.inf, None
    for early, late in ways:
        used = budget.used(samples, early, late, num_microbatches)
        if used < least:
            least, best = used, (early, late)
        if used <= 1:
            break
    assert best is not None
    return best


def _ways(
    encoder_ms: Floats, llm_ms: Floats, num_microbatches: int, samples: SampleTable, budget: MemoryBudget | None
) -> Iterator[tuple[Ints, Ints]]:
    """Yield what :func:`_microbatches` tries."""
    fewest, least = 1, budget.fewest(samples) if budget else 1
    while True:
        microbatch = encoder_microbatches(encoder_ms, llm_ms, num_microbatches, fewest)
        early, late = defer(encoder_ms, llm_ms, microbatch, num_microbatches)
        yield early, late
        yield early, early
        if fewest >= num_microbatches or budget is None:
            break
        tried = max(fewest, len(np.unique(microbatch)))
        fewest = min(least if least > tried else 2 * tried, num_microbatches)
    if budget is not None:
        even = budget.even(samples, num_microbatches)
        yield even, even
