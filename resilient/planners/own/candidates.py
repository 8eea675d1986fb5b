"""Configurations of one stage: all units on all devices, and nothing waits for another stage.

A step takes what its slowest replica takes, and units do one microbatch after the other, so what the memory does not
hold, as after a loss, is divided into more of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.published.baselines.mean_microbatch import common_degrees

_SMALL = 0.05
"""Of a device's memory: where its part of a copy is that small, dividing it among more devices gives no more room."""


def one_stage(setting: Setting, *, wide: bool = False) -> Iterator[Configuration]:
    """Yield configurations of one stage without recomputation, those with fewer messages first.

    They differ in tensor-parallel degree; in how many devices divide a copy of the parameters: none, those of a node
    (HSDP), or of twice as many nodes each time, as long as that gives room; and in replicas: single ranks, which have
    all units of their samples (replicated encoders) or of each unit other samples; or the ranks of a node, which form
    groups that share samples.

    Args:
        setting: The job.
        wide: Whether a replica is the ranks of two nodes instead: a loss takes half of it, and no group is larger then.
    """
    for tp, cp in common_degrees(setting.costs):
        in_node = setting.cluster.devices_per_node // tp
        if cp > 1 or not in_node:
            continue
        ranks = setting.num_nodes * in_node
        shared = all(sum(each == tp for each, _ in unit.degrees) > 1 for unit in setting.costs.units)
        widths = {min(2 * in_node, ranks)} if wide else {in_node, 1}
        for shard, width in product(_shards(setting, tp, in_node, ranks), sorted(widths, reverse=True)):
            if max(width, shard) % min(width, shard) or (width > 1 and not shared):
                continue  # replicas that divide a copy are whole, and ranks share samples as they were profiled
            dp = min(ranks // width, setting.global_batch)
            units = {
                unit.name: Parallelism(dp=dp, pp=1, tp=tp, cp=width, stage_layers=(len(unit.layers),))
                for unit in setting.costs.units
            }
            ways = (Encoders.REPLICATED, Encoders.PARALLEL) if width == 1 and len(units) > 1 else (Encoders.REPLICATED,)
            for way in ways:
                yield Configuration(units=units, num_microbatches=1, colocated=True, encoders=way, shard=shard)


def _shards(setting: Setting, tp: int, in_node: int, ranks: int) -> Sequence[int]:
    """Return how many devices may divide a copy, ascending."""
    memory = setting.cluster.memory_bytes
    state = sum(unit.state_bytes for unit in setting.costs.units) / tp
    found = [1]
    shard = in_node
    while found[-1] < ranks and (shard == in_node or (memory is not None and state / found[-1] > _SMALL * memory)):
        found.append(min(shard, ranks))
        shard *= 2
    return sorted(set(found))
