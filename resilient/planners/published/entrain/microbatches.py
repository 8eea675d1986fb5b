"""A replica's microbatches within its memory: with deferral where that fits, or else as close together as can be.

Not of the paper, which has one number of microbatches and memory for them. Where that does not hold them, as after a
loss, there are more of them, and some with nothing in them where no other one fits beside those before: a replica that
has fewer in its stages at a time takes longer, but takes every batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from resilient.planners.costs.samples import SampleTable
from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.packing.memory_constrained_order import spaced
from resilient.planners.published.entrain.deferral import defer, encoder_microbatches
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.templates.common.arrays import Floats, Ints


def entrain_microbatches(
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
    if budget is None:
        microbatch = encoder_microbatches(encoder_ms, llm_ms, num_microbatches)
        return defer(encoder_ms, llm_ms, microbatch, num_microbatches)
    for early, late in _deferred(encoder_ms, llm_ms, num_microbatches, samples, budget):
        if budget.used(samples, early, late, num_microbatches) <= 1:
            return early, late
    place = _closest(encoder_ms + llm_ms, num_microbatches, samples, budget)
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


def _closest(work_ms: Floats, num_microbatches: int, samples: SampleTable, budget: MemoryBudget) -> Ints:
    """Return the microbatch of each sample, dealt the longest first, and those with most work first.

    There are as many microbatches with samples as wanted if each fits alone, or twice as many, ..., or one for each
    sample.
    """
    number, microbatch = num_microbatches, longest_first(work_ms, np.ones(num_microbatches))
    while budget.needs(samples, microbatch, number).max(initial=0.0) > 1:
        number = min(2 * number, len(samples))
        microbatch = longest_first(work_ms, np.ones(number)) if number < len(samples) else np.arange(number)
    order = np.argsort(-loads(work_ms, microbatch, number), kind="stable")
    return spaced(order, budget.needs(samples, microbatch, number), budget.windows)[microbatch]
