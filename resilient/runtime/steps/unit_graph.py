"""How the stages of a plan's units hang together: who sends to whom, what each differentiates, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from resilient.pipeline.p2p import Channel
from resilient.pipeline.row_actions import Border
from resilient.planners.costs.samples import LLM
from resilient.planners.pipelines.decision import decision_of
from resilient.templates.halves import Halves
from resilient.templates.plan import Plan
from resilient.templates.schedules.graph import CHAIN, Backward, LaneName, StageName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.template import PipelineTemplate, StageSpec


class PlanLanes:
    """The lanes of a plan's pipelines, those of a unit numbered through all of them; and rows, likewise.

    Where a template has lanes 0 and 1 of an encoder, the second pipeline has lanes 2 and 3. The lane of a chain has no
    number of its pipeline: plans of chains have one here.

    Args:
        plan: The plan.
        feeds: Which unit's features go to which later one.
        trained: Of each of the model's layers.

    Attributes:
        specs: Of each stage, what its template says.
        row_of: Of each stage; its devices are those of :attr:`resilient.templates.plan.Plan.rows`.
        feeds: As given.
        whole: Lanes whose cells have one part: what has no backward, and what its planner differentiates at once.
    """

    def __init__(self, plan: Plan, feeds: Sequence[tuple[str, str]], trained: Sequence[bool]) -> None:
        self.specs: dict[StageName, StageSpec] = {}
        self.row_of: dict[StageName, int] = {}
        self.feeds = feeds
        self._templates = [pipeline.template for pipeline in plan.pipelines]
        self._backward_of: dict[StageName, Backward] = {}
        self._halved: dict[StageName, bool] = {}
        self._rows: list[range] = []
        self._names: list[dict[LaneName, LaneName]] = []
        self._stages: dict[LaneName, list[StageName]] = {}
        num_lanes: Counter[str] = Counter()
        first_row = 0
        for template in self._templates:
            names = {lane: LaneName(lane.unit, num_lanes[lane.unit] + lane.number) for lane in template.lanes}
            backwards = stage_backwards(template, trained, feeds)
            for spec, row, backward in zip(template.stages, template.row_of, backwards, strict=True):
                stages = self._stages.setdefault(names[spec.lane], [])
                stage = names[spec.lane], len(stages)
                stages.append(stage)
                self.specs[stage], self.row_of[stage] = spec, first_row + row
                self._backward_of[stage], self._halved[stage] = backward
            self._names.append(names)
            self._rows.append(range(first_row, first_row + len(template.rows)))
            first_row += len(template.rows)
            num_lanes.update(lane.unit for lane in template.lanes)
        self.whole = frozenset(
            names[lane]
            for template, names in zip(self._templates, self._names, strict=True)
            for lane in template.lanes
            if self._is_whole(template, names[lane])
        )

    def name(self, pipeline: int, lane: LaneName) -> LaneName:
        """Return what is called ``lane`` in a pipeline's template."""
        return self._names[pipeline][lane]

    def rows(self, pipelines: Sequence[int]) -> list[int]:
        """Return the rows of some pipelines, pipeline by pipeline."""
        return [row for pipeline in pipelines for row in self._rows[pipeline]]

    def round_size(self, pipeline: int) -> int:
        """Return how many devices of each stage of a pipeline have samples of their own."""
        return self._templates[pipeline].round_size

    def lanes(self, pipelines: Sequence[int]) -> list[LaneName]:
        """Return the lanes of some pipelines, unit by unit.

        Args:
            pipelines: Ascending.
        """
        found = [name for pipeline in pipelines for name in self._names[pipeline].values()]
        units = list(dict.fromkeys(name.unit for name in found))
        return sorted(found, key=lambda name: units.index(name.unit))

    def stages(self, row: int) -> list[StageName]:
        """Return the stages of a row."""
        return [name for name, at in self.row_of.items() if at == row]

    def borders(self, row: int) -> dict[Border, Channel]:
        """Return those between a row's stages and those of other rows, which number them alike.

        Features may go from any pipeline to any other, but that each device of sharded stages has all units of its
        samples.
        """
        between: dict[int, set[Border]] = {}
        for border in chain.from_iterable(map(self._touching, self.stages(row))):
            ends = {self.row_of[stage] for stage in border}
            for other in ends - {row}:
                between.setdefault(other, set()).add(border)
        return {
            border: Channel(number, len(borders))
            for borders in between.values()
            for number, border in enumerate(sorted(borders))
        }

    def schedule(
        self,
        pipelines: Sequence[int],
        cells: StepCells,
        states: Callable[[StageSpec], Sequence[int]] | None = None,
        *,
        split: bool = False,
    ) -> Schedule:
        """Return what the rows of pipelines that exchange features do in a step: of :meth:`rows`, in that order.

        Args:
            pipelines: They, ascending; only one where its samples are in no other.
            cells: Of the step, in these pipelines.
            states: Returns the indices of the states whose gradients are summed for a stage; None for no sums.
            split: Whether backwards for the weights stand apart, of stages that have both halves.
        """
        number_of = {row: number for number, row in enumerate(self.rows(pipelines))}
        names = self.lanes(pipelines)
        lanes = tuple(
            UnitLane(
                name=name,
                rows=tuple(number_of[self.row_of[stage]] for stage in self._stages[name]),
                cells=tuple(cells.samples[name]),
                backwards=tuple(self._backward_of[stage] for stage in self._stages[name]),
                whole=name in self.whole,
            )
            for name in names
        )
        decisions = [decision_of(self._templates[pipeline]) for pipeline in pipelines]
        return generate_units(
            StepGraph(lanes=lanes, flows=cells.flows, num_rows=len(number_of)),
            pace=LLM,
            lead=min(each.lead for each in decisions),
            split=[split and self._halved[stage] for name in names for stage in self._stages[name]],
            apart=all(each.encoders_come_first for each in decisions),
            states=states and [states(self.specs[stage]) for name in names for stage in self._stages[name]],
        )

    def _is_whole(self, template: PipelineTemplate, lane: LaneName) -> bool:
        if not self._backward_of[self._stages[lane][-1]]:
            return True
        return bool(template.decision) and decision_of(template).has_whole_cells(lane.unit)

    def _touching(self, stage: StageName) -> Iterator[Border]:
        """Yield the borders of a stage."""
        lane, number = stage
        last = len(self._stages[lane]) - 1
        if number > 0:
            yield (lane, number - 1), stage
        if number < last:
            yield stage, (lane, number + 1)
        if self.specs[stage].shard > 1:
            return
        for other, stages in self._stages.items():
            if self.specs[stages[0]].shard > 1:
                continue
            if number == last and (lane.unit, other.unit) in self.feeds:
                yield stage, stages[0]
            if number == 0 and (other.unit, lane.unit) in self.feeds:
                yield stages[-1], stage


