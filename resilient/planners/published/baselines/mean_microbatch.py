"""What the mean microbatch takes on the stages of units, and samples as they come: what baselines have in common.

What a microbatch costs is taken to be what the mean one does; that it is not is what other planners are for. The
optimizer is sharded over replicas. :func:`in_order` is also what others are compared with; planners that decide no
more than a configuration take samples like that (:class:`AsTheyCome`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Replica, Setting
from resilient.planners.stages.one_pipeline import is_asked_for
from resilient.planners.stages.stage_work import final_last
from resilient.templates.common.arrays import Floats


def in_order(num_samples: int, replicas: Sequence[Replica]) -> Place:
    """Return consecutive samples in consecutive microbatches of (nearly) equal numbers of samples.

    Args:
        num_samples: Of the batch.
        replicas: They; each gets samples by its number of microbatches.
    """
    counts = [each.num_microbatches for each in replicas]
    starts = np.concatenate(([0], np.cumsum(counts)))
    slot = np.arange(num_samples, dtype=np.int64) * starts[-1] // max(num_samples, 1)
    replica = np.searchsorted(starts, slot, side="right") - 1
    return Place(replica=replica.astype(np.int64), microbatch=slot - starts[replica])


def num_microbatches(setting: Setting, dp: int) -> int:
    """Return how many microbatches each of ``dp`` replicas has; the last ones may lack a sample."""
    return -(-setting.global_batch // (dp * setting.microbatch))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """The stages of one unit when they process the mean microbatch; all ``[num_stages]``.

    Args:
        forward_ms: Of a microbatch.
        backward_ms: Likewise.
        held_bytes: Parameters and gradients on each device.
        gradient_bytes: The gradients alone.
        last_bytes: Of these, what is final last.
        optimizer_bytes: The optimizer of those, before it is sharded over replicas.
        kept_bytes: Activations of a microbatch on each device, of layers that have a backward.
        deviation: Of a microbatch's tokens, by their mean.
        largest: How much longer than the mean sample the longest is, likewise.
    """

    forward_ms: Floats
    backward_ms: Floats
    held_bytes: Floats
    gradient_bytes: Floats
    last_bytes: Floats
    optimizer_bytes: Floats
    kept_bytes: Floats
    deviation: Floats
    largest: Floats

    @property
    def work_ms(self) -> Floats:
        """Forward and backward of a microbatch."""
        return self.forward_ms + self.backward_ms

    def state_bytes(self, optimizer_part: npt.ArrayLike) -> Floats:
        """Return what each device holds beside activations, with this part of the optimizer."""
        return self.held_bytes + self.optimizer_bytes * np.asarray(optimizer_part)

    def activation_bytes(self, in_flight: npt.ArrayLike) -> Floats:
        """Return room for the activations of so many microbatches in a row, of any samples.

        That is for three standard deviations more than the mean, and for the longest sample among others.
        """
        held = np.asarray(in_flight, dtype=np.float64)
        return self.kept_bytes * (held + np.maximum(3 * self.deviation * np.sqrt(held), self.largest))

    @classmethod
    def of(cls, unit: UnitCosts, spread: Parallelism, lengths: Lengths, samples: float) -> Stages:
        """Return a unit's stages.

        Args:
            unit: The unit.
            spread: How it is spread.
            lengths: Of some samples.
            samples: Of a microbatch, on average.
        """
        if not len(lengths.tokens):
            raise ArgumentError("samples", "be one or more", "none", "draw some from the data set")
        tokens, squares = samples * float(lengths.tokens.mean()), samples * float(lengths.squares.mean())
        forward_ms, backward_ms = unit.layer_ms(tokens, squares, spread.tp, spread.cp)
        index = unit.index(spread.tp, spread.cp)
        deviation = samples**0.5 * float(lengths.tokens.std()) / tokens if tokens else 0.0
        largest = (float(lengths.tokens.max()) - float(lengths.tokens.mean())) / tokens if tokens else 0.0
        held = [layer.parameter_bytes + layer.gradient_bytes for layer in unit.layers]
        kept = [layer.curves[index].activation_bytes * layer.has_backward for layer in unit.layers]
        gradients = np.array([layer.gradient_bytes for layer in unit.layers]) / spread.tp
        return cls(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            held_bytes=np.array(held) / spread.tp,
            gradient_bytes=gradients,
            last_bytes=gradients,
            optimizer_bytes=np.array([layer.optimizer_bytes for layer in unit.layers]) / spread.tp,
            kept_bytes=np.array(kept) * tokens,
            deviation=np.full(len(kept), deviation),
            largest=np.full(len(kept), largest),
        ).joined(spread.stage_layers)

    def joined(self, counts: Sequence[int]) -> Stages:
        """Return stages that each hold so many of these, in order."""
        firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
        return Stages(
            forward_ms=np.add.reduceat(self.forward_ms, firsts),
            backward_ms=np.add.reduceat(self.backward_ms, firsts),
            held_bytes=np.add.reduceat(self.held_bytes, firsts),
            gradient_bytes=np.add.reduceat(self.gradient_bytes, firsts),
            last_bytes=final_last(self.last_bytes, firsts),
            optimizer_bytes=np.add.reduceat(self.optimizer_bytes, firsts),
            kept_bytes=np.add.reduceat(self.kept_bytes, firsts),
            deviation=self.deviation[firsts],
            largest=self.largest[firsts],
        )


def chained(stages: Iterable[Stages]) -> Stages:
    """Return units' stages one after the other."""
    parts = list(stages)
    return Stages(
        forward_ms=np.concatenate([each.forward_ms for each in parts]),
        backward_ms=np.concatenate([each.backward_ms for each in parts]),
        held_bytes=np.concatenate([each.held_bytes for each in parts]),
        gradient_bytes=np.concatenate([each.gradient_bytes for each in parts]),
        last_bytes=np.concatenate([each.last_bytes for each in parts]),
        optimizer_bytes=np.concatenate([each.optimizer_bytes for each in parts]),
        kept_bytes=np.concatenate([each.kept_bytes for each in parts]),
        deviation=np.concatenate([each.deviation for each in parts]),
        largest=np.concatenate([each.largest for each in parts]),
    )


