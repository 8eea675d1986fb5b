"""When the gradients of a step are summed over replicas, by rings of their devices.

Rings of units that share devices share these devices' network, so their sums follow each other. The sum of a layer's
gradient starts when its last backward ends; the layers of a stage follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.planner import Configuration, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.node_places import least_members, nodes_of_state, rings_of
from resilient.planners.stages.stage_work import by_stage, last_part, placed_ring_ms
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.simulator import Timeline


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """The sum of the gradients of what all lanes of a unit have on the same stage."""

    ready_ns: int  # from when there is something to sum: the last backward begins
    done_ns: int  # it ends
    length_ns: int
    last_ns: int  # of it, for the layer whose gradient is final last
    rows: Ints


def sums_end_ns(
    setting: Setting, configuration: Configuration, units: Sequence[StepUnit], layout: DeviceLayout, timeline: Timeline
) -> int:
    """Return when all gradients of a step are summed.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        units: All that are trained, each by itself.
        layout: Where their lanes are.
        timeline: Of the step.
    """
    codes, graph = timeline.schedule.codes, timeline.schedule.graph
    computes = codes[:, 0] <= Op.BACKWARD_WEIGHT
    begun, done = np.zeros((2, graph.num_stages), np.int64)
    np.maximum.at(begun, codes[computes, 1], timeline.start_ns[computes])
    np.maximum.at(done, codes[computes, 1], timeline.end_ns[computes])
    sums: list[_Sum] = []
    for unit in reversed(units):
        host = layout.host(unit.costs.name)
        first, rows = graph.first_stage[LaneName(host)], layout.rows[host]
        own = (each[first : first + rows.size].reshape(rows.shape) for each in (begun, done))
        found = list(_sums(unit, rows, ring_sums_ms(setting, configuration, unit, layout), *own))
        if found and layout.replicated:  # all are one backward, which ends with this unit's
            sums = [replace(each, done_ns=0, last_ns=0) for each in sums]
        sums += found
    free = np.zeros(len(layout.sizes), np.int64)
    for each in sorted(sums, key=lambda each: each.ready_ns):
        begin = max(each.ready_ns, int(free[each.rows].max()))
        free[each.rows] = max(begin + each.length_ns, each.done_ns + each.last_ns)
    return int(free.max(initial=0))


def _sums(unit: StepUnit, rows: Ints, lengths_ms: Floats, begun: Ints, done: Ints) -> Iterator[_Sum]:
    """Yield the sums of a unit's stages; of one that every stage of the language model runs, a single one.

    Args:
        unit: The unit.
        rows: That run it. [num_lanes, num_stages]
        lengths_ms: Of its stages.
        begun: The last backward on each row; of the same shape.
        done: Likewise.
    """
    if len(lengths_ms) < rows.shape[1]:
        rows, begun, done = (each.reshape(-1, 1) for each in (rows, begun, done))
    parts = last_part(unit.costs, unit.spread)
    for stage in np.flatnonzero(lengths_ms).tolist():
        yield _Sum(
            ready_ns=int(begun[:, stage].max()),
            done_ns=int(done[:, stage].max()),
            length_ns=round(1e6 * float(lengths_ms[stage])),
            last_ns=round(1e6 * float(lengths_ms[stage] * parts[stage])),
            rows=rows[:, stage],
        )


def ring_sums_ms(setting: Setting, configuration: Configuration, unit: StepUnit, layout: DeviceLayout) -> Floats:
    """Return how long rings sum each stage's gradients over all its copies, where these are. [num_stages]

    Of devices that divide a copy, each sums its part with those that have the same one.
    """
    cluster, spread = setting.cluster, unit.spread
    nodes = nodes_of_state(layout, spread, unit.costs.name, cluster.devices_per_node)
    copies = np.swapaxes(rings_of(nodes, configuration.shard), -1, -2)
    shard, size = copies.shape[-2:]
    members = least_members(copies).reshape(len(nodes), -1).min(axis=1)
    num_bytes = by_stage(spread, unit.costs.gradient_bytes) / spread.tp / shard
    return placed_ring_ms(num_bytes, size, members, cluster)
