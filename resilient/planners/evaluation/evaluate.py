"""Simulates one step of a planner's answer: the judge that all planners are compared by.

A replica of the language model and its lanes of each encoder are a pipeline. What they do is a schedule like those that
workers run (:mod:`resilient.planners.evaluation.step_schedule`), timed by the simulator of schedules: whole samples,
and messages for all that goes from one row of devices to another. A microbatch of the language model waits for all
encoder cells that its samples were in. An encoder's backward waits for the language model's microbatches that its
samples went to; samples that went to different ones are calls apart (Entrain's split backward). Where all encoders'
backwards come last, and where devices divide a copy, cells are whole.

Encoders that are colocated with each other share the devices of their stages: for each microbatch one runs after the
other, in reverse order backwards. Replicated ones run on every stage of the language model, before its own forward and
after its backward; all copies' gradients are summed. Where all units are colocated, encoders' forwards come before all
of the language model's on the same devices, their backwards after.

A generator is behind the language model what an encoder is in front of it: its cells wait for the language model's, and
the backward of these for the cells that their samples went to.

Places are indexed by the replicas that ``assign`` was given, in every unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.gradient_sums import sums_end_ns
from resilient.planners.evaluation.shard_groups import in_step
from resilient.planners.evaluation.step_schedule import PlannedStep, planned_step
from resilient.planners.evaluation.step_unit import StepUnit, step_units
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Replica, Setting
from resilient.planners.stages.degraded_replicas import left_bytes
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.one_pipeline import part_of
from resilient.planners.stages.pipeline_memory import CellSize, beside_activations
from resilient.planners.stages.redundancy import check_redundancy
from resilient.planners.stages.stage_work import gathered_bytes
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.simulator import Timeline, simulate


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Time and memory of a simulated step.

    Args:
        iteration_ms: With the sums of gradients.
        sum_ms: Part of it after the last backward, in which gradients are summed over replicas.
        bubble: Part of its devices' time in which nothing is computed.
        std_ms: By unit, standard deviation over its lanes' microbatches of their time in all stages, at full speed.
        timeline: The step without the sums.
        pipelines: That each row works for, the first of them. [num_rows]
        judged_bytes: Returns :attr:`peak_bytes`, which takes a third of a simulation: few are asked for it.
    """

    iteration_ms: float
    sum_ms: float
    bubble: float
    std_ms: Mapping[str, float]
    timeline: Timeline
    pipelines: Ints
    judged_bytes: Callable[[], int]

    @cached_property
    def peak_bytes(self) -> int:
        """What the device that needs most memory takes."""
        return self.judged_bytes()


