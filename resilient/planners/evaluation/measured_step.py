"""Corrects predictions by the stage times of a step: measured ones, or those that other costs say.

This is what closes DFLOP's loop (adaptive correction, section 3.4.3): a step is assigned by corrected costs, its times
are measured, and the next one is assigned by what they teach. Every worker must be given the same times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.correction import Observation
from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.planner import Assignment, Configuration, Replica, Setting
from resilient.templates.common.arrays import Floats


def cell_times(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> dict[str, Floats]:
    """Return what a step's stages take by the costs, without correction.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        assignment: Where the samples go.
        batch: The samples.
        replicas: What ``assign`` was given.

    Returns:
        By unit, forward and backward of each cell on each stage, 0 where there is nothing to do. [num_stages,
        num_cells], where each of the unit's lanes has as many cells, lane by lane.
    """
    times: dict[str, Floats] = {}
    for costs in setting.costs.units:
        unit = StepUnit.of(configuration, costs, assignment, batch, replicas)
        times[costs.name] = (unit.work.forward_ms + unit.work.backward_ms) / unit.speeds
    return times


def corrected(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
    measured_ms: Mapping[str, Floats],
) -> Setting:
    """Return the job with a correction that has learnt from one more step: what the next is to be assigned with.

    Args:
        setting: The job as it is corrected so far.
        configuration: How it uses its devices.
        assignment: Where the samples went.
        batch: The samples.
        replicas: What ``assign`` was given.
        measured_ms: As :func:`cell_times` returns them, measured.

    Raises:
        ValueError: They are of other cells.
    """
    predicted_ms = cell_times(setting, configuration, assignment, batch, replicas)
    seen: list[Observation] = []
    for name, predicted in predicted_ms.items():
        measured = measured_ms.get(name, np.empty(0))
        if measured.shape != predicted.shape:
            raise ArgumentError(
                "measured_ms",
                f"have {predicted.shape} times of {name!r}, by stage and cell",
                measured.shape,
                "give those of the step that was assigned so",
            )
        unit = StepUnit.of(configuration, setting.costs.by_name[name], assignment, batch, replicas)
        longest = np.zeros(predicted.shape[1], np.int64)
        np.maximum.at(longest, unit.cell, unit.lengths.longest)
        of_cells = longest, predicted.sum(axis=0), measured.sum(axis=0)
        tp = configuration.units[name].tp
        seen += [
            Observation(unit=name, tp=tp, tokens=tokens, predicted_ms=before, actual_ms=after)
            for tokens, before, after in zip(*(each.tolist() for each in of_cells), strict=True)
            if before > 0 and after > 0
        ]
    return replace(setting, correction=setting.correction.observe(seen))
