"""How much slower than the others a node is, from what the workers have measured. Pure.

What a worker measures is for one mean microbatch of its plan, whatever share of a step it had: where a planner places
samples, workers divide by what these were expected to take, by the costs and corrections that all of them have.

Measured times are compared with measured times: where the profile is wrong about a layer, it is as wrong for every
holder. It only weighs the layers of a worker against each other, because pipelines cut the model differently. Of a
layer that several workers share, it is as wrong for all that share one in the same way, sharded or at one
tensor-parallel degree: where pipelines differ in that, it is first set right for each way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median_low

from resilient.agent.membership.next_generation.members import WorkerId
from resilient.protocol.messages import WorkerProgress
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan, Slot
from resilient.templates.schedules.graph import CHAIN

_NOISE = 1.25
"""Smaller factors are not told apart from the ups and downs of a machine."""


class NodeSpeeds:
    """Remembers for each node by what factor it was slower than the others when that was last measured."""

    def __init__(self) -> None:
        self._slowdowns: dict[int, float] = {}

    @property
    def slowdowns(self) -> Mapping[int, float]:
        """The factors (>= 1) by node; nodes that were never measured are left out."""
        return self._slowdowns

    def observe(self, profile: ModelProfile, plan: Plan, reports: Mapping[WorkerId, WorkerProgress]) -> None:
        """Take in what the workers measured under a plan that ends; what is not measured anew stays known.

        Args:
            profile: Of the model.
            plan: The plan they measured under.
            reports: What they said when it ended.
        """
        stage_ms = {worker: progress.stage_ms for worker, progress in reports.items()}
        self._slowdowns.update(slowdowns(profile, plan, stage_ms))


def slowdowns(profile: ModelProfile, plan: Plan, stage_ms: Mapping[WorkerId, float]) -> dict[int, float]:
    """Compare each worker with the holders of its layers in the other pipelines.

    A worker counts as slow as far as it takes longer than the median of those for the same layers. A microbatch is the
    same work in all pipelines, whatever the cut, but for what is run again or called more often: so the workers of one,
    the latest first, are no later together than it is later than the median pipeline, each by what was planned of it.

    Args:
        profile: Of the model.
        plan: The plan under which the times were measured.
        stage_ms: Measured time of forward and backward of one mean microbatch; 0 or nothing where it is not known.

    Returns:
        Per node, the factor (>= 1, that of its slowest worker) by which it is slower: 1 where nobody else shares layers
        in its way. Nodes of pipelines that were not measured as a whole are left out, and so are all where there is
        nothing to compare with.
    """
    measured_as_a_whole = [
        slots
        for slots in _by_pipeline(plan)
        if all(stage_ms.get((slot.node, slot.local_rank), 0.0) > 0 for slot in slots)
    ]
    layers_ms = {slot.rank: _layers_ms(profile, slot) for slots in measured_as_a_whole for slot in slots}
    pipelines = [
        slots for slots in measured_as_a_whole if all(sum(layers_ms[slot.rank].values()) > 0 for slot in slots)
    ]
    if len(pipelines) < 2:
        return {}
    measured = {slot.rank: stage_ms[slot.node, slot.local_rank] for slots in pipelines for slot in slots}
    _set_right(layers_ms, [slot for slots in pipelines for slot in slots], measured)
    planned_ms_of = {rank: sum(of_slot.values()) for rank, of_slot in layers_ms.items()}
    planned = [sum(planned_ms_of[slot.rank] for slot in slots) for slots in pipelines]
    rates = [
        sum(measured[slot.rank] for slot in slots) / planned_ms
        for slots, planned_ms in zip(pipelines, planned, strict=True)
    ]
    ratios: list[list[float]] = [[] for _ in profile.layers]
    for slots in pipelines:
        for slot in slots:
            for layer in layers_ms[slot.rank]:
                ratios[layer].append(measured[slot.rank] / planned_ms_of[slot.rank])
    ratios, sorted_rates = [sorted(of_layer) for of_layer in ratios], sorted(rates)
    found: dict[int, float] = {}
    for slots, rate, planned_ms in zip(pipelines, rates, planned, strict=True):
        excess_ms = planned_ms * max(0.0, rate - _median_of_others(sorted_rates, rate))
        expected = {slot.rank: _expected_ms(layers_ms[slot.rank], measured[slot.rank], ratios) for slot in slots}
        for slot in sorted(slots, key=lambda slot: (expected[slot.rank] - measured[slot.rank], slot.rank)):
            late_ms = min(excess_ms, max(0.0, measured[slot.rank] - expected[slot.rank]))
            excess_ms -= late_ms
            factor = 1 + late_ms / expected[slot.rank]
            found[slot.node] = max(found.get(slot.node, 1.0), round(factor, 2) if factor >= _NOISE else 1.0)
    return found


def _set_right(layers_ms: dict[int, dict[int, float]], slots: Sequence[Slot], measured: Mapping[int, float]) -> None:
    """Multiply what layers are planned to take, by rank, such that it is as right for each way of sharing layers."""
    ratios: dict[tuple[bool, int] | None, list[float]] = {}
    for slot in slots:
        ratios.setdefault(_way(slot), []).append(measured[slot.rank] / sum(layers_ms[slot.rank].values()))
    if len(ratios) > 1:
        for slot in slots:
            factor = median_low(ratios[_way(slot)])
            layers_ms[slot.rank] = {layer: ms * factor for layer, ms in layers_ms[slot.rank].items()}


def _way(slot: Slot) -> tuple[bool, int] | None:
    """Return how a slot's layers are shared; None for lanes of units, of which planners tell what they take."""
    stage = slot.stages[0]
    return (stage.shard > 1, stage.tp_degree) if stage.lane == CHAIN else None


