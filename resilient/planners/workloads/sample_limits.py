"""Which samples no planner has room for, whatever it decides: a bound for judging data before planning."""

from __future__ import annotations

from collections.abc import Mapping

from resilient.planners.costs.cost_model import CostModel
from resilient.templates.inputs.cluster import Cluster


def most_tokens(costs: CostModel, cluster: Cluster, num_nodes: int) -> Mapping[str, int]:
    """Return how many tokens a sample may have in each unit if all devices of a job work on it alone.

    For :func:`~resilient.planners.workloads.records.sample_table`. A sample with more has no room in any configuration;
    one with fewer has some in the best. Units whose state alone does not fit are left out, that is for planners to say.

    Args:
        costs: Of the units.
        cluster: The nodes.
        num_nodes: How many.
    """
    if cluster.memory_bytes is None:
        return {}
    num_devices = num_nodes * cluster.devices_per_node
    limits: dict[str, int] = {}
    for unit in costs.units:
        backward = [layer for layer in unit.layers if layer.has_backward]
        for index, (tp, cp) in enumerate(unit.degrees):
            if tp > cluster.devices_per_node or tp * cp > num_devices:
                continue
            num_stages = min(num_devices // (tp * cp), len(unit.layers))
            free = cluster.memory_bytes - unit.state_bytes / (tp * num_stages)
            kept = sum(layer.curves[index].activation_bytes for layer in backward) / num_stages
            if free > 0:
                limits[unit.name] = max(limits.get(unit.name, 0), int(free / kept) if kept else 2**62)
    return limits
