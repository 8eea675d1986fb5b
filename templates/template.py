"""A pipeline template: the stage layout of one model replica on exactly n nodes, computed before training."""

from __future__ import annotations

from dataclasses import dataclass


def nanoseconds(time_ms: float) -> int:
    """Round to whole nanoseconds: planners compare times as integers, so that ties are ties on every machine."""
    return round(time_ms * 1e6)


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Contiguous layers on one device group.

    Args:
        first_layer: Index of the first layer.
        end_layer: One past the index of the last layer.
        node_index: Which of the template's nodes (0 .. num_nodes - 1) runs the stage.
        device_index: Which device of that node runs it.
        stage_ms: Forward and backward time of one microbatch.
    """

    first_layer: int
    end_layer: int
    node_index: int
    device_index: int
    stage_ms: float


@dataclass(frozen=True, kw_only=True)
class PipelineTemplate:
    """Stages in order; together they cover every layer once and every node of the template."""

    num_nodes: int
    stages: tuple[StageSpec, ...]

    @property
    def slowest_ms(self) -> float:
        """Time of the slowest stage: what one more microbatch costs."""
        return max(stage.stage_ms for stage in self.stages)

    @property
    def fill_ms(self) -> float:
        """Time of one microbatch through all stages, less the slowest: what a step costs before it flows."""
        return sum(stage.stage_ms for stage in self.stages) - self.slowest_ms

    def iteration_ms(self, num_microbatches: int) -> float:
        """Return the time of one step, sum(t) + (N - 1) max(t), to first order that of 1F1B."""
        return self.fill_ms + num_microbatches * self.slowest_ms
