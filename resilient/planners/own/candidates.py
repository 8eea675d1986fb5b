"""Configurations of one stage: all units on all devices, and nothing waits for another stage.

A step takes what its slowest replica takes, and units do one microbatch after the other, so what the memory does not
hold, as after a loss, is divided into more of them, or is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.own.dealing import deal_to_stage
from resilient.planners.planner import Configuration, Encoders, Parallelism, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import common_degrees
from resilient.planners.stages.memory_shares import unit_shares

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


def holds_longer(setting: Setting, shape: Configuration, samples: SampleTable, longer: float) -> bool:
    """Return whether replicas have memory for a sample that is so many times as long as the longest, all run again.

    Args:
        setting: The job.
        shape: Of one stage.
        samples: A sample of the data set.
        longer: How many times.
    """
    replicas = [Replica(num_microbatches=1)] * shape.units[LLM].dp
    units = {name: replace(spread, recompute=1.0) for name, spread in shape.units.items()}
    try:
        shares = unit_shares(setting, replace(shape, units=units), samples, replicas)
    except ValueError:  # none for the state
        return False
    return bool(longer * sum(shares.values(), np.zeros(len(samples))).max() <= shape.units[LLM].cp)


def as_dealt(setting: Setting, shape: Configuration, batches: Sequence[SampleTable]) -> Configuration:
    """Return a configuration with as many microbatches as known batches have, and as much that runs again.

    Encoders that have all their samples in one microbatch cannot have more, so half of the replicas have to hold that.

    Args:
        setting: The job.
        shape: Of one stage.
        batches: That are known.

    Raises:
        ValueError: A sample does not fit even alone.
    """
    replicas = [Replica(num_microbatches=1)] * shape.units[LLM].dp
    if shape.encoders is not Encoders.REPLICATED:
        for batch in batches:
            deal_to_stage(setting, shape, batch, replicas[: -(-len(replicas) // 2)])
    dealt = [deal_to_stage(setting, shape, batch, replicas) for batch in batches]
    units = {
        name: replace(spread, recompute=max(each.recompute[name] for each in dealt))
        for name, spread in shape.units.items()
    }
    number = 1 + max(int(each.units[LLM].microbatch.max(initial=0)) for each in dealt)
    return replace(shape, units=units, num_microbatches=number)


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
