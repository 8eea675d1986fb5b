"""What limits on every pipeline's share of the batch would cost: the split of the plan under constraints."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from resilient.errors import ArgumentError
from resilient.templates.composition.batch_split import lines
from resilient.templates.composition.batch_split_model import split_with_constraints
from resilient.templates.plan import Plan

_LIMIT = re.compile(r"(min|max|multiple-of)=([1-9]\d{0,8})")


@dataclass(frozen=True, kw_only=True)
class LimitedSplit:
    """A split under limits.

    Args:
        limits: As they were given.
        num_microbatches: Of each pipeline, in the plan's order.
        step_ms: Time of the slowest of them.
    """

    limits: str
    num_microbatches: tuple[int, ...]
    step_ms: float


def limited_split(plan: Plan, limits: str) -> LimitedSplit:
    """Split a plan's microbatches anew, within limits that all of its pipelines have.

    Args:
        plan: The plan; its pipelines and layouts stay.
        limits: ``min=4,max=16,multiple-of=2`` or some of it, in microbatches.

    Raises:
        ArgumentError: The limits do not read so, or no split is within them.
        MissingPackageError: Pyomo or HiGHS is not installed.
    """
    found = _read(limits)
    num_pipelines = len(plan.pipelines)
    alone = num_pipelines == 1
    total = sum(pipeline.num_microbatches for pipeline in plan.pipelines)

    def of_each(name: str) -> list[int] | None:
        return [found[name]] * num_pipelines if name in found else None

    try:
        shares = split_with_constraints(
            [lines([pipeline.template], alone=alone) for pipeline in plan.pipelines],
            total,
            min_microbatches=of_each("min"),
            max_microbatches=of_each("max"),
            multiple_of=of_each("multiple-of"),
        )
    except ArgumentError as error:
        constraint = f"allow the plan's {total} microbatches on {num_pipelines} pipelines"
        fix = f"loosen the limits, or change {{global_batch}}: of microbatches, {error.fix}"
        raise ArgumentError("share", constraint, repr(limits), fix) from None
    times = (
        pipeline.template.iteration_ms(share, alone=alone)
        for pipeline, share in zip(plan.pipelines, shares, strict=True)
    )
    return LimitedSplit(limits=limits, num_microbatches=shares, step_ms=max(times))


def _read(limits: str) -> dict[str, int]:
    """Return the limits by name."""
    found: dict[str, int] = {}
    for part in limits.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None or match[1] in found:
            form = 'look like "min=4,max=16,multiple-of=2", each at most once'
            raise ArgumentError("share", form, repr(limits), "leave out what is not limited")
        found[match[1]] = int(match[2])
    if found.get("min", 1) > found.get("max", math.inf):
        raise ArgumentError("share", "have a min of at most its max", repr(limits), "swap them")
    return found
