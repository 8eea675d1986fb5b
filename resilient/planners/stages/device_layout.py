"""Which devices the units of a step's pipelines are on.

An encoder with k times the language model's replicas has k lanes in each pipeline, or one more or less where k is not
whole; one with fewer has lanes that work for several pipelines. The rows of a lane are its stages' devices: a row runs
one task at a time, and may have several stages of a unit that has its devices for itself. Units whose stages share rows
are a *group*.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Configuration, Encoders, Parallelism
from resilient.templates.common.arrays import Ints


def groups(configuration: Configuration) -> tuple[tuple[str, ...], ...]:
    """Return the units that share rows: the k-th stage of each is on the same devices."""
    encoders = tuple(name for name in configuration.units if name != LLM)
    if not encoders or configuration.encoders is Encoders.REPLICATED:
        return ((*encoders, LLM),)
    if configuration.encoders is Encoders.COLOCATED:
        return (encoders, (LLM,))
    return (*((name,) for name in encoders), (LLM,))


def used_devices(configuration: Configuration) -> int:
    """Return how many devices a configuration uses, each counted once however many units are on it."""
    sizes = [max(configuration.units[name].num_devices for name in group) for group in groups(configuration)]
    return max(sizes) if configuration.colocated else sum(sizes)


def lanes_of_pipelines(spread: Parallelism, language: Parallelism, num_pipelines: int) -> Ints:
    """Return the first lane of a unit that works for each pipeline, and one past the last one. [num_pipelines, 2]

    Args:
        spread: Of the unit, as configured.
        language: Of the language model, likewise.
        num_pipelines: The language model's replicas as they are now.
    """
    ends = np.arange(num_pipelines + 1) * spread.dp // language.dp
    return np.stack([ends[:-1], np.maximum(ends[1:], ends[:-1] + 1)], axis=1)


def lane_part(spread: Parallelism, language: Parallelism, num_pipelines: int) -> float:
    """Return what part of a lane's devices there is: each pipeline that is lost took its share along.

    Args:
        spread: Of the unit, as configured.
        language: Of the language model, likewise.
        num_pipelines: The language model's replicas as they are now.
    """
    num_lanes = int(lanes_of_pipelines(spread, language, num_pipelines).max())
    return min(1.0, spread.dp * num_pipelines / (language.dp * num_lanes))


class DeviceLayout:
    """The lanes and rows of a step.

    Attributes:
        lanes: By unit, as :func:`lanes_of_pipelines` has them.
        rows: By unit, of each lane's stages. [num_lanes, num_stages]
        pipelines: The first pipeline that each row works for. [num_rows]
        sizes: Devices of each row. [num_rows]
        firsts: The first device of each, where pipelines follow each other, and rows within them. [num_rows]
        replicated: Whether each stage of the language model runs all encoders, whose rows are its own.
    """

    def __init__(self, configuration: Configuration, num_pipelines: int) -> None:
        """Lay out.

        Args:
            configuration: How units are spread.
            num_pipelines: Replicas of the language model.

        Raises:
            ValueError: A replicated encoder has several stages, or units that share devices need unequal ones.
        """
        spreads = configuration.units
        self.replicated = configuration.encoders is Encoders.REPLICATED
        self.lanes = {
            name: lanes_of_pipelines(each, spreads[LLM], num_pipelines)
            for name, each in spreads.items()
            if name == LLM or not self.replicated
        }
        self.rows: dict[str, Ints] = {}
        pipelines: list[Ints] = []
        sizes: list[Ints] = []
        for group in self._sharing(configuration):
            lanes, spread = self.lanes[group[-1]], spreads[group[-1]]
            depth = max(spreads[name].pp for name in group)
            count = int(lanes.max(initial=0))
            first = sum(map(len, sizes))
            for name in group:
                stages = np.arange(spreads[name].num_stages) % depth
                self.rows[name] = first + np.arange(count)[:, None] * depth + stages
            works_for = np.searchsorted(lanes[:, 1], np.arange(count), side="right")
            pipelines.append(np.repeat(works_for, depth))
            sizes.append(np.full(count * depth, spread.tp * spread.cp))
        self.pipelines: Ints = np.concatenate(pipelines)
        self.sizes: Ints = np.concatenate(sizes)
        order = np.argsort(self.pipelines, kind="stable")
        self.firsts: Ints = np.empty_like(self.sizes)
        self.firsts[order] = np.cumsum(self.sizes[order]) - self.sizes[order]

    def host(self, name: str) -> str:
        """Return the unit whose stages run one."""
        return LLM if self.replicated else name

    def _sharing(self, configuration: Configuration) -> Sequence[tuple[str, ...]]:
        """Return the units of each set of rows."""
        spreads = configuration.units
        if self.replicated:
            for name, each in spreads.items():
                if name != LLM and each.pp > 1:
                    raise ValueError(
                        f"pp of {name!r} must be 1 where encoders are replicated, got {each.pp}; every stage of the "
                        f"language model runs all of it"
                    )
            if tuple(spreads)[-1] != LLM and spreads[LLM].num_stages > 1:
                got = f"{spreads[LLM].num_stages} beside {tuple(spreads)[-1]!r}, which comes after it"
                raise ArgumentError(f"stages of {LLM!r}", "be one where units are replicated", got, "place them apart")
            return ((LLM,),)
        sharing = groups(configuration)
        if configuration.colocated:
            sharing = (tuple(name for group in sharing for name in group),)
        for group in sharing:
            shapes = {name: (spreads[name].dp, spreads[name].tp * spreads[name].cp) for name in group}
            if len(set(shapes.values())) > 1:
                given = ", ".join(f"{name}: {dp} of {size}" for name, (dp, size) in shapes.items())
                raise ArgumentError(
                    "units on the same devices",
                    "have equally many replicas, and stages of as many devices",
                    given,
                    "spread them alike",
                )
        return sharing
