"""What a step is for a pipeline that is a chain, whose cells are microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resilient.models.layer import Batch
from resilient.pipeline.step_work import StepWork
from resilient.templates.schedules.schedule import Schedule


def chain_work(
    *,
    step: int,
    schedule: Schedule,
    row: int,
    num_targets: int,
    positions: Sequence[int],
    batch: Callable[[int], Batch],
) -> StepWork:
    """Return the work of a step.

    Args:
        step: Its number.
        schedule: Of the pipeline.
        row: That is run.
        num_targets: Loss-bearing targets of the global batch.
        positions: Index, within the step's microbatches, of each of this pipeline's.
        batch: Loads the collated microbatch at a position.
    """
    return StepWork(
        step=step,
        schedule=schedule,
        row=row,
        num_targets=num_targets,
        position=lambda part: positions[part.cell],
        batch=lambda part: batch(positions[part.cell]),
        samples=lambda part: (positions[part.cell],),
        num_features=lambda source, target, sample: 1,
    )
