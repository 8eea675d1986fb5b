"""What one step is for one worker: its row of a schedule, and the samples of what is computed in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilient.models.layer import Batch
from resilient.pipeline.finite_watch import FiniteWatch
from resilient.pipeline.row_actions import CellPart
from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one step is for one worker.

    Args:
        step: Its number, 1 for the first.
        schedule: What the rows of its pipeline do, or of several that exchange features; it may differ from step to
            step.
        row: The worker's.
        num_targets: Loss-bearing targets of the global batch.
        position: Number of a part's samples within the step, whoever has them: random layers draw from it.
        batch: Loads a part's samples, collated, on the stage's device.
        samples: Says which samples of the step are in a part, in order; asked where units feed each other.
        num_features: Says how many rows go from a unit to one that it feeds, of a sample; likewise.
        idle: Cells of lanes that this worker has no samples of, while other devices of its stage have some.
        watch: Sees what every layer makes of it, where the step is repeated for that.
    """

    step: int
    schedule: Schedule
    row: int
    num_targets: int
    position: Callable[[CellPart], int]
    batch: Callable[[CellPart], Batch]
    samples: Callable[[CellPart], tuple[int, ...]]
    num_features: Callable[[str, str, int], int]
    idle: frozenset[tuple[LaneName, int]] = frozenset()
    watch: FiniteWatch | None = None
