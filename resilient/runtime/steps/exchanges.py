"""Which ranks of a generation send each other activations and parts of states, and whether over NCCL where it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.templates.plan import Plan, Slot
from resilient.templates.schedules.kind import CHUNK_KINDS

LaneRows = Sequence[Sequence[Slot]]
"""The places of each row's devices."""


def goes_over_nccl(plan: Plan, planner: str, schedule: str) -> bool:
    """Return whether tensors go from GPU to GPU where all ranks have one, and not by way of the hosts, over gloo.

    NCCL's messages carry no tags: it is for jobs in which both ends order theirs alike. Nor do the devices of a stage
    exchange parts over it yet.
    """
    several = any(stage.num_devices > 1 for slot in plan.slots for stage in slot.stages)
    return not (planner or schedule in CHUNK_KINDS or several)


def lanes_of(
    plan: Plan, pipeline: int, feeds: Sequence[tuple[str, str]] | None, trained: Sequence[bool]
) -> tuple[PlanLanes, LaneRows]:
    """Return the lanes of all pipelines that one may exchange tensors with, and their rows.

    Args:
        plan: Of the generation.
        pipeline: The one.
        feeds: Which unit's features go to which later one, of whatever pipeline; None for a chain, whose pipelines
            exchange nothing.
        trained: Of each of the model's layers.
    """
    if feeds is None:
        return PlanLanes(Plan(pipelines=(plan.pipelines[pipeline],)), (), trained), plan.rows_of(pipeline)
    return PlanLanes(plan, feeds, trained), plan.rows


def row_of(rows: LaneRows, rank: int) -> int:
    """Return the number of the row that a rank is in."""
    return next(number for number, devices in enumerate(rows) if rank in {device.rank for device in devices})


def exchanging_pairs(lanes: PlanLanes, rows: LaneRows, rank: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks that may send each other tensors, this one's: devices of its stage, and of neighbours.

    Args:
        lanes: See :func:`lanes_of`.
        rows: Theirs.
        rank: One of them.
    """
    number = row_of(rows, rank)
    beside = dict.fromkeys(lanes.row_of[stage] for border in lanes.borders(number) for stage in border)
    own, *others = ([device.rank for device in rows[each]] for each in {number: None, **beside})
    pairs = set(combinations(own, 2))
    for other in others:  # devices of as many talk to their like
        pairs.update((zip if len(own) == len(other) else product)(own, other))
    return sorted({(min(pair), max(pair)) for pair in pairs if rank in pair})
