"""Where each sample of a step goes in the pipelines that there are now, which need not be alike.

A planner answers for pipelines that are alike. Where they are, and units place samples in other pipelines than the
language model does, its answer stands. Else it is asked twice: as if all pipelines were like those of which there are
most, but of their own speeds, for who gets which samples in which unit; then of each pipeline alone, as it is, for
lanes and cells: a sample has nothing to do there in units that have it elsewhere.

A pipeline whose devices divide a copy is as many of the planner's replicas, whose cells are numbered in turn: cell n is
that of device n % devices in round n // devices. Each of them has all units of its samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from resilient.planners.costs.correction import UNCORRECTED, Correction
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.pipelines.decision import decision_of, with_lanes
from resilient.planners.planner import Assignment, Configuration, Planner, Replica, Setting
from resilient.planners.stages.one_pipeline import several
from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan

NOWHERE = -1


class SamplePlaces:
    """Places samples in the pipelines of a plan.

    Args:
        planner: Answers.
        costs: Of the units.
        cluster: The nodes.
        microbatch: Mean samples of a cell of the language model.
        plan: The pipelines; each template has the planner's decision.
    """

    def __init__(self, planner: Planner, costs: CostModel, cluster: Cluster, microbatch: int, plan: Plan) -> None:
        self._planner = planner
        self._costs = costs
        self._cluster = cluster
        self._microbatch = microbatch
        self._pipelines = plan.pipelines

    def places(self, batch: SampleTable, correction: Correction = UNCORRECTED) -> Ints:
        """Return pipeline, lane and cell of each sample in each unit; ``NOWHERE`` where that has nothing to do.

        Args:
            batch: The step's samples.
            correction: What was learnt from measured times.

        Returns:
            ``[num_units, num_samples, 3]``

        Raises:
            ValueError: A sample does not fit.
        """
        found = np.full((len(self._costs.units), len(batch), 3), NOWHERE, dtype=np.int64)
        pipeline_of = dict.fromkeys(batch.units, np.zeros(len(batch), dtype=np.int64))
        if len(self._pipelines) > 1:
            setting = self._setting(self._pipelines, len(batch), correction)
            answer = self._planner.assign(setting, self._alike, batch, self._replicas)
            if self._are_alike and _rearranges(answer, batch):
                self._place(found, np.arange(len(batch)), batch, self._alike, answer, self._replicas)
                return found
            pipeline_of = {name: np.asarray(place.replica) // self._alike.shard for name, place in answer.units.items()}
            if any(pipeline.template.round_size > 1 for pipeline in self._pipelines):
                pipeline_of = dict.fromkeys(pipeline_of, pipeline_of[LLM])
        for number, pipeline in enumerate(self._pipelines):
            own = _of_one(batch, {name: each == number for name, each in pipeline_of.items()})
            mine = np.flatnonzero(np.any([lengths.tokens > 0 for lengths in own.units.values()], axis=0))
            if not len(mine):
                continue
            configuration = decision_of(pipeline.template)
            rounds = pipeline.template.num_rounds(pipeline.num_microbatches)
            replicas = [Replica(num_microbatches=rounds)] * configuration.shard
            setting, table = self._setting([pipeline], len(mine), correction), own[mine]
            answer = self._planner.assign(setting, configuration, table, replicas)
            self._place(found, mine, table, configuration, answer, replicas, first=number)
        return found

    def _place(
        self,
        found: Ints,
        samples: Ints,
        table: SampleTable,
        configuration: Configuration,
        answer: Assignment,
        replicas: Sequence[Replica],
        first: int = 0,
    ) -> None:
        """Write down where samples are.

        Args:
            found: Filled in.
            samples: Their positions in it.
            table: What is known of them.
            configuration: Of the pipelines that they are in.
            answer: The planner's.
            replicas: These pipelines.
            first: The number of the first one.
        """
        lanes = with_lanes(configuration)
        for unit, costs in enumerate(self._costs.units):
            there = table.units[costs.name].tokens > 0
            placed = StepUnit.of(lanes, costs, answer, table, replicas)
            lane, cell = np.divmod(placed.cell[there], placed.width)
            replica, own = np.divmod(lane, lanes.units[costs.name].dp // len(replicas))
            number, device = np.divmod(replica, lanes.shard)
            found[unit, samples[there]] = np.stack([first + number, own, cell * lanes.shard + device], axis=1)

    @cached_property
    def _alike(self) -> Configuration:
        """As many pipelines as there are, all like those of which there are most."""
        ((template, _),) = Counter(pipeline.template for pipeline in self._pipelines).most_common(1)
        return several(decision_of(template), len(self._pipelines))

    @property
    def _are_alike(self) -> bool:
        return len({pipeline.template for pipeline in self._pipelines}) == 1

    @cached_property
    def _replicas(self) -> list[Replica]:
        """As many of each pipeline as those of which there are most have."""
        count = self._alike.shard
        times = [pipeline.template.slowest_ms / pipeline.template.round_size for pipeline in self._pipelines]
        return [
            Replica(num_microbatches=-(-each.num_microbatches // count), speed=_ratio(min(times), microbatch_ms))
            for each, microbatch_ms in zip(self._pipelines, times, strict=True)
            for _ in range(count)
        ]

    def _setting(self, pipelines: Sequence[Pipeline], num_samples: int, correction: Correction) -> Setting:
        return Setting(
            costs=self._costs,
            cluster=self._cluster,
            num_nodes=sum(len(pipeline.nodes) for pipeline in pipelines),
            global_batch=num_samples,
            microbatch=self._microbatch,
            num_pipelines=len(pipelines),
            correction=correction,
        )


def _of_one(batch: SampleTable, there: Mapping[str, Flags]) -> SampleTable:
    """Return a batch whose samples have nothing to do in the units in which they are not there."""
    units = {
        name: Lengths(
            tokens=each.tokens * there[name], squares=each.squares * there[name], longest=each.longest * there[name]
        )
        for name, each in batch.units.items()
    }
    return replace(batch, units=units)


def _rearranges(answer: Assignment, batch: SampleTable) -> bool:
    """Return whether an encoder has a sample in another pipeline than the language model."""
    language = answer.units[LLM].replica
    return any(
        bool(np.any((place.replica != language) & (batch.units[name].tokens > 0)))
        for name, place in answer.units.items()
    )


def _ratio(fastest_ms: float, own_ms: float) -> float:
    return fastest_ms / own_ms if own_ms > 0 and fastest_ms > 0 else 1.0
