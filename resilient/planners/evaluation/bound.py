"""The time below which no plan takes a batch: what all planners are measured against."""

from __future__ import annotations

import numpy as np

from resilient.planners.costs.samples import SampleTable
from resilient.planners.planner import Setting


def bound_ms(setting: Setting, batch: SampleTable, lost_nodes: int = 0) -> float:
    """Return how long a step takes at least: all work of the batch, spread evenly over all devices.

    The work of a sample in a unit is its forward and backward in all layers times the devices that share it, at the
    profiled tensor- and context-parallel degree at which that is least. What calls take beside their samples counts
    nothing, nor do messages, sums of gradients, waiting, and memory. Sharing a sample among more devices than were
    profiled makes no less work of it in all (:func:`~resilient.planners.stages.call_work.curves_at`).

    Args:
        setting: The job.
        batch: The global batch.
        lost_nodes: Nodes that are not there.
    """
    work_ms = 0.0
    for unit in setting.costs.units:
        each = [tp * cp * unit.work(tp, cp).of(batch.units[unit.name]) for tp, cp in unit.degrees]
        work_ms += float(np.min(each, axis=0).sum())
    return work_ms / ((setting.num_nodes - lost_nodes) * setting.cluster.devices_per_node)
