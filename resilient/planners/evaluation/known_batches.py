"""Simulates a planner on batches that it knows beforehand, for those that choose a configuration by what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Configuration, Planner, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas


def known_batches(setting: Setting, samples: SampleTable, count: int) -> Sequence[SampleTable]:
    """Return so many global batches of the samples that a planner is given, which repeat where there are too few.

    Args:
        setting: The job.
        samples: They.
        count: How many batches at most; samples that are not in them are not simulated.
    """
    size = setting.global_batch
    count = max(1, min(count, len(samples) // size))
    chosen = np.arange(count * size) % len(samples)
    return [samples[chosen[start : start + size]] for start in range(0, len(chosen), size)]


def simulated(
    planner: Planner, setting: Setting, configuration: Configuration, batches: Sequence[SampleTable]
) -> Iterator[Result]:
    """Yield the steps of batches that a planner assigns, with all nodes there."""
    replicas = degraded_replicas(setting, configuration, 0)
    for batch in batches:
        assignment = planner.assign(setting, configuration, batch, replicas)
        yield evaluate(setting, configuration, assignment, batch, replicas)


def timed(
    planner: Planner, setting: Setting, plans: Sequence[Configuration], batches: Sequence[SampleTable]
) -> Iterator[Configuration]:
    """Yield the plans whose steps fit, with the time that these take on average.

    Args:
        planner: That assigns.
        setting: The job.
        plans: That may be taken.
        batches: That are known.
    """
    limit = setting.cluster.memory_bytes
    for plan in plans:
        results = list(simulated(planner, setting, plan, batches))
        if limit is None or max(each.peak_bytes for each in results) <= limit:
            yield replace(plan, predicted_ms=float(np.mean([each.iteration_ms for each in results])))
