"""On how many nodes state is: what decides how many of them a job survives losing at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Configuration, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.node_places import nodes_of_state
from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.words import counted


def check_redundancy(setting: Setting, configuration: Configuration) -> None:
    """Refuse a configuration that has state on fewer nodes than the job promises.

    Raises:
        ValueError: It does; the message names the unit.
    """
    for name in configuration.units if setting.max_failures else ():
        nodes = int(_nodes_of_state(setting, configuration, name).min())
        if nodes <= setting.max_failures:
            raise ArgumentError(
                "max_failures",
                f"be at most {nodes - 1}, as there is state of {name!r} on {counted(nodes, 'node')} only",
                setting.max_failures,
                "spread replicas over more nodes, or lower it",
            )


def is_redundant(setting: Setting, configuration: Configuration) -> bool:
    """Return whether a configuration has all state on as many nodes as the job promises."""
    try:
        check_redundancy(setting, configuration)
    except ArgumentError:
        return False
    return True


def with_redundancy_noted(setting: Setting, configuration: Configuration) -> Configuration:
    """Return a configuration whose notes name the units that may lose state when one node is lost."""
    single = [name for name in configuration.units if int(_nodes_of_state(setting, configuration, name).min()) == 1]
    if not single:
        return configuration
    note = f"state of {' and '.join(single)} is on one node only, and lost with it"
    return replace(configuration, notes=(*configuration.notes, note))


def possibly_redundant(setting: Setting, dp: Ints, lane_devices: Ints) -> Flags:
    """Return whether replicas are on nodes enough if each is on one of its own; as :func:`surely_redundant`."""
    return (dp > setting.max_failures) & (lane_devices > 0)


def surely_redundant(setting: Setting, dp: Ints, lane_devices: Ints) -> Flags:
    """Return whether replicas are on nodes enough wherever they are: if nothing lies between them.

    Args:
        setting: The job.
        dp: Replicas; any shape.
        lane_devices: Of each, all its stages; of the same shape.
    """
    apart = -(-setting.cluster.devices_per_node // lane_devices)
    return (dp - 1) // apart >= setting.max_failures


Redundant = Callable[[Setting, Ints, Ints], Flags]
"""One of the two. Searches that build no whole configurations before the last leave out what the first excludes, and
if their answer is not redundant, then what the second does."""


def _nodes_of_state(setting: Setting, configuration: Configuration, name: str) -> Ints:
    """Return on how many nodes is what each tensor-parallel rank of each stage of a unit holds. [num_stages, tp]"""
    layout = DeviceLayout(configuration, configuration.units[LLM].dp)
    nodes = nodes_of_state(layout, configuration.units[name], name, setting.cluster.devices_per_node)
    return 1 + (np.diff(np.sort(nodes)) > 0).sum(axis=-1)
