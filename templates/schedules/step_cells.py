"""Which samples each cell of each lane has in a step; the flows between units, and parts of cells, follow from that.

Owns the step from an assignment of samples to the graph that schedules are made of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from resilient.errors import ArgumentError
from resilient.templates.schedules.graph import Flow, LaneName

Samples = tuple[int, ...]
"""Positions in the step's global batch, in the order in which they are computed."""


@dataclass(frozen=True, kw_only=True)
class StepCells:
    """The samples of one step of one pipeline.

    A sample that a unit does nothing for, as an encoder for text alone, is in none of its cells.

    Args:
        samples: By lane, then by cell; cells without samples are left out. Of a unit each is in one cell of one lane.
        feeds: Which unit's features go to which later one.
        whole: Lanes whose cells have one part, as :class:`~resilient.templates.schedules.graph.UnitLane` says.
    """

    samples: Mapping[LaneName, Mapping[int, Samples]]
    feeds: Sequence[tuple[str, str]]
    whole: Collection[LaneName] = ()

    def __post_init__(self) -> None:
        seen: set[tuple[str, int]] = set()
        for lane, cells in self.samples.items():
            for cell, samples in cells.items():
                for sample in samples:
                    if (lane.unit, sample) in seen:
                        got = f"{sample} again in {lane}:{cell}"
                        raise ArgumentError("samples", "be in one cell of a unit each", got, "place each once")
                    seen.add((lane.unit, sample))
                if not samples:
                    fix = "leave the cell out"
                    raise ArgumentError("samples", "be one or more in each cell", f"none in {lane}:{cell}", fix)

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """What goes from which cell to which: those that share samples."""
        lanes = list(self.samples)
        found = {
            Flow(source, cell, *self._place(target, sample))
            for unit, target in self.feeds
            for source in lanes
            if source.unit == unit
            for cell, samples in self.samples[source].items()
            for sample in samples
            if (target, sample) in self._places
        }
        order = {lane: number for number, lane in enumerate(lanes)}
        return tuple(sorted(found, key=lambda flow: (order[flow[0]], flow[1], order[flow[2]], flow[3])))

    def part(self, lane: LaneName, cell: int, part: int) -> Samples:
        """Return the samples of a part of a cell: those of the flow with that number among the cell's.

        Samples that go nowhere are in part 0, and all of a cell that is whole.
        """
        return self._parts[lane, cell][part]

    @cached_property
    def _places(self) -> dict[tuple[str, int], tuple[LaneName, int]]:
        return {
            (lane.unit, sample): (lane, cell)
            for lane, cells in self.samples.items()
            for cell, samples in cells.items()
            for sample in samples
        }

    def _place(self, unit: str, sample: int) -> tuple[LaneName, int]:
        return self._places[unit, sample]

    @cached_property
    def _parts(self) -> dict[tuple[LaneName, int], list[Samples]]:
        targets: dict[tuple[LaneName, int], list[set[int]]] = {}
        for flow in self.flows:
            if flow.source in self.whole:
                continue
            there = set(self.samples[flow.target][flow.target_cell])
            targets.setdefault((flow.source, flow.cell), []).append(there)
        found: dict[tuple[LaneName, int], list[Samples]] = {}
        for lane, cells in self.samples.items():
            for cell, samples in cells.items():
                first, *others = targets.get((lane, cell), [set()])
                later = set[int]().union(*others)
                chosen = [{sample for sample in samples if sample in first or sample not in later}, *others]
                found[lane, cell] = [tuple(sample for sample in samples if sample in each) for each in chosen]
        return found
