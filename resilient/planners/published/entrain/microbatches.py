"""A replica's microbatches within its memory: with deferral where that fits, or else as close together as can be.

Not of the paper, which has one number of microbatches and memory for them. Where that does not hold them, as after a
loss, there are more of them, and some with nothing in them where no other one fits beside those before: a replica that
has fewer in its stages at a time takes longer, but takes every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from resilient.planners.costs.samples import SampleTable
from resilient.planners.packing.balance import loads
from resilient.planners.packing.memory_constrained_order import spaced
from resilient.planners.packing.microbatch_order import pipeline_ms
from resilient.planners.published.entrain.deferral import defer, encoder_microbatches
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.templates.common.arrays import Floats, Ints


def microbatches(
    encoder_ms: Floats, llm_ms: Floats, num_microbatches: int, samples: SampleTable, budget: MemoryBudget | None
) -> tuple[Ints, Ints]:
    """Return the microbatch of each sample in encoders and in the language model.

    Args:
        encoder_ms: What each sample costs the encoder. [num_samples]
        llm_ms: What it costs the language model.
        num_microbatches: That there should be.
        samples: They; each fits into the memory alone.
        budget: The memory, None without a limit.
    """
    microbatch = encoder_microbatches(encoder_ms, llm_ms, num_microbatches)
    early, late = defer(encoder_ms, llm_ms, microbatch, num_microbatches)
    if budget is None:
        return early, late
    for early, late in _deferred(encoder_ms, llm_ms, num_microbatches, samples, budget):
        if budget.used(samples, early, late, num_microbatches) <= 1:
            return early, late
    place = _closest(encoder_ms, llm_ms, num_microbatches, samples, budget)
    return place, place


def _deferred(
    encoder_ms: Floats, llm_ms: Floats, num_microbatches: int, samples: SampleTable, budget: MemoryBudget
) -> Iterator[tuple[Ints, Ints]]:
    """Yield microbatches even in work, more and more of them, with deferral and without."""
    fewest, least = 1, budget.fewest(samples)
    while True:
        microbatch = encoder_microbatches(encoder_ms, llm_ms, num_microbatches, fewest)
        early, late = defer(encoder_ms, llm_ms, microbatch, num_microbatches)
        yield early, late
        yield early, early
        if fewest >= num_microbatches:
            return
        tried = max(fewest, len(np.unique(microbatch)))
        fewest = min(least if least > tried else 2 * tried, num_microbatches)


def _closest(
    encoder_ms: Floats, llm_ms: Floats, num_microbatches: int, samples: SampleTable, budget: MemoryBudget
) -> Ints:
    """Return the microbatch of each sample, those with most work first: as many as wanted, or twice, ..., or one each.

    Of those with which all fit, such that a step takes least.
    """
    best, best_ms = np.arange(len(samples)), np.inf
    doubled = [num_microbatches << power for power in range(len(samples).bit_length())]
    for number in (*(each for each in doubled if each < len(samples)), len(samples)):
        microbatch = np.arange(number)
        if number < len(samples):
            microbatch = encoder_microbatches(encoder_ms, llm_ms, number, number)
        needs = budget.needs(samples, microbatch, number)
        if needs.max(initial=0.0) <= 1:
            work = [loads(each, microbatch, number) for each in (encoder_ms, llm_ms)]
            position = spaced(np.argsort(-np.sum(work, axis=0), kind="stable"), needs, budget.windows)
            step_ms = _step_ms(work, position, budget)
            if step_ms < best_ms:
                best, best_ms = position[microbatch], step_ms
    return best


def _step_ms(work: Sequence[Floats], position: Ints, budget: MemoryBudget) -> float:
    """Return about how long 1F1B takes, with a forward half as long as a backward, and even stages.

    Args:
        work: Of each microbatch, of encoders and of the language model.
        position: Of each microbatch.
        budget: That has the stages.
    """
    times: list[Floats] = []
    for each, encodes in zip(work, (True, False), strict=True):
        depth = max((len(unit.windows) for unit in budget.units.values() if unit.encodes == encodes), default=0)
        placed = loads(each, position, int(position.max(initial=0)) + 1)
        times += [placed / (3 * max(depth, 1))] * depth
    return pipeline_ms(np.arange(len(times[0])), times, np.multiply(2, times))
