"""Which ranks of a generation exchange activations over NCCL, where it is used."""

from __future__ import annotations

from itertools import pairwise

from resilient.templates.plan import Plan
from resilient.templates.schedules.kind import CHUNK_KINDS


def pairs_over_nccl(plan: Plan, planner: str, schedule: str) -> list[tuple[int, int]] | None:
    """Return neighbours in a pipeline; None where everything goes by way of the hosts, over gloo.

    NCCL's messages carry no tags: it is for jobs in which both ends order theirs alike. Nor do the devices of a stage
    exchange parts over it yet.
    """
    several = any(stage.num_devices > 1 for slot in plan.slots for stage in slot.stages)
    if planner or schedule in CHUNK_KINDS or several:
        return None
    neighbours = pairwise(plan.slots)
    return [(left.rank, right.rank) for left, right in neighbours if left.pipeline_index == right.pipeline_index]
