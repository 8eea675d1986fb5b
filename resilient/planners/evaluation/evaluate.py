"""Simulates one step of a planner's answer: the judge that all planners are compared by.

A replica of the language model and its share of each encoder are a pipeline. Its stages run 1F1B: a stage with d stages
after it is d microbatches ahead. A microbatch of the language model waits for all encoder microbatches that its samples
were in. An encoder's backward waits for the language model's microbatches that its samples went to; samples that went
to different ones are differentiated apart (Entrain's split backward).

Encoders that are colocated with each other share the devices of their stages: for each microbatch one runs after the
other, in reverse order backwards. Replicated ones run on every stage of the language model, before its own forward and
after its backward; all copies' gradients are summed. Where all units are colocated, encoders' forwards come before all
of the language model's on the same devices, their backwards after.

Places are indexed by the replicas that ``assign`` was given, in every unit. With another number of encoder replicas
each pipeline has a share of them: too few are slower, as if each worked for several pipelines at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.step_tasks import StepBuilder
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.evaluation.timeline import end_times
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Replica, Setting
from resilient.planners.stages.degraded_replicas import left_bytes
from resilient.planners.stages.device_layout import DeviceLayout, Lane
from resilient.planners.stages.stage_work import gradient_sum_ms
from resilient.templates.common.arrays import Flags, Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskSpans:
    """Start and end of all tasks of a simulated step; arrays ``[num_tasks]``.

    Args:
        lane: Index of ``Result.lanes``.
        backward: Whether it is one.
        microbatch: Of its unit and pipeline.
        start_ns: From the step's start.
        end_ns: Likewise.
    """

    lane: Ints
    backward: Flags
    microbatch: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Time and memory of a simulated step.

    Args:
        iteration_ms: With the sums of gradients.
        sum_ms: Part of it after the last backward, in which gradients are summed over replicas.
        bubble: Part of its devices' time in which nothing is computed.
        std_ms: By unit, standard deviation over microbatches of their time in all stages, at full speed.
        peak_bytes: Of the device that needs most memory.
        lanes: All stages of all pipelines.
        spans: What they do.
    """

    iteration_ms: float
    sum_ms: float
    bubble: float
    std_ms: Mapping[str, float]
    peak_bytes: int
    lanes: tuple[Lane, ...]
    spans: TaskSpans


def evaluate(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> Result:
    """Simulate one step.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        assignment: Where the samples go.
        batch: The samples.
        replicas: What ``assign`` was given.

    Raises:
        ValueError: A place is not within the replicas and their microbatches, a unit's layers are not spread, or a
            replicated encoder has several stages.
    """
    if configuration.encoders is Encoders.REPLICATED:
        configuration = replace(configuration, colocated=True)
    units = [StepUnit.of(configuration, unit, assignment, batch, replicas) for unit in setting.costs.units]
    layout = DeviceLayout(configuration, [unit.costs.name for unit in units], len(replicas))
    step = StepBuilder(setting, configuration, units, layout).build()
    ends = end_times(step.tasks)
    starts = ends - step.tasks.length_ns
    judge = _Judge(setting, configuration, units, layout, replicas)
    step_ns = judge.with_sums(step.lane, starts, ends)
    return Result(
        iteration_ms=step_ns / 1e6,
        sum_ms=(step_ns - int(ends.max(initial=0))) / 1e6,
        bubble=judge.bubble(step.lane, step.tasks.length_ns * step.filled, step_ns),
        std_ms={unit.costs.name: unit.std_ms for unit in units},
        peak_bytes=judge.peak_bytes(step.tasks.row, step.kept_bytes),
        lanes=layout.lanes,
        spans=TaskSpans(
            lane=step.lane, backward=step.backward, microbatch=step.microbatch, start_ns=starts, end_ns=ends
        ),
    )


class _Judge:
    """Reads what a step takes off its tasks' times."""

    def __init__(
        self,
        setting: Setting,
        configuration: Configuration,
        units: Sequence[StepUnit],
        layout: DeviceLayout,
        replicas: Sequence[Replica],
    ) -> None:
        self._setting, self._configuration, self._units, self._layout = setting, configuration, units, layout
        self._replicas = replicas

    def with_sums(self, lane: Ints, starts: Ints, ends: Ints) -> int:
        """Return when the step ends: after every stage's gradients are summed over its replicas.

        The sum of a layer's gradient starts when its last backward ends; the layers of a stage follow each other.
        """
        begun, done = np.zeros((2, len(self._layout.lanes)), np.int64)
        np.maximum.at(begun, lane, starts)
        np.maximum.at(done, lane, ends)
        step = int(ends.max(initial=0))
        if self._configuration.sharded:
            return step
        for number, unit in enumerate(self._units):
            own = slice(self._layout.first_lane[number], self._layout.first_lane[number + 1])
            sums_ms = gradient_sum_ms(unit.costs, self._copies(unit), self._setting.cluster)
            sums = np.rint(1e6 * sums_ms).astype(np.int64)
            last = sums // np.array(unit.spread.stage_layers)
            by_stage = (-1, unit.spread.pp)
            step = max(
                step, int(np.maximum(begun[own].reshape(by_stage) + sums, done[own].reshape(by_stage) + last).max())
            )
        return step

    def bubble(self, lane: Ints, length: Floats, step_ns: int) -> float:
        """Return the part of the devices' time in which they do not compute."""
        layout = self._layout
        devices = np.array([unit.spread.tp * unit.spread.cp * unit.share for unit in self._units])
        of_lane = np.repeat(devices, np.diff(layout.first_lane))
        of_row = np.zeros(layout.first_row[-1])
        np.maximum.at(of_row, layout.row, of_lane)
        by_group = [of_row[first:end].sum() for first, end in zip(layout.first_row, layout.first_row[1:], strict=False)]
        total = max(by_group) if self._configuration.colocated else sum(by_group)
        busy = float(np.dot(np.bincount(lane, weights=length, minlength=len(of_lane)), of_lane))
        return 1 - busy / (step_ns * total) if step_ns else 0.0

    def peak_bytes(self, row: Ints, changes: Floats) -> int:
        """Return the most that a device holds: activations in the order of its tasks, and state."""
        layout = self._layout
        sums = np.cumsum(changes)
        before = np.concatenate(([0.0], sums))[np.searchsorted(row, np.arange(layout.first_row[-1]))]
        peaks = np.zeros(layout.first_row[-1])
        np.maximum.at(peaks, row, sums - before[row])
        for number, unit in enumerate(self._units):
            own = slice(layout.first_lane[number], layout.first_lane[number + 1])
            state = left_bytes(unit.costs, self._copies(unit), self._configuration, self._replicas)
            np.add.at(peaks, layout.row[own], np.resize(state.T, (layout.stages[number], len(state))).T.ravel())
        if layout.turns:
            on_device = layout.on_devices()
            peaks = np.where(on_device >= 0, peaks[on_device], 0.0).sum(axis=0)
        return round(peaks.max() + (self._whole_bytes() if self._configuration.sharded else 0))

    def _whole_bytes(self) -> float:
        """Return what is not sharded: the layer that computes, and the one whose parameters come in meanwhile."""
        return 2 * max(
            (layer.parameter_bytes + layer.gradient_bytes) / unit.spread.tp
            for unit in self._units
            for layer in unit.costs.layers
        )

    def _copies(self, unit: StepUnit) -> Parallelism:
        """Return how a unit is spread with all its copies as replicas."""
        if not self._layout.replicated or unit.costs.name == LLM:
            return unit.spread
        return replace(unit.spread, dp=unit.spread.dp * self._configuration.units[LLM].pp)