def evaluate(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> Result:
    """Simulate one step, with stages as far ahead of each other as the configuration says and memory holds.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        assignment: Where the samples go.
        batch: The samples.
        replicas: What ``assign`` was given.

    Raises:
        ValueError: A place is not within the replicas, or in groups of more ranks than they have left, a unit's
            layers are not spread, a replicated encoder has several stages or samples elsewhere than the language
            model, units that share devices need unequal ones, or state is on fewer nodes than
            the job's redundancy asks for.
    """
    check_redundancy(setting, configuration)
    step, units, layout = described_step(setting, configuration, assignment, batch, replicas)
    judge = _Judge(setting, configuration, units, layout, replicas, step)
    result = Result(
        iteration_ms=judge.step_ns / 1e6,
        sum_ms=(judge.step_ns - judge.timeline.iteration_ns) / 1e6,
        bubble=judge.bubble(),
        std_ms={unit.costs.name: unit.std_ms for unit in units},
        timeline=judge.timeline,
        pipelines=layout.pipelines,
        judged_bytes=judge.peak_bytes,
    )
    memory = setting.cluster.memory_bytes
    if memory is not None and configuration.lead > 1 and result.peak_bytes > memory:
        shorter = replace(configuration, lead=configuration.lead - 1)
        return evaluate(setting, shorter, assignment, batch, replicas)
    return result


def described_step(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> tuple[PlannedStep, Sequence[StepUnit], DeviceLayout]:
    """Return the step that :func:`evaluate` simulates if memory holds it, what each unit does in it, and where.

    Args:
        setting: As there.
        configuration: As there.
        assignment: As there.
        batch: As there.
        replicas: As there.

    Raises:
        ValueError: As there.
    """
    if configuration.encoders is Encoders.REPLICATED:
        configuration = replace(configuration, colocated=True)
    layout = DeviceLayout(configuration, len(replicas))
    units, run = units_of_step(setting, configuration, assignment, batch, replicas)
    return planned_step(setting, configuration, run, layout), units, layout


def units_of_step(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> tuple[Sequence[StepUnit], Sequence[StepUnit]]:
    """Return what each unit does in a step as if each lane were alone, in order of execution, and what is run of it.

    Devices that divide a copy are in step, and replicated encoders run with the language model, as one unit.

    Args:
        setting: As for :func:`evaluate`.
        configuration: As there.
        assignment: As there.
        batch: As there.
        replicas: As there.

    Raises:
        ValueError: As there.
    """
    units = step_units(setting, configuration, assignment, batch, replicas)
    run = list(units)
    if configuration.shard > 1:
        layout = DeviceLayout(configuration, len(replicas))
        run = [in_step(setting, configuration, unit, layout) for unit in units]
    if configuration.encoders is Encoders.REPLICATED:
        if not _alike(assignment):  # a group of one unit waits for several of another
            run = [replace(unit, calls=None) for unit in run]
        language = run.pop(setting.language)
        run = [language.with_encoders(run)]
    return units, run


def _alike(assignment: Assignment) -> bool:
    """Return whether units have the same samples in the same groups."""
    language = assignment.units[LLM]
    return all(
        place.group is language.group or np.array_equal(place.group, language.group)
        for place in assignment.units.values()
        if place.group is not None and language.group is not None
    )


def _largest(unit: StepUnit) -> CellSize:
    """Return the size of what a unit computes at once that is largest."""
    assert unit.calls is not None, "of units as if each were alone, calls are known"
    calls = unit.calls.calls
    if not len(calls.tokens):
        return CellSize(0.0, 0.0)
    return CellSize(*(float(each[calls.tokens.argmax()]) for each in (calls.tokens, calls.squares)))


class _Judge:
    """Reads what a step takes off its timeline."""

    def __init__(
        self,
        setting: Setting,
        configuration: Configuration,
        units: Sequence[StepUnit],
        layout: DeviceLayout,
        replicas: Sequence[Replica],
        step: PlannedStep,
    ) -> None:
        self._setting, self._configuration, self._units, self._layout = setting, configuration, units, layout
        self._replicas, self._step = replicas, step
        self.timeline = simulate(step.schedule, step.costs)
        self._codes = step.schedule.codes
        self._computes = np.flatnonzero(self._codes[:, 0] <= Op.BACKWARD_WEIGHT)
        summed_ns = sums_end_ns(setting, configuration, units, layout, self.timeline)
        self.step_ns = max(self.timeline.iteration_ns, summed_ns)

    def bubble(self) -> float:
        """Return the part of the devices' time in which they do not compute."""
        if not self.step_ns:
            return 0.0
        lengths = (self.timeline.end_ns - self.timeline.start_ns)[self._computes]
        _, stages, cells = self._codes[self._computes, :3].T
        sizes = self._layout.sizes
        of_stage = sizes[np.array(self._step.schedule.graph.row_of)]
        busy = float((lengths * self._step.filled[stages, cells] * of_stage[stages]).sum())
        return max(0.0, 1 - busy / (self.step_ns * int(sizes.sum())))  # rounding may make it less

    def peak_bytes(self) -> int:
        """Return the most that a device holds: activations in the order of its tasks, state, and what is beside.

        Of pipelines as workers run them that is what is allocated, else what papers count.
        """
        peaks = np.array(self.timeline.peak_bytes, np.float64)
        if self._setting.num_pipelines:
            return self._allocated(peaks)
        for unit in self._units:
            state = left_bytes(self._setting, unit.costs, self._copies(unit), self._configuration, self._replicas)
            rows = self._rows(unit)[:, : self._configuration.units[self._layout.host(unit.costs.name)].pp]
            np.add.at(peaks, rows, np.broadcast_to(state[self._layout.pipelines[rows[:, 0]]], rows.shape))
        return round(peaks.max() + gathered_bytes(self._setting.costs.units, self._configuration))

    def _allocated(self, peaks: Floats) -> int:
        one = part_of(self._configuration, self._configuration.units[LLM].dp // self._configuration.shard)
        beside = beside_activations(self._setting, one, {unit.costs.name: _largest(unit) for unit in self._units})
        for unit in self._units:
            rows, own = self._rows(unit), beside[unit.costs.name]
            if self._layout.replicated and unit.costs.name != LLM:  # a lane in each row of the language model
                own = own.T
            np.add.at(peaks, rows, own[np.arange(len(rows)) % len(own)])
        return round(peaks.max())

    def _rows(self, unit: StepUnit) -> Ints:
        """Return the rows of each lane of a unit. [num_lanes, num_stages]"""
        return self._layout.rows[self._layout.host(unit.costs.name)]

    def _copies(self, unit: StepUnit) -> Parallelism:
        """Return how a unit is spread with all its copies as replicas."""
        if not self._layout.replicated or unit.costs.name == LLM:
            return unit.spread
        return replace(unit.spread, dp=unit.spread.dp * self._configuration.units[LLM].pp)
