"""Configurations that may be the fastest: one stage on all devices, with copies divided or not, and published ones.

With one stage all units are on the same devices, and nothing waits for another stage: a step takes what its slowest
replica takes. Units do one microbatch after the other, so what the memory does not hold, as after a loss, is divided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.published.baselines.balanced import EncoderFirst, StaticContext
from resilient.planners.published.baselines.mean_microbatch import common_degrees
from resilient.planners.published.baselines.uniform import Uniform, UniformSorted


def candidates(setting: Setting, samples: SampleTable) -> Iterator[Configuration]:
    """Yield configurations.

    In those of one stage copies are whole on each device, or divided among the devices of a node (HSDP): every node has
    one. They are not divided among all devices, where each node that is lost takes a part of the only copy with it.

    Args:
        setting: The job.
        samples: A sample of the data set.
    """
    yield from _one_stage(setting)
    for published in (EncoderFirst(), StaticContext(), Uniform(), UniformSorted()):
        with contextlib.suppress(ValueError):  # it has none that fits
            yield published.configure(setting, samples)


def has_one_stage(configuration: Configuration) -> bool:
    """Return whether all units are in one stage."""
    return configuration.encoders is Encoders.REPLICATED and configuration.units[LLM].pp == 1


def _one_stage(setting: Setting) -> Iterator[Configuration]:
    """Yield them for each tensor-parallel degree, with as many microbatches as samples allow."""
    for tp, cp in common_degrees(setting.costs):
        in_node = setting.cluster.devices_per_node // tp
        dp = min(setting.num_nodes * in_node, setting.global_batch)
        if cp > 1 or not in_node:
            continue
        units = {
            unit.name: Parallelism(dp=dp, pp=1, tp=tp, stage_layers=(len(unit.layers),)) for unit in setting.costs.units
        }
        for shard in sorted({1, in_node}):
            if dp % shard == 0:
                yield Configuration(
                    units=units,
                    num_microbatches=-(-setting.global_batch // dp),
                    colocated=True,
                    encoders=Encoders.REPLICATED,
                    shard=shard,
                )
