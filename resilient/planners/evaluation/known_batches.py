"""Simulates a planner on batches that it knows beforehand, for those that choose a configuration by what it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Configuration, Planner, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.one_pipeline import several

_BATCHES = 2
"""Known batches that candidates are simulated on."""

_CANDIDATES, _SAMPLES = 8, 2**14
"""Candidates that are simulated at most, and samples of all these steps, if two are: large jobs take seconds each."""


def known_batches(setting: Setting, samples: SampleTable, count: int) -> Sequence[SampleTable]:
    """Return so many global batches of the samples that a planner is given, which repeat where there are too few.

    They are those of the whole job where there are peers.

    Args:
        setting: The job.
        samples: They.
        count: How many batches at most; samples that are not in them are not simulated.
    """
    size = setting.with_peers.global_batch
    count = max(1, min(count, len(samples) // size))
    chosen = np.arange(count * size) % len(samples)
    return [samples[chosen[start : start + size]] for start in range(0, len(chosen), size)]


def simulated(
    planner: Planner, setting: Setting, configuration: Configuration, batches: Sequence[SampleTable]
) -> Iterator[Result]:
    """Yield the steps of batches that a planner assigns, with all nodes there, and all peers alike."""
    whole, together = setting.with_peers, several(configuration, 1 + setting.num_peers)
    replicas = degraded_replicas(whole, together, 0)
    for batch in batches:
        assignment = planner.assign(whole, together, batch, replicas)
        yield evaluate(whole, together, assignment, batch, replicas)


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


def fastest_simulated(
    planner: Planner, setting: Setting, candidates: Sequence[Configuration], samples: SampleTable
) -> Configuration:
    """Return which of the first candidates has steps of known batches that take least on average, and predict that.

    Of those that memory holds, if there are any; of equals the first one.

    Args:
        planner: Who assigns.
        setting: The job.
        candidates: At least one, those of which most is expected first. Where known batches have room in none, the
            first is returned as it is.
        samples: What the planner knows of the data.
    """
    batches, memory = known_batches(setting, samples, _BATCHES), setting.cluster.memory_bytes or np.inf
    found: list[tuple[bool, int, int, Configuration]] = []
    count = min(max(_SAMPLES // sum(map(len, batches)), 2), _CANDIDATES)
    for number, each in enumerate(candidates[:count]):
        with contextlib.suppress(ValueError):  # a sample has no room
            results = list(simulated(planner, setting, each, batches))
            step_ms = float(np.mean([result.iteration_ms for result in results]))
            lacks = max(result.peak_bytes for result in results) > memory
            found.append((lacks, round(step_ms * 1e6), number, replace(each, predicted_ms=step_ms)))
    return min(found, key=lambda each: each[:3])[3] if found else candidates[0]
