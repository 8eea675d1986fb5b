"""Our planner: the configuration that is fastest in simulation, with samples dealt evenly.

Configurations of one stage (:mod:`resilient.planners.own.candidates`) are simulated with batches of known samples,
dealt as those of a step are. Where none of them comes near the bound that no plan is faster than, the answers of other
planners are simulated as well, and the fastest of all is taken, with the rule of its planner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import known_batches
from resilient.planners.own.candidates import as_dealt, holds_longer, one_stage
from resilient.planners.own.dealing import deal_to_stage
from resilient.planners.own.least import least_ms
from resilient.planners.planner import Assignment, Configuration, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.registry import check_generators, planner
from resilient.planners.stages.one_pipeline import is_asked_for, part_of, several

_KNOWN_SAMPLES = 1024
"""That a configuration is simulated with, in four batches at most, and in one at least."""

_ASKED = (
    "uniform-sorted",
    "uniform",
    "dip",
    "static-cp",
    "cornstarch",
    "disttrain",
    "dflop",
    "dhp",
    "orchmllm",
    "entrain",
)
"""Other planners whose answers may be faster."""

_MANY_DEVICES = 1024
"""On more of them one other is asked alone, the first: all would take too long."""

_LONGER = 1.25
"""Samples may be as much longer than all that are known, if some configuration has memory for these."""

_NEAR = 1.1
"""Times the bound: others are not asked where a plan is as near."""

_WORTH = 0.995
"""Of the time of the best: what may take more than that at the very least is not simulated."""


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
        whole, times = setting.with_peers, 1 + setting.num_peers
        count = min(max(1, _KNOWN_SAMPLES // whole.global_batch), 4)
        batches = known_batches(setting, samples, count)
        found = self._of_one_stage(setting, samples, batches)
        best_ms = min((each.predicted_ms for each in found), default=np.inf)
        if best_ms > _NEAR * np.mean([bound_ms(whole, batch) for batch in batches]):
            for name in _ASKED if setting.num_devices <= _MANY_DEVICES else _ASKED[:1]:
                with contextlib.suppress(ValueError):  # it has none that fits
                    check_generators(name, setting.costs)
                    theirs = replace(planner(name).configure(setting, samples), assigned_by=name)
                    found.append(self._simulated(whole, several(theirs, times), batches))
        return fastest([part_of(each, times) for each in found], self.name, setting)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Deal samples to replicas and to their microbatches.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: As they are now.

        Raises:
            ValueError: A sample does not fit into the memory of one stage.
        """
        if configuration.assigned_by:
            return planner(configuration.assigned_by).assign(setting, configuration, batch, replicas)
        return deal_to_stage(setting, configuration, batch, replicas)

    def _of_one_stage(
        self, setting: Setting, samples: SampleTable, batches: Sequence[SampleTable]
    ) -> list[Configuration]:
        """Return configurations of one stage, of all peers together, with their times, the fastest among them."""
        whole, times = setting.with_peers, 1 + setting.num_peers
        for longer, wide in ((_LONGER, False), (1.0, False), (1.0, True)):
            shapes = [
                several(each, times)
                for each in one_stage(setting, wide=wide)
                if is_asked_for(setting, each) and holds_longer(setting, each, samples, longer)
            ]
            least = [least_ms(whole, each, batches) for each in shapes]
            found: list[Configuration] = []
            best_ms = np.inf
            for index in np.argsort(least, kind="stable"):
                if least[index] >= _WORTH * best_ms:
                    break
                with contextlib.suppress(ValueError):  # it has no memory for a batch
                    expected = as_dealt(whole, shapes[index], batches)
                    found.append(self._simulated(whole, expected, batches))
                    best_ms = min(best_ms, found[-1].predicted_ms)
            if found:
                return found
        return []

    def _simulated(
        self, setting: Setting, configuration: Configuration, batches: Sequence[SampleTable]
    ) -> Configuration:
        """Return a configuration with what a step with these batches takes.

        Raises:
            ValueError: One does not fit.
        """
        replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp
        steps: list[float] = []
        for batch in batches:
            assignment = self.assign(setting, configuration, batch, replicas)
            result = evaluate(setting, configuration, assignment, batch, replicas)
            if setting.cluster.memory_bytes is not None and result.peak_bytes > setting.cluster.memory_bytes:
                raise ArgumentError("memory_bytes", f"be >= {result.peak_bytes}", setting.cluster.memory_bytes, "")
            steps.append(result.iteration_ms)
        return replace(configuration, predicted_ms=float(np.mean(steps)))