def _expected_ms(layers_ms: Mapping[int, float], measured_ms: float, ratios: Sequence[Sequence[float]]) -> float:
    """Return how long the other holders would take for a slot's layers, from each layer's ratios of its holders."""
    ratio = measured_ms / sum(layers_ms.values())
    return sum(ms * _median_of_others(ratios[layer], ratio) for layer, ms in layers_ms.items())


def _by_pipeline(plan: Plan) -> list[list[Slot]]:
    slots: list[list[Slot]] = [[] for _ in plan.pipelines]
    for slot in plan.slots:
        slots[slot.pipeline_index].append(slot)
    return slots


def _layers_ms(profile: ModelProfile, slot: Slot) -> dict[int, float]:
    """Return the planned time of each layer of a slot, by its index.

    A lane of a unit has a part of the unit's samples, so what its layers take together is what its stage was planned
    to; a slot may have several lanes of the same layers.
    """
    layers: dict[int, float] = {}
    for stage in slot.stages:
        recomputed = stage.first_layer + stage.recomputed_layers
        degree = profile.tp_degrees.index(stage.tp_degree) if stage.lane == CHAIN else 0
        of_stage = {
            index: (1 + (index < recomputed)) * profile.layers[index].costs[degree].forward_ms
            + profile.layers[index].backward_ms(degree)
            for index in range(stage.first_layer, stage.end_layer)
        }
        whole_ms = sum(of_stage.values())
        planned_ms = whole_ms if stage.lane == CHAIN else stage.forward_ms + stage.backward_ms
        for index, ms in of_stage.items():
            layers[index] = layers.get(index, 0.0) + (ms * planned_ms / whole_ms if whole_ms else 0.0)
    return layers


def _median_of_others(ascending: Sequence[float], own: float) -> float:
    """Return the (lower) median of a sorted sequence without one of its elements."""
    middle = (len(ascending) - 2) // 2
    return ascending[middle] if middle < bisect_left(ascending, own) else ascending[middle + 1]