def handed_over(source: str, target: str) -> str:
    """Return the unit whose tokens go from one unit to another: what is beside the language model has the fewer."""
    return target if source == LLM else source


class StageBackward(NamedTuple):
    """The backward of a stage.

    Args:
        kind: What it differentiates.
        halved: Whether it has both halves, where these run apart.
    """

    kind: Backward
    halved: bool


def stage_backwards(
    template: PipelineTemplate, trained: Sequence[bool], feeds: Sequence[tuple[str, str]]
) -> tuple[StageBackward, ...]:
    """Return what each stage differentiates: frozen ones only what something trained before them wants.

    Args:
        template: Of the pipeline.
        trained: Of each of the model's layers.
        feeds: Which unit's features go to which later one.
    """
    found: list[StageBackward] = []
    wanted: dict[str, bool] = {}  # of each unit, whether what it makes has a gradient
    for number, stage in enumerate(template.stages):
        unit = stage.lane.unit
        if number == 0 or template.stages[number - 1].lane != stage.lane:
            before = any(wanted[source] for source, target in feeds if target == unit)
        else:
            before = wanted[unit]
        own = any(trained[stage.first_layer : stage.end_layer])
        kind = Backward.ALL if own else Backward.INPUTS if before else Backward.NONE
        halves = Halves.of(trains=own, wanted=before, again=stage.checkpointing, sharded=stage.shard > 1)
        found.append(StageBackward(kind, halves.both))
        wanted[unit] = own or before
    assert all(unit in wanted or unit == CHAIN.unit for unit, _ in feeds), "units come before those that they feed"
    return tuple(found)
