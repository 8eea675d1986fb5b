"""In how many microbatches a batch is dealt, and how many layers run again in the backward: what the memory decides.

Fewer microbatches have less to gather and to call, and recomputation makes room for them. It begins in the unit that
keeps most for each millisecond of its forward. Neither needs any state elsewhere, so each batch has its own, and the
replicas that are left after losses, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Replica, Setting
from resilient.planners.stages.degraded_replicas import ranks_left
from resilient.planners.stages.stage_work import gathers_ms, kept_bytes
from resilient.templates.common.arrays import Floats

_Dealt = TypeVar("_Dealt")

_PARTS = 16
"""That the layers of a unit are counted in."""

_MORE = 3
"""Numbers of microbatches that are tried after the fastest so far."""

_SIMILAR = 2
"""Ways whose even shares are the fastest: how uneven they are decides."""


class Recomputation(NamedTuple):
    """What runs again.

    Args:
        parts: Of each unit's layers.
        kept: Of what a token of each unit keeps where nothing runs again.
    """

    parts: dict[str, float]
    kept: dict[str, float]


def recomputations(setting: Setting, configuration: Configuration, batch: SampleTable) -> list[Recomputation]:
    """Return what may run again in the backward, from nothing to all. Each adds to the one before.

    Args:
        setting: The job.
        configuration: Of one stage.
        batch: The samples.
    """
    kept: dict[str, Floats] = {}
    urgent: dict[str, float] = {}  # bytes that are kept for each millisecond of the forward
    for name, spread in configuration.units.items():
        unit, lengths = setting.costs.by_name[name], batch.units[name]
        each = [replace(spread, cp=1, recompute=part / _PARTS) for part in range(_PARTS + 1)]
        of_token = np.array([kept_bytes(unit, recomputed)[0] for recomputed in each])
        kept[name] = of_token / of_token[0] if of_token[0] else np.ones_like(of_token)
        forward_ms = float(unit.forward(spread.tp).of(lengths).sum())
        urgent[name] = float(lengths.tokens.sum()) * of_token[0] / forward_ms if forward_ms else 0.0
    nothing = Recomputation(dict.fromkeys(kept, 0.0), dict.fromkeys(kept, 1.0))
    if setting.cluster.memory_bytes is None:
        return [nothing]
    found = [nothing]
    for name in sorted(kept, key=lambda name: urgent[name], reverse=True):
        parts, rest = found[-1]
        found += [
            Recomputation({**parts, name: part / _PARTS}, {**rest, name: float(kept[name][part])})
            for part in range(1, _PARTS + 1)
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class _UnitTimes:
    """What a rank takes in a step: its even share of the samples, each call beside, and messages of each call."""

    forward: tuple[float, float, float]
    backward: tuple[float, float, float]
    again: tuple[float, float]
    several: bool

    def step_ms(self, number: int, recompute: float) -> float:
        """Return what so many microbatches take."""
        calls = number if self.several else 1
        forward_ms, fixed_ms, gather_ms = self.forward
        backward_ms, called_ms, scatter_ms = self.backward
        again_ms, again_fixed_ms = self.again
        backward_ms += recompute * again_ms + calls * (called_ms + recompute * again_fixed_ms)
        return max(forward_ms + calls * fixed_ms, calls * gather_ms) + max(backward_ms, calls * scatter_ms)


class StepChoice:
    """Chooses the number of microbatches and the recomputation of a step.

    Args:
        setting: The job.
        configuration: Of one stage.
        batch: The global batch.
        replicas: As they are now.
    """

    def __init__(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> None:
        self._recomputations = recomputations(setting, configuration, batch)
        self._units = {name: _times(setting, configuration, batch, replicas, name) for name in configuration.units}

    @property
    def least(self) -> Mapping[str, float]:
        """By unit, the part that a token keeps if all layers run again."""
        return self._recomputations[-1].kept

    def fastest(
        self, deal: Callable[[int], _Dealt], fits: Callable[[_Dealt, Mapping[str, float]], bool], fewest: int
    ) -> list[tuple[_Dealt, Recomputation]]:
        """Return some ways to deal the batch that memory holds, which should be the fastest; at least one.

        Args:
            deal: What deals it to so many microbatches; to some number so that it fits if all layers run again.
            fits: Whether it fits so, where units keep these parts.
            fewest: Microbatches that are tried first.
        """
        found: list[tuple[float, int, _Dealt, Recomputation]] = []
        for number in count(fewest):
            if found and (number > found[0][1] + _MORE or self._ms(0, number) >= found[-1][0]):
                break
            dealt = deal(number)
            if not fits(dealt, self.least):
                continue
            level = bisect_left(self._recomputations, True, key=lambda each, dealt=dealt: fits(dealt, each.kept))
            found.append((self._ms(level, number), number, dealt, self._recomputations[level]))
            found = sorted(found, key=lambda each: each[:2])[:_SIMILAR]
            if not level:
                break
        return [each[2:] for each in found]

    def _ms(self, level: int, number: int) -> float:
        parts = self._recomputations[level].parts
        return sum(each.step_ms(number, parts[name]) for name, each in self._units.items())


def _times(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica], name: str
) -> _UnitTimes:
    unit, spread, lengths = setting.costs.by_name[name], configuration.units[name], batch.units[name]
    ranks = sum(each.speed / each.devices * ranks_left(spread, each.devices) for each in replicas)
    index = unit.index(spread.tp, 1)
    passed = sum((layer.curves[index].forward for layer in unit.layers if layer.has_backward), Curve())
    gather_ms = scatter_ms = 0.0
    if configuration.shard > 1:
        gather, scatter = gathers_ms(unit, spread, setting.cluster, configuration.shard)
        gather_ms, scatter_ms = float(gather[0]), float(scatter[0])
    forward, backward = unit.forward(spread.tp), unit.backward(spread.tp)

    def even_ms(curve: Curve) -> float:
        return float(curve.of(lengths).sum()) / ranks

    return _UnitTimes(
        forward=(even_ms(forward), forward.fixed, gather_ms),
        backward=(even_ms(backward), backward.fixed, scatter_ms),
        again=(even_ms(passed), passed.fixed),
        several=name == LLM or configuration.encoders is Encoders.REPLICATED,
    )
