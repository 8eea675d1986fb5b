"""Entrain: devices in proportion to work, microbatches even for the encoder, deferral for the language model.

Source: Entrain (chapter 4 of Jang's dissertation), section 4.4: configurations are
:mod:`resilient.planners.published.entrain.search`'s business, microbatches are
:mod:`resilient.planners.published.entrain.deferral`'s, and
:mod:`resilient.planners.published.entrain.microbatches`'s where memory is short. Samples are given to replicas in order
of the encoder's work, each to the one that is first done with its work for the language model.

A replica's part of a batch is to be so large that others as large ask for the same devices (b_min). Of the first
configurations of which that is so, the paper takes the first. Here a batch that is known decides which is fastest, and
how far forwards run ahead (the paper: as far as memory allows).

With several encoders their work is added up. Replicas may be of unequal speed and have unequal numbers of microbatches:
a sample's work is divided by the speed, and each replica's microbatches are put together on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.packing.balance import give_out, loads
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.published.entrain.allocation import Settled, settle
from resilient.planners.published.entrain.microbatches import entrain_microbatches
from resilient.planners.published.entrain.search import entrain_configurations
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.templates.common.arrays import Floats, Ints

_TRIED = 8
"""Configurations that are simulated."""

_LEADS = (1, 2, 3)
"""How far forwards may run ahead: more was no faster wherever it was tried, and configurations are compared at 2."""


@dataclass(frozen=True)
class Entrain:
    """The planner."""

    name: str = "entrain"
    source: str = "Entrain (Jang's dissertation, chapter 4), section 4.4"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the configuration that is fastest in simulation, of those that take least for the mean sample.

        It has a note where batches are too small to settle how devices are divided, or samples too few to tell.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        settled: list[Configuration] = []
        others: list[Configuration] = []
        for each in entrain_configurations(setting, samples):
            parts = _settled(setting, each, samples)
            if not parts.settled:
                others.append(replace(each, notes=(str(parts),)))
            elif parts.num_samples > len(samples):
                settled.append(replace(each, notes=(f"only {parts}, and got {len(samples)}; give more",)))
            else:
                settled.append(each)
            if len(settled) == _TRIED:
                break
        batches = known_batches(setting, samples, 1)
        tried = [replace(each, lead=_LEADS[1]) for each in settled or others[:_TRIED]]
        found = fastest(timed(self, setting, tried, batches), self.name, setting)
        leads = timed(self, setting, [replace(found, lead=lead) for lead in _LEADS if lead != found.lead], batches)
        return fastest(sorted([found, *leads], key=lambda each: each.lead), self.name, setting)

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
        budgets = MemoryBudget.of_each(setting, configuration, replicas)
        replica = _replicas(encoder_ms, llm_ms, batch, replicas, budgets)
        encoder, llm = np.zeros_like(replica), np.zeros_like(replica)
        for index, (each, budget) in enumerate(zip(replicas, budgets, strict=True)):
            own = np.flatnonzero(replica == index)
            encoder[own], llm[own] = entrain_microbatches(
                encoder_ms[own], llm_ms[own], each.num_microbatches, batch[own], budget
            )
        early, late = Place(replica=replica, microbatch=encoder), Place(replica=replica, microbatch=llm)
        return Assignment(units={name: early if name in names[:language] else late for name in names})


def _settled(setting: Setting, configuration: Configuration, samples: SampleTable) -> Settled:
    """Return how many samples it takes to find a configuration's devices, up to those of a replica in a step."""
    spread = configuration.units
    sizes = [each.tp * each.cp for each in spread.values()]
    work: list[Floats] = []
    for unit, size in zip(setting.costs.units, sizes, strict=True):
        curve, lengths = unit.work(spread[unit.name].tp, spread[unit.name].cp), samples.units[unit.name]
        # With each sample's share of what a microbatch takes beside, as the search counts it.
        fixed = curve.fixed / setting.microbatch if lengths.tokens.any() else 0.0
        work.append(size * (curve.of(lengths) + fixed))
    dp = spread[LLM].dp
    return settle(np.stack(work), sizes, setting.num_devices // dp, setting.global_batch // dp)


def _replicas(
    encoder_ms: Floats,
    llm_ms: Floats,
    batch: SampleTable,
    replicas: Sequence[Replica],
    budgets: Sequence[MemoryBudget | None],
) -> Ints:
    """Return the replica of each sample. What one has no memory for, even alone, goes to one that has.

    Raises:
        ValueError: None has; the message names the sample.
    """
    speeds = np.array([each.speed for each in replicas])
    replica = give_out(llm_ms, speeds, np.argsort(-encoder_ms, kind="stable"))
    holds = np.array([np.full(len(batch), True) if each is None else each.holds(batch) for each in budgets])
    load = loads(llm_ms, replica, len(replicas))
    lacking = np.flatnonzero(~holds[replica, np.arange(len(batch))])
    for sample in lacking[np.argsort(-llm_ms[lacking], kind="stable")].tolist():
        able = np.flatnonzero(holds[:, sample])
        roomiest = budgets[max(range(len(replicas)), key=lambda index: replicas[index].devices)]
        if not len(able) and roomiest is not None:
            roomiest.check(batch, np.array([sample]))
        load[replica[sample]] -= llm_ms[sample]
        replica[sample] = able[((load[able] + llm_ms[sample]) / speeds[able]).argmin()]
        load[replica[sample]] += llm_ms[sample]
    return replica


def _work_ms(setting: Setting, configuration: Configuration, batch: SampleTable, names: Iterable[str]) -> Floats:
    """Return what each sample costs some units together. [num_samples]"""
    total = np.zeros(len(batch))
    for name in names:
        spread = configuration.units[name]
        total += setting.sample_ms(name, batch.units[name], spread.tp, spread.cp)
    return total
