"""Which replicas are left of a configuration when nodes are lost: the unequal pipelines planners balance for."""

from __future__ import annotations

import numpy as np

from resilient.planners.layout import used_devices
from resilient.planners.planner import LLM, Configuration, Replica, Setting


def survivors(setting: Setting, configuration: Configuration, lost_nodes: int) -> tuple[Replica, ...]:
    """Return the language model's replicas after nodes were lost.

    A replica with its share of all encoders has equally many consecutive devices. Nodes without any take the place of
    lost ones. The others that are lost lie as far apart as they can. A replica that lost some of its devices goes on
    with those left, slower by as much; one that lost all is gone. The step's microbatches are given out by speed, one
    at least to each.

    Args:
        setting: The job.
        configuration: How it used its devices.
        lost_nodes: How many of its nodes are lost, 0 or more.

    Raises:
        ValueError: No node is left.
    """
    if not 0 <= lost_nodes < setting.num_nodes:
        raise ValueError(f"lost_nodes must be 0 to {setting.num_nodes - 1}, got {lost_nodes}; leave a node")
    dp = configuration.units[LLM].dp
    used = used_devices(configuration)
    num_nodes = -(-used // setting.cluster.devices_per_node)
    missed = max(0, num_nodes - (setting.num_nodes - lost_nodes))
    lost = np.arange(missed) * num_nodes // max(missed, 1)
    alive = ~np.isin(np.arange(used) // setting.cluster.devices_per_node, lost)
    replica = np.arange(used) * dp // used
    speeds = np.bincount(replica, weights=alive, minlength=dp) / np.bincount(replica, minlength=dp)
    speeds = speeds[speeds > 0]
    total = dp * configuration.num_microbatches
    exact = total * speeds / speeds.sum()
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() > total:
        counts[counts.argmax()] -= 1
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return tuple(
        Replica(num_microbatches=int(count), speed=float(speed)) for count, speed in zip(counts, speeds, strict=True)
    )
