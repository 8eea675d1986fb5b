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
from resilient.planners.evaluation.step_unit import StepUnit, step_units
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
    return {
        unit.costs.name: _stage_ms(unit) for unit in step_units(setting, configuration, assignment, batch, replicas)
    }


def corrected(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
    measured_ms: Mapping[str, Floats],
    *,
    cost_ms: float,
) -> Setting:
    """Return the job with a correction that has learnt from one more step: what the next is to be assigned with.

    What correction brings a step is how much nearer to the truth the largest error is that a device of any lane was
    assigned work with. A common factor on all predictions moves nothing, and does not count; the paper does not say
    what a benefit is. Where measuring takes more, tracking stops, and little is learnt until the error has grown.

    Args:
        setting: The job as it is corrected so far.
        configuration: How it uses its devices.
        assignment: Where the samples went.
        batch: The samples.
        replicas: What ``assign`` was given.
        measured_ms: As :func:`cell_times` returns them, measured. Steps are, of which ``setting.correction.tracking``
            says so.
        cost_ms: What it took to measure and to learn.

    Raises:
        ValueError: They are of other cells.
    """
    seen, known = list[Observation](), setting.correction
    # Of all lanes, and of all their cells: predicted, corrected and measured.
    of_lanes, of_cells = [np.zeros((3, 0))], [np.zeros((3, 0))]
    for unit in step_units(setting, configuration, assignment, batch, replicas):
        name, predicted = unit.costs.name, _stage_ms(unit)
        measured = measured_ms.get(name, np.empty(0))
        if measured.shape != predicted.shape:
            raise ArgumentError(
                "measured_ms",
                f"have {predicted.shape} times of {name!r}, by stage and cell",
                measured.shape,
                "give those of the step that was assigned so",
            )
        longest = np.zeros(predicted.shape[1], np.int64)
        np.maximum.at(longest, unit.cell, unit.lengths.longest)
        before, after = predicted.sum(axis=0), measured.sum(axis=0)
        cells = np.stack([before, before * known.factor(name, unit.spread.tp, longest), after])
        of_cells.append(cells)
        of_lanes.append(cells.reshape(3, -1, unit.width).sum(axis=2) / unit.spread.pp)
        seen += [
            Observation(unit=name, tp=unit.spread.tp, tokens=tokens, predicted_ms=before, actual_ms=after)
            for tokens, before, after in zip(longest.tolist(), before.tolist(), after.tolist(), strict=True)
            if before > 0 and after > 0
        ]
    if not seen:
        return setting
    uncorrected, now, true = np.concatenate(of_lanes, axis=1)
    _, right, taken = np.concatenate(of_cells, axis=1)
    tracking = known.tracking.after(
        benefit_ms=_largest_error(uncorrected, true) - _largest_error(now, true),
        cost_ms=cost_ms,
        error=float(np.abs(taken - right).sum() / taken.sum()),
    )
    learnt = known.observe(seen) if known.tracking.on or tracking.on else known
    return replace(setting, correction=replace(learnt, tracking=tracking))


def _stage_ms(unit: StepUnit) -> Floats:
    return (unit.parts.forward_ms + unit.parts.backward_ms).sum(axis=2) / unit.speeds


def _largest_error(predicted: Floats, actual: Floats) -> float:
    """Return by how much the worst prediction is off, once all of them have the right sum."""
    return float(np.abs(actual - predicted * (actual.sum() / predicted.sum())).max())
