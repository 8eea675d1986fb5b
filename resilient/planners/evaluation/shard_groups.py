"""What a unit's cells take where devices divide a copy of its parameters, and gather them layer by layer.

All devices of such a group take part in every gather, so they go through their cells in step: a cell takes as long as
that of the group's device that takes longest, and as the messages that it hides. A device that has no samples in it
gathers nevertheless.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from resilient.planners.costs.samples import LLM
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.planner import Configuration, Setting
from resilient.planners.stages.call_work import Work
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.node_places import least_members, nodes_of_state, rings_of
from resilient.planners.stages.stage_work import gathers_ms
from resilient.templates.common.arrays import Floats, Ints


def in_step(setting: Setting, configuration: Configuration, unit: StepUnit, layout: DeviceLayout) -> StepUnit:
    """Return a unit whose lanes that divide a copy are in step.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        unit: As if each lane were alone.
        layout: Where lanes are.
    """
    num_lanes = len(unit.tokens) // unit.width
    group, cluster = in_step_groups(num_lanes, configuration), setting.cluster
    nodes = nodes_of_state(layout, unit.spread, unit.costs.name, cluster.devices_per_node)
    members = least_members(rings_of(nodes, configuration.shard)).reshape(len(nodes), -1).min(axis=1)
    gather, scatter = gathers_ms(unit.costs, unit.spread, cluster, configuration.shard, members)
    there = _largest(unit.there.astype(np.float64), group) > 0
    alone = unit.work  # cells are whole
    own = alone.forward_ms / unit.speeds, alone.backward_ms / unit.speeds
    forward, backward = (
        np.maximum(_largest(each, group), messages[:, None]) * there
        for each, messages in zip(own, (gather, scatter), strict=True)
    )
    total = forward + backward
    filled = np.divide((own[0] + own[1]) * alone.filled, total, out=np.ones_like(total), where=total > 0)
    nothing = np.zeros_like(backward)  # all of a backward is done while its layers are there
    work = Work(
        forward_ms=forward * unit.speeds,
        backward_ms=backward * unit.speeds,
        weights_ms=nothing,
        kept_bytes=alone.kept_bytes,
        deferred_bytes=nothing,
        filled=filled,
    )
    return replace(unit, there=there, parts=work.in_parts(1), calls=None)


def in_step_groups(num_lanes: int, configuration: Configuration) -> Ints:
    """Return which devices each of a unit's lanes divides a copy with. [num_lanes]

    Where devices are missing, some groups have more: those of a group have a whole copy.

    Args:
        num_lanes: Of one of the units, which have as many ranks each.
        configuration: How it uses its devices.
    """
    num_groups = min(max(1, num_lanes * configuration.units[LLM].cp // configuration.shard), num_lanes)
    return np.arange(num_lanes) * num_groups // num_lanes


def _largest(values: Floats, group: Ints) -> Floats:
    """Return, for each cell, the largest value of the same cell of its group's lanes. [..., num_cells]"""
    lanes = values.reshape(*values.shape[:-1], len(group), -1)
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    return np.maximum.reduceat(lanes, firsts, axis=-2)[..., group - group[0], :].reshape(values.shape)
