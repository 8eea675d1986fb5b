"""Which ranks of a generation send each other activations and parts of states, and whether over NCCL where it is."""

from __future__ import annotations

from itertools import combinations, pairwise, product

from resilient.templates.plan import Plan
from resilient.templates.schedules.kind import CHUNK_KINDS


def goes_over_nccl(plan: Plan, planner: str, schedule: str) -> bool:
    """Return whether tensors go from GPU to GPU where all ranks have one, and not by way of the hosts, over gloo.

    NCCL's messages carry no tags: it is for jobs in which both ends order theirs alike. Nor do the devices of a stage
    exchange parts over it yet.
    """
    several = any(stage.num_devices > 1 for slot in plan.slots for stage in slot.stages)
    return not (planner or schedule in CHUNK_KINDS or several)


def exchanging_pairs(plan: Plan, planner: str, rank: int) -> list[tuple[int, int]] | None:
    """Return the pairs of a rank's pipeline: devices of a stage, and of stages that follow each other.

    None, on all ranks, for planned jobs: their features may go from any pipeline to any other.

    Args:
        plan: Of the generation.
        planner: The job's; "" for a chain.
        rank: One of the generation; who has no place in the plan exchanges nothing.
    """
    if planner:
        return None
    if rank >= len(plan.slots):
        return []
    pipeline = plan.slots[rank].pipeline_index
    rows = [[slot.rank for slot in row] for row in plan.rows_of(pipeline)]
    pairs = {pair for row in rows for pair in combinations(row, 2)}
    for one, other in pairwise(plan.pipelines[pipeline].template.row_of):
        if one != other:  # devices of as many talk to their like
            together = zip if len(rows[one]) == len(rows[other]) else product
            pairs |= {(min(pair), max(pair)) for pair in together(rows[one], rows[other])}
    return sorted(pairs)
