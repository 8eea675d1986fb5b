"""How the step's microbatches are split over pipelines of unequal speed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from resilient.templates.template import PipelineTemplate, nanoseconds


def split_microbatches(templates: Sequence[PipelineTemplate], num_microbatches: int) -> tuple[int, ...]:
    """Return the microbatches of each pipeline, so that the last pipeline to finish a step finishes earliest.

    Each microbatch goes to the pipeline that would be done with it first (ties: the earlier pipeline). That is exact
    for the latest finish and keeps the others close to it.

    Args:
        templates: The pipelines' templates.
        num_microbatches: Their sum; at least one per pipeline.

    Raises:
        ValueError: There are no pipelines, or more pipelines than microbatches.
    """
    if not templates or num_microbatches < len(templates):
        raise ValueError(
            f"num_microbatches must be at least the number of pipelines, one or more, got {num_microbatches} for "
            f"{len(templates)}; raise the global batch, lower the microbatch, or make fewer pipelines"
        )
    slowest = [_slowest_ns(template) for template in templates]
    counts = [1] * len(templates)
    done = [(nanoseconds(t.fill_ms) + 2 * slow, i) for i, (t, slow) in enumerate(zip(templates, slowest, strict=True))]
    heapq.heapify(done)
    for _ in range(num_microbatches - len(templates)):
        finish, index = done[0]
        counts[index] += 1
        heapq.heapreplace(done, (finish + slowest[index], index))
    return tuple(counts)


def step_ns(templates: Sequence[PipelineTemplate], num_microbatches: int) -> int:
    """Return the time of one step under the best split, in whole nanoseconds."""
    counts = split_microbatches(templates, num_microbatches)
    return max(nanoseconds(t.fill_ms) + count * _slowest_ns(t) for t, count in zip(templates, counts, strict=True))


def check_batch(global_batch: int, microbatch: int, num_pipelines: int) -> None:
    """Check that a global batch can be split, without ever changing it.

    Args:
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch.
        num_pipelines: Pipelines that each need at least one microbatch.

    Raises:
        ValueError: It cannot; the message recommends the nearest global batches that can.
    """
    if microbatch < 1:
        raise ValueError(f"microbatch must be >= 1, got {microbatch}; give the samples of one microbatch")
    if global_batch % microbatch == 0 and global_batch >= num_pipelines * microbatch:
        return
    smallest = num_pipelines * microbatch
    below = global_batch // microbatch * microbatch
    nearest = sorted({max(smallest, below), max(smallest, below + microbatch)})
    raise ValueError(
        f"global_batch must be a multiple of microbatch {microbatch}, at least {smallest} (one microbatch for each of "
        f"{num_pipelines} pipelines), got {global_batch}; use {' or '.join(map(str, nearest))}"
    )


def _slowest_ns(template: PipelineTemplate) -> int:
    return max(1, nanoseconds(template.slowest_ms))
