"""A plan: the pipelines of one generation on named nodes, and how the global batch is split over them."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.templates.profile import ModelProfile
from resilient.templates.template import PipelineTemplate, StageSpec


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a plan is made for; the same for the whole job.

    Args:
        profile: The model's layers.
        num_microbatches: Microbatches of one step over all pipelines (global batch / microbatch size).
        devices_per_node: Workers of each node.
        max_failures: f, node failures that must be survivable at the same time.
        min_pipeline_nodes: n0, the smallest number of nodes that holds one pipeline.
    """

    profile: ModelProfile
    num_microbatches: int
    devices_per_node: int = 1
    max_failures: int = 1
    min_pipeline_nodes: int = 1

    def __post_init__(self) -> None:
        if self.max_failures < 0:
            raise ValueError(f"max_failures must be >= 0, got {self.max_failures}; 0 means no redundancy")
        if self.devices_per_node < 1:
            raise ValueError(f"devices_per_node must be >= 1, got {self.devices_per_node}; give each node a worker")
        if self.num_microbatches <= self.max_failures:
            raise ValueError(
                f"num_microbatches must be at least max_failures + 1 = {self.max_failures + 1} (each pipeline "
                f"processes one), got {self.num_microbatches}; raise the global batch or lower the microbatch"
            )
        if not 1 <= self.min_pipeline_nodes <= self.max_pipeline_nodes:
            raise ValueError(
                f"min_pipeline_nodes must be 1 to {self.max_pipeline_nodes} ({len(self.profile.layers)} layers, "
                f"{self.devices_per_node} devices per node, one layer per device at least), "
                f"got {self.min_pipeline_nodes}; use fewer nodes per pipeline or cut the model into more layers"
            )

    @property
    def max_pipeline_nodes(self) -> int:
        """The most nodes one pipeline can use: each device takes at least one layer."""
        return len(self.profile.layers) // self.devices_per_node

    @property
    def min_nodes(self) -> int:
        """(f + 1) n0: below this the job cannot go on with its promised redundancy."""
        return (self.max_failures + 1) * self.min_pipeline_nodes


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A template on particular nodes, with its share of the microbatches."""

    template: PipelineTemplate
    nodes: tuple[int, ...]
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker's place in a plan."""

    rank: int
    node: int
    local_rank: int
    pipeline_index: int
    stage_index: int
    stage: StageSpec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pipelines of one generation. Ranks number the stages pipeline by pipeline."""

    pipelines: tuple[Pipeline, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All workers' places, by rank."""
        slots: list[Slot] = []
        for pipeline_index, pipeline in enumerate(self.pipelines):
            for stage_index, stage in enumerate(pipeline.template.stages):
                slots.append(
                    Slot(
                        rank=len(slots),
                        node=pipeline.nodes[stage.node_index],
                        local_rank=stage.device_index,
                        pipeline_index=pipeline_index,
                        stage_index=stage_index,
                        stage=stage,
                    )
                )
        return tuple(slots)

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes, pipeline by pipeline."""
        return tuple(node for pipeline in self.pipelines for node in pipeline.nodes)

    def microbatches(self, pipeline_index: int) -> range:
        """Return the indices, within the step's microbatches, that a pipeline processes."""
        start = sum(pipeline.num_microbatches for pipeline in self.pipelines[:pipeline_index])
        return range(start, start + self.pipelines[pipeline_index].num_microbatches)

    def holders(self, profile: ModelProfile) -> dict[str, tuple[int, ...]]:
        """Return, per state name in layer order, the ranks (ascending) that hold it."""
        holders: dict[str, list[int]] = {layer.name: [] for layer in profile.layers}
        for slot in self.slots:
            for state in profile.states(slot.stage.first_layer, slot.stage.end_layer):
                holders[state].append(slot.rank)
        return {state: tuple(ranks) for state, ranks in holders.items()}