def common_degrees(costs: CostModel) -> tuple[tuple[int, int], ...]:
    """Return the degrees that every unit was profiled at, ascending."""
    return tuple(sorted(set.intersection(*(set(unit.degrees) for unit in costs.units))))


def fastest(found: Iterable[Configuration], planner: str, setting: Setting) -> Configuration:
    """Return the configuration with the least predicted time, the first of equals, of those that are asked for.

    Raises:
        ValueError: There is none.
    """
    asked = (each for each in found if is_asked_for(setting, each))
    best = min(asked, key=lambda each: round(each.predicted_ms * 1e6), default=None)
    if best is None and setting.num_pipelines:
        raise ArgumentError(
            "num_pipelines",
            f"be one that {planner!r} has an answer for, on all devices, and without sharding beyond a node",
            f"{setting.num_pipelines} on {setting.num_nodes} of {setting.cluster.devices_per_node} devices",
            "use other numbers of nodes, or another planner",
        )
    if best is None:
        raise ArgumentError(
            "num_nodes",
            f"be enough for {planner!r}{' with its redundancy' if setting.max_failures else ''}",
            f"{setting.num_nodes} of {setting.cluster.devices_per_node} devices",
            "use more nodes, a smaller microbatch, or another planner",
        )
    return best


def fits(setting: Setting, num_bytes: Floats) -> bool:
    """Return whether devices have so much memory."""
    return setting.cluster.memory_bytes is None or bool(num_bytes.max() <= setting.cluster.memory_bytes)


class AsTheyCome:
    """Base of planners that do not balance samples."""

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Take samples as they come; all units place a sample alike."""
        return Assignment(units=dict.fromkeys(batch.units, in_order(len(batch), replicas)))
