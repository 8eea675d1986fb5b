"""How many microbatches a configuration has, and how much of it runs again in the backward: what the memory decides.

Fewer microbatches have less to gather and to call, and recomputation makes room for them. It begins in the unit that
keeps most for each millisecond of its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.own.dealing import deal_to_stage
from resilient.planners.planner import Configuration, Replica, Setting
from resilient.planners.stages.memory_shares import unit_shares
from resilient.planners.stages.stage_work import kept_bytes

_PARTS = 16
"""That the layers of a unit are counted in."""

_MORE = 2
"""Microbatches that are tried beyond the fewest."""

_TOO_MANY = 2**31

_FILLED = 0.95
"""Part of the memory that known batches may fill: others may need more."""


def with_room(
    setting: Setting, shape: Configuration, samples: SampleTable, batches: Sequence[SampleTable], longer: float
) -> Iterator[Configuration]:
    """Yield a configuration with as few microbatches as may be, and with some more, which recompute less.

    Args:
        setting: The job.
        shape: Without recomputation.
        samples: A sample of the data set.
        batches: Of these.
        longer: There has to be room for a sample that is so many times as long as the longest.
    """
    full = _PARTS * len(shape.units)
    known: dict[int, int] = {}

    def number_of(part: int) -> int:
        if part not in known:
            known[part] = _num_microbatches(
                setting, _recomputing(setting, shape, samples, part), samples, batches, longer
            )
        return known[part]

    fewest = 1 if number_of(0) == 1 else number_of(full)
    for number in range(fewest, min(number_of(0), fewest + _MORE, _TOO_MANY - 1) + 1):
        low, high = 0, full
        while low < high:
            part = (low + high) // 2
            low, high = (low, part) if number_of(part) <= number else (part + 1, high)
        if number_of(low) == number:
            yield replace(_recomputing(setting, shape, samples, low), num_microbatches=number)


def _num_microbatches(
    setting: Setting,
    configuration: Configuration,
    samples: SampleTable,
    batches: Sequence[SampleTable],
    longer: float,
) -> int:
    """Return how many the batches need; :data:`_TOO_MANY` where there is no room."""
    replicas = [Replica(num_microbatches=1)] * configuration.units[LLM].dp
    if (memory := setting.cluster.memory_bytes) is not None:
        setting = replace(setting, cluster=replace(setting.cluster, memory_bytes=int(_FILLED * memory)))
    try:
        shares = unit_shares(setting, configuration, samples, replicas)
        if longer * sum(shares.values(), np.zeros(len(samples))).max() > configuration.units[LLM].cp:
            return _TOO_MANY
        placed = [deal_to_stage(setting, configuration, batch, replicas).units[LLM].microbatch for batch in batches]
    except ValueError:  # no room
        return _TOO_MANY
    return 1 + max(int(place.max(initial=0)) for place in placed)


def _recomputing(setting: Setting, shape: Configuration, samples: SampleTable, part: int) -> Configuration:
    """Return a configuration that runs so many parts, in :data:`_PARTS` of each unit, of its layers again."""

    def kept(name: str) -> float:
        """Return the bytes that are kept for each millisecond of the forward."""
        unit, lengths, spread = setting.costs.by_name[name], samples.units[name], shape.units[name]
        forward_ms = float(unit.forward(spread.tp).of(lengths).sum())
        of_token = float(kept_bytes(unit, replace(spread, cp=1)).sum())
        return float(lengths.tokens.sum()) * of_token / forward_ms if forward_ms else 0.0

    units = dict(shape.units)
    for name in sorted(units, key=kept, reverse=True):
        own = min(part, _PARTS)
        units[name] = replace(units[name], recompute=own / _PARTS)
        part -= own
    return replace(shape, units=units)
