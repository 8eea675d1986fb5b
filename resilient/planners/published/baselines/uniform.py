"""Megatron-like planning: one parallelism for the whole model, as good as it gets, and no thought for single samples.

Of all uniform plans (:mod:`resilient.planners.published.baselines.uniform_plans`) the best by an estimate are
simulated on a batch that is known, and the best of these on some more. The optimizer is sharded over replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.packing.balance import longest_first
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import AsTheyCome, fastest
from resilient.planners.published.baselines.uniform_plans import Estimates, has_room, uniform_plans
from resilient.planners.stages.one_pipeline import is_asked_for

_BATCHES = 3
"""Known batches that the last plans are simulated on."""

_TRIED, _LAST = 16, 6
"""Plans that are simulated on the first known batch; on all of them."""


@dataclass(frozen=True)
class Uniform(AsTheyCome):
    """The planner."""

    name: str = "uniform"
    source: str = "Narayanan et al. 2021 (Megatron-LM), as DistTrain describes its use for multimodal models"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the plan that is fastest in simulation: degrees, stages, encoders' devices and microbatches.

        Args:
            setting: The job. The size of its microbatches does not bind.
            samples: Known samples of the data set; the first batches of them are simulated.

        Raises:
            ValueError: It does not fit.
        """
        batches = known_batches(setting, samples, _BATCHES)
        estimates = Estimates(self, setting, batches[0])
        plans = [replace(each, predicted_ms=estimates.step_ms(each)) for each in uniform_plans(setting, samples)]
        plans.sort(key=lambda each: round(each.predicted_ms * 1e6))
        with_room = (each for each in plans if is_asked_for(setting, each) and has_room(setting, each, samples))
        found: Sequence[Configuration] = ()
        while not found and (some := list(islice(with_room, _TRIED))):
            found = list(timed(self, setting, some, batches[:1]))
        if len(batches) > 1:
            best = sorted(found, key=lambda each: round(each.predicted_ms * 1e6))[:_LAST]
            found = list(timed(self, setting, best, batches))
        return fastest(found, self.name, setting)


@dataclass(frozen=True)
class UniformSorted(Uniform):
    """The same, with each batch sorted once: the longest sample first, each to the microbatch with least work."""

    name: str = "uniform-sorted"
    source: str = "a baseline: the longest-processing-time rule (Graham 1969) over a uniform plan's microbatches"

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Deal samples by their work in all units; all units place a sample alike."""
        replica, microbatch, speeds = slots(replicas)
        work = sum(
            (
                setting.sample_ms(name, batch.units[name], spread.tp, spread.cp)
                for name, spread in configuration.units.items()
            ),
            np.zeros(len(batch)),
        )
        slot = longest_first(work, speeds)
        place = Place(replica=replica[slot], microbatch=microbatch[slot])
        return Assignment(units=dict.fromkeys(batch.units, place))
