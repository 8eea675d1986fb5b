"""Our planner: the configuration that is fastest in simulation, with samples dealt the longest first.

A configuration is chosen by simulating batches of known samples, dealt as those of a step are. All units place a sample
alike. With one stage they go to replicas by what they take in all units, and within a replica likewise to as few
microbatches as the memory holds, as none has to fill a pipeline; in pipelines, to the microbatch with least work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import known_batches
from resilient.planners.own.candidates import candidates, has_one_stage
from resilient.planners.packing.balance import deal_whole, loads, longest_first
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.published.baselines.uniform import UniformSorted
from resilient.planners.stages.memory_shares import kept_shares
from resilient.templates.common.arrays import Floats, Ints

_KNOWN_BATCHES = 2
"""That a configuration is simulated with."""


@dataclass(frozen=True)
class ResilientPlanner:
    """The planner."""

    name: str = "resilient"
    source: str = "this project; the longest first by Graham (1969), HSDP by Zhao et al. 2023 (PyTorch FSDP)"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the configuration whose steps of known batches take least.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: None fits.
        """
        batches = known_batches(setting, samples, _KNOWN_BATCHES)
        found: list[Configuration] = []
        best_ms = np.inf
        # What takes longer than another at the very least need not be simulated.
        bounds = [(_least_ms(setting, each, batches), each) for each in candidates(setting, samples)]
        for least_ms, each in sorted(bounds, key=lambda bound: bound[0]):
            if least_ms >= best_ms:
                break
            with contextlib.suppress(ValueError):  # it has no memory for a batch
                found.append(self._simulated(setting, each, batches))
                best_ms = min(best_ms, found[-1].predicted_ms)
        return fastest(found, self.name, setting)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Deal samples to replicas and to their microbatches, the longest first.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: As they are now.

        Raises:
            ValueError: The batch does not fit into the memory of one stage.
        """
        if not has_one_stage(configuration):
            # What a pipeline holds at a time was seen in simulation.
            return UniformSorted().assign(setting, configuration, batch, replicas)
        work = _work_ms(setting, configuration, batch)
        counts = np.array([each.num_microbatches for each in replicas])
        replica = longest_first(work, [each.speed for each in replicas])
        room = configuration.units[LLM].cp + 1e-9
        number = 1
        shares = kept_shares(setting, configuration, batch, replicas)
        while True:
            place = _dealt(work, replica, np.minimum(counts, number))
            fullest = loads(shares, replica * number + place.microbatch, len(replicas) * number).max()
            if fullest <= room:
                return Assignment(units=dict.fromkeys(configuration.units, place))
            if number >= counts.max():
                raise ArgumentError(
                    "batch",
                    f"fit into {int(counts.sum())} microbatches on {len(replicas)} replicas",
                    f"one that takes {fullest / room:.2f} times the memory of a device",
                    "configure the job again, or use more devices",
                )
            needed = loads(shares, replica, len(replicas)).max() / room
            number = min(max(number + 1, int(np.ceil(needed))), int(counts.max()))

    def _simulated(
        self, setting: Setting, configuration: Configuration, batches: Sequence[SampleTable]
    ) -> Configuration:
        """Return a configuration with the microbatches it needs, and what a step with these batches takes.

        Raises:
            ValueError: One does not fit.
        """
        replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp
        if has_one_stage(configuration):
            placed = [self.assign(setting, configuration, batch, replicas).units[LLM].microbatch for batch in batches]
            number = 1 + max(int(each.max(initial=0)) for each in placed)
            configuration = replace(configuration, num_microbatches=number)
            replicas = [Replica(num_microbatches=number)] * len(replicas)
        steps: list[float] = []
        for batch in batches:
            assignment = self.assign(setting, configuration, batch, replicas)
            result = evaluate(setting, configuration, assignment, batch, replicas)
            if setting.cluster.memory_bytes is not None and result.peak_bytes > setting.cluster.memory_bytes:
                raise ArgumentError("memory_bytes", f"be >= {result.peak_bytes}", setting.cluster.memory_bytes, "")
            steps.append(result.iteration_ms)
        return replace(configuration, predicted_ms=float(np.mean(steps)))


def _least_ms(setting: Setting, configuration: Configuration, batches: Sequence[SampleTable]) -> float:
    """Return what a step takes at least: its work on all devices at once, in one stage its longest sample."""
    stages = [each.pp for each in configuration.units.values()]
    rows = configuration.units[LLM].dp * (max(stages) if configuration.colocated else sum(stages))
    work = [_work_ms(setting, configuration, batch) for batch in batches]
    longest = float(has_one_stage(configuration))
    return float(np.mean([max(each.sum() / rows, longest * each.max(initial=0)) for each in work]))


def _work_ms(setting: Setting, configuration: Configuration, batch: SampleTable) -> Floats:
    """Return what samples take in all units. [num_samples]"""
    times = [
        setting.sample_ms(name, batch.units[name], spread.tp, spread.cp) for name, spread in configuration.units.items()
    ]
    return np.sum(times, axis=0)


def _dealt(work: Floats, replica: Ints, counts: Ints) -> Place:
    """Return the place of each sample, when a replica has so many microbatches: first those with most work."""
    ends = np.cumsum(counts)
    bins = np.stack([ends - counts, ends], axis=1)[replica]
    slot = deal_whole(work, bins, np.zeros_like(replica))
    of_slot = np.repeat(np.arange(len(counts)), counts)
    position = np.empty(len(of_slot), dtype=np.int64)
    position[np.lexsort((-loads(work, slot, len(of_slot)), of_slot))] = np.arange(len(of_slot))
    return Place(replica=replica, microbatch=position[slot] - (ends - counts)[replica])
