"""Which devices the stages of a step's pipelines are on.

A *lane* is one stage of one unit in one pipeline. A *row* is the devices that one or more lanes share: it runs one task
at a time. Units whose stages share rows are a *group*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Configuration, Encoders
from resilient.templates.common.arrays import Ints


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One stage of one unit in one pipeline. Replicated encoders have one for each stage of the language model."""

    unit: str
    pipeline: int
    stage: int


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


class DeviceLayout:
    """The lanes and rows of a step.

    Attributes:
        lanes: Unit by unit, pipeline by pipeline, stage by stage.
        first_lane: Of each unit, and behind the last one.
        stages: Lanes of each unit in a pipeline.
        row: Of each lane.
        first_row: Of each group, and behind the last one.
        replicated: Whether each stage of the language model runs all encoders.
        turns: Whether groups share devices and one follows the other.
    """

    def __init__(self, configuration: Configuration, names: Sequence[str], num_pipelines: int) -> None:
        """Lay out.

        Args:
            configuration: How units are spread.
            names: Of the units.
            num_pipelines: Replicas of the language model.

        Raises:
            ValueError: A replicated encoder has several stages.
        """
        spreads = configuration.units
        self.replicated = configuration.encoders is Encoders.REPLICATED
        self.turns = configuration.colocated and not self.replicated
        for name in names if self.replicated else ():
            if name != LLM and spreads[name].pp > 1:
                raise ValueError(
                    f"pp of {name!r} must be 1 where encoders are replicated, got {spreads[name].pp}; every stage of "
                    f"the language model runs all of it"
                )
        self.stages = [spreads[LLM if self.replicated else name].pp for name in names]
        self.lanes = tuple(
            Lane(unit=name, pipeline=pipeline, stage=stage)
            for name, stages in zip(names, self.stages, strict=True)
            for pipeline in range(num_pipelines)
            for stage in range(stages)
        )
        self.first_lane: Ints = np.cumsum([0, *(num_pipelines * stages for stages in self.stages)])
        members = [[names.index(name) for name in group] for group in groups(configuration)]
        depths = [max(self.stages[unit] for unit in group) for group in members]
        self.first_row: Ints = np.cumsum([0, *(num_pipelines * depth for depth in depths)])
        self._sizes = [max(spreads[names[unit]].tp * spreads[names[unit]].cp for unit in group) for group in members]
        self.row: Ints = np.zeros(self.first_lane[-1], np.int64)
        pipelines = np.arange(num_pipelines)[:, None]
        for first, depth, group in zip(self.first_row, depths, members, strict=False):
            for unit in group:
                rows = first + pipelines * depth + np.arange(self.stages[unit])
                self.row[self.first_lane[unit] : self.first_lane[unit + 1]] = rows.ravel()

    def on_devices(self) -> Ints:
        """Return the row of each group that each device is in, -1 for none, where groups share devices.

        Devices are numbered pipeline by pipeline. [num_groups, num_devices]
        """
        counts = np.diff(self.first_row)
        devices = np.arange(max(int(count) * size for count, size in zip(counts, self._sizes, strict=True)))
        rows = [
            np.where(devices // size < count, first + devices // size, -1)
            for first, count, size in zip(self.first_row, counts, self._sizes, strict=False)
        ]
        return np.stack(rows)
