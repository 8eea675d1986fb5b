"""Entrain: devices in proportion to work, microbatches even for the encoder, deferral for the language model.

Source: Entrain (chapter 4 of Jang's dissertation), section 4.4: the configuration is
:mod:`resilient.planners.entrain_search`'s business, microbatches are :mod:`resilient.planners.deferral`'s. Samples are
given to replicas in order of the encoder's work, each to the one that is first done with its work for the language
model.

With several encoders their work is added up. Replicas may be of unequal speed and have unequal numbers of microbatches:
a sample's work is divided by the speed, and each replica's microbatches are put together on their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from resilient.planners.allocation import settle
from resilient.planners.balance import Floats, give_out
from resilient.planners.deferral import defer, encoder_microbatches
from resilient.planners.entrain_search import search
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.samples import SampleTable
from resilient.planners.stage_work import by_stage, state_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entrain:
    """The planner."""

    name: str = "entrain"
    source: str = "Entrain (Jang's dissertation, chapter 4), section 4.4"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the configuration that takes least for the mean sample.

        Logs a warning when other samples as many as these could well have led to another allocation.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        configuration = search(setting, samples)
        spread = configuration.units
        work = [
            unit.work(spread[unit.name].tp, spread[unit.name].cp).of(samples.units[unit.name])
            * (spread[unit.name].tp * spread[unit.name].cp)
            for unit in setting.costs.units
        ]
        sizes = [each.tp * each.cp for each in spread.values()]
        settled = settle(np.stack(work), sizes, setting.num_devices // spread[LLM].dp)
        if not settled.settled:
            logger.warning("%s", settled)
        elif settled.num_samples > len(samples):
            logger.warning("only %s, and got %s; give more", settled, len(samples))
        return configuration

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Place samples; the language model processes those that are deferred one microbatch after the encoders.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        names = list(configuration.units)
        language = names.index(LLM)
        encoder_ms = _work_ms(setting, configuration, batch, names[:language])
        llm_ms = _work_ms(setting, configuration, batch, names[language:])
        order = np.argsort(-encoder_ms, kind="stable")
        replica = give_out(llm_ms, [each.speed for each in replicas], order)
        encoder, llm = np.zeros_like(replica), np.zeros_like(replica)
        for index, each in enumerate(replicas):
            own = np.flatnonzero(replica == index)
            fewest = _fewest_microbatches(setting, configuration, batch[own])
            microbatch = encoder_microbatches(encoder_ms[own], llm_ms[own], each.num_microbatches, fewest)
            encoder[own], llm[own] = defer(encoder_ms[own], llm_ms[own], microbatch, each.num_microbatches)
        early, late = Place(replica=replica, microbatch=encoder), Place(replica=replica, microbatch=llm)
        return Assignment(units={name: early if name in names[:language] else late for name in names})


def _work_ms(setting: Setting, configuration: Configuration, batch: SampleTable, names: Iterable[str]) -> Floats:
    """Return what each sample costs some units together. [num_samples]"""
    total = np.zeros(len(batch))
    for name in names:
        spread = configuration.units[name]
        total += setting.sample_ms(name, batch.units[name], spread.tp, spread.cp)
    return total


def _fewest_microbatches(setting: Setting, configuration: Configuration, samples: SampleTable) -> int:
    """Return how many microbatches a replica's samples need if what 1F1B holds, and deferral, is to fit into memory."""
    memory = setting.cluster.memory_bytes
    if memory is None:
        return 1
    fewest, behind = 1.0, 0
    names = list(configuration.units)
    for name in reversed(names):
        unit, spread = setting.costs.by_name[name], configuration.units[name]
        index, early = unit.index(spread.tp, spread.cp), names.index(name) < names.index(LLM)
        held = behind + np.arange(spread.pp, 0, -1) + early
        kept = by_stage(spread, [layer.curves[index].activation_bytes for layer in unit.layers])
        kept *= float(samples.units[name].tokens.sum())
        kept *= by_stage(spread, [layer.trainable or layer.input_gradient for layer in unit.layers]) > 0
        free = np.maximum(memory - state_bytes(unit, spread, sharded=False), 1.0)
        # A stage that all fits into need not hold fewer.
        fewest = max(fewest, float(np.where(kept <= free, 1.0, np.ceil(kept * held / free)).max()))
        behind += 0 if early else spread.pp
    return int(min(fewest, 2.0**31))
