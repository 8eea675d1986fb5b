"""A plan: the pipelines of one generation on named nodes, and how the global batch is split over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain, groupby

from resilient.errors import ArgumentError
from resilient.templates.common.byte_intervals import ByteIntervals, Piece, common_pieces, redundancy
from resilient.templates.common.digests import content_digest
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.profile import LayerProfile, ModelProfile
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import CHUNK_KINDS, ScheduleKind, check_chunks
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.template import PipelineTemplate, StageSpec


class Sharding(str, Enum):
    """Whether the devices of a node divide the states of its stages, by the names that users give."""

    OFF = "off"
    AUTO = "auto"
    """Where that makes steps shorter, or fits in memory."""
    ON = "on"
    """Wherever a node has several devices."""

    def __str__(self) -> str:
        return self.value


AUTO_DEGREE = "auto"
"""Whatever tensor-parallel degrees make steps shortest."""


def tensor_degree(text: str) -> int | None:
    """Read a tensor-parallel degree as users give it; None for :data:`AUTO_DEGREE`.

    Raises:
        ArgumentError: It is neither that nor a number from 1 on.
    """
    if text == AUTO_DEGREE:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError("tp", f"be {AUTO_DEGREE} or a number of devices", repr(text), "1 means none")
    return int(text)


def degree_text(degree: int | None) -> str:
    """Return what :func:`tensor_degree` reads a degree from."""
    return AUTO_DEGREE if degree is None else str(degree)


def check_methods(schedule: ScheduleKind | None, degree: int | None, sharding: Sharding) -> None:
    """Refuse what stages of several devices cannot be at the same time.

    Args:
        schedule: What pipelines run; None where that is not decided yet.
        degree: As :func:`tensor_degree` returns it.
        sharding: Whether stages may, or must be sharded.

    Raises:
        ArgumentError: The schedule has stages of one device alone, or all stages are to be tensor parallel and sharded.
    """
    if schedule is not None and schedule in CHUNK_KINDS:
        one_each, fix = (
            f"for {schedule.value}, whose stages have one device each",
            "leave it out, or choose another schedule",
        )
        if degree not in (None, 1):
            raise ArgumentError("tp", f"be 1 {one_each}", degree, fix)
        if sharding is not Sharding.OFF:
            raise ArgumentError("shard", f"be off {one_each}", sharding, fix)
    if degree not in (None, 1) and sharding is Sharding.ON:
        raise ArgumentError(
            "shard",
            f"not be on beside {{tp}} {degree} (devices of a stage share each microbatch or have their own, not both)",
            sharding,
            f"give {{tp}} {AUTO_DEGREE} for pipelines of both kinds",
        )


def check_beside_planner(sharding: Sharding) -> None:
    """Refuse to have stages sharded where a planner of units decides on them.

    Raises:
        ArgumentError: They may, or must be.
    """
    if sharding is not Sharding.OFF:
        constraint = "be off for jobs with a planner (it decides which units are sharded)"
        raise ArgumentError("shard", constraint, sharding.value, "leave it out")


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """The job that plans are made for; the same from its start to its end.

    Args:
        profile: The model's layers.
        num_microbatches: Microbatches of one step over all pipelines (global batch / microbatch size).
        cluster: The nodes.
        max_failures: f, node failures that must be survivable at the same time.
        min_pipeline_nodes: The fewest nodes a pipeline may have. n0, the smallest number that templates exist for,
            is larger where the memory of so few nodes does not hold the model.
        activation_checkpointing: Whether stages that do not fit otherwise may run their forward again in the backward.
        failure_interval_s: Expected time between two changes of membership, over which a reconfiguration must pay.
        schedule: What pipelines run; memory must hold the microbatches that it keeps in flight.
        num_chunks: Stages of each device: 1, or more where the schedule has several.
        sharding: Whether stages may, or must be sharded (:attr:`StageSpec.shard`).
        templates: What a planner of units answered for consecutive numbers of nodes, instead of a search; empty for
            chains.
    """

    profile: ModelProfile
    num_microbatches: int
    cluster: Cluster = field(default_factory=Cluster)
    max_failures: int = 1
    min_pipeline_nodes: int = 1
    activation_checkpointing: bool = True
    failure_interval_s: float = 3600.0
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    num_chunks: int = 1
    sharding: Sharding = Sharding.OFF
    templates: tuple[PipelineTemplate, ...] = ()

    def __post_init__(self) -> None:
        if self.max_failures < 0:
            raise ArgumentError("max_failures", "be >= 0", self.max_failures, "0 means no redundancy")
        if self.min_pipeline_nodes < 1:
            raise ArgumentError("min_pipeline_nodes", "be >= 1", self.min_pipeline_nodes, "1 means no minimum")
        if not self.failure_interval_s > 0:
            raise ArgumentError("failure_interval_s", "be > 0", self.failure_interval_s, "give seconds")
        if self.num_microbatches <= self.max_failures:
            raise ArgumentError(
                "num_microbatches",
                f"be at least {{max_failures}} + 1 = {self.max_failures + 1} (each pipeline processes one)",
                self.num_microbatches,
                "raise the global batch or lower the microbatch",
            )
        if self.schedule is ScheduleKind.FORWARD_ONLY:
            raise ArgumentError(
                "schedule",
                "train",
                self.schedule.value,
                f"choose another, {ScheduleKind.ONE_F_ONE_B.value} needs the least memory",
            )
        check_chunks(self.schedule, self.num_chunks)
        check_methods(self.schedule, self.profile.tp_degrees[0], self.sharding)
        if self.templates:
            check_beside_planner(self.sharding)
        sizes = [template.num_nodes for template in self.templates]
        if sizes != list(range(sizes[0], sizes[0] + len(sizes)) if sizes else []):
            raise ArgumentError("templates", "be for consecutive numbers of nodes", sizes, "leave none out")
        if self.cluster.devices_per_node < self.profile.tp_degrees[0]:
            raise ArgumentError(
                "devices_per_node",
                f"be at least the profile's smallest tensor-parallel degree, {self.profile.tp_degrees[0]}",
                self.cluster.devices_per_node,
                "use nodes of more devices or smaller degrees",
            )

    @property
    def most_microbatches(self) -> int:
        """The most that one pipeline can get: there are f others, each of which gets one."""
        return self.num_microbatches - self.max_failures

    @property
    def digest(self) -> str:
        """Content hash; templates of equal digests are equal."""
        return content_digest(self)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A template on particular nodes, with its share of the microbatches."""

    template: PipelineTemplate
    nodes: tuple[int, ...]
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker's place in a plan.

    Args:
        rank: Global rank.
        node: Its node.
        local_rank: Its device of the node.
        pipeline_index: Its pipeline.
        row_index: Of its row, within the pipeline's template.
        stages: What it runs: one stage, several under interleaved schedules and where units share devices.
        shard_index: Counts the devices of its stages.
    """

    rank: int
    node: int
    local_rank: int
    pipeline_index: int
    row_index: int
    stages: tuple[StageSpec, ...]
    shard_index: int = 0

    def intervals(self, profile: ModelProfile) -> dict[str, ByteIntervals]:
        """Return what it needs of each state that its stages use, in layer order.

        One device of several has its part of what is cut where they are tensor parallel, and all of the rest; where
        they are sharded, an equal part of each of the buffer's segments.
        """
        layers = (layer for stage in self.stages for layer in profile.layers[stage.first_layer : stage.end_layer])
        used = {name for layer in layers for name in (layer.name, *layer.shares)}
        stage = self.stages[0]

        def held(layer: LayerProfile) -> ByteIntervals:
            if stage.num_devices == 1:
                return layer.whole
            divided = layer.part if stage.shard == 1 else layer.share
            return divided(self.shard_index, stage.num_devices)

        return {layer.name: held(layer) for layer in profile.layers if layer.name in used}

    @property
    def group_index(self) -> int:
        """Return which of the groups of devices with microbatches of their own it is in."""
        return self.shard_index // self.stages[0].tp_degree


Holdings = Mapping[str, Mapping[int, ByteIntervals]]
"""By state and rank, what the rank holds of the state."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pipelines of one generation. Ranks number the devices, pipeline by pipeline, row by row.

    Args:
        pipelines: In order of their ranks.
        schedule_kind: What they run. How many stages (chunks) each worker has is their templates'.
    """

    pipelines: tuple[Pipeline, ...]
    schedule_kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All workers' places, by rank."""
        slots: list[Slot] = []
        for pipeline_index, pipeline in enumerate(self.pipelines):
            for row_index, stages in enumerate(pipeline.template.rows):
                for shard_index in range(stages[0].num_devices):
                    slots.append(
                        Slot(
                            rank=len(slots),
                            node=pipeline.nodes[stages[0].node_index],
                            local_rank=stages[0].first_device + shard_index,
                            pipeline_index=pipeline_index,
                            row_index=row_index,
                            stages=stages,
                            shard_index=shard_index,
                        )
                    )
        return tuple(slots)

    @cached_property
    def rows(self) -> tuple[tuple[Slot, ...], ...]:
        """The places of each row's devices, pipeline by pipeline."""
        return tuple(tuple(devices) for _, devices in groupby(self.slots, _row_of))

    def rows_of(self, pipeline_index: int) -> tuple[tuple[Slot, ...], ...]:
        """Return those of a pipeline."""
        return tuple(devices for devices in self.rows if devices[0].pipeline_index == pipeline_index)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """All nodes, pipeline by pipeline."""
        return tuple(chain.from_iterable(pipeline.nodes for pipeline in self.pipelines))

    @property
    def finish_ms(self) -> tuple[float, ...]:
        """When each pipeline is expected to be done with its share of a step; the step ends with the last."""
        alone = len(self.pipelines) == 1
        return tuple(each.template.iteration_ms(each.num_microbatches, alone=alone) for each in self.pipelines)

    def microbatches(self, pipeline_index: int) -> tuple[int, ...]:
        """Return the positions, within the step's microbatches, of those that a pipeline processes, in its order."""
        start = sum(pipeline.num_microbatches for pipeline in self.pipelines[:pipeline_index])
        return tuple(range(start, start + self.pipelines[pipeline_index].num_microbatches))

    def holders(self, profile: ModelProfile) -> dict[str, dict[int, ByteIntervals]]:
        """Return, per state name in layer order, which ranks (ascending) hold what of it."""
        holders: dict[str, dict[int, ByteIntervals]] = {layer.name: {} for layer in profile.layers}
        # Equal templates of a plan are often one object, and its rows are all that intervals depend on.
        known: dict[tuple[int, int], dict[str, ByteIntervals]] = {}
        for slot in self.slots:
            row = id(slot.stages), slot.shard_index
            if row not in known:
                known[row] = slot.intervals(profile)
            for state, intervals in known[row].items():
                holders[state][slot.rank] = intervals
        return holders

    def pieces(self, profile: ModelProfile) -> dict[str, tuple[Piece, ...]]:
        """Return, per state name in layer order, what of it the same ranks hold: :func:`common_pieces`."""
        return {state: common_pieces(ranks) for state, ranks in self.holders(profile).items()}

    def redundancy(self, profile: ModelProfile) -> int:
        """Return on how many nodes the byte of a state is that is on the fewest."""
        node_of = {slot.rank: slot.node for slot in self.slots}
        holders = self.holders(profile)
        return min(
            (redundancy(holders[layer.name], layer.whole, node_of) for layer in profile.layers if layer.state_bytes),
            default=len(self.nodes),
        )

    def schedule(self, pipeline_index: int, states: Sequence[Sequence[int]] | None = None) -> Schedule:
        """Return what a pipeline runs in a step, within the memory of its devices; the same on all workers.

        Args:
            pipeline_index: The pipeline.
            states: Per stage, the indices of the states whose gradients are summed, as for :func:`generate`.
        """
        pipeline = self.pipelines[pipeline_index]
        template, kind = pipeline.template, self.schedule_kind
        if kind in CHUNK_KINDS and template.num_chunks == 1:  # a pipeline of one device has one stage
            kind = ScheduleKind.ONE_F_ONE_B
        limits = [stage.max_in_flight for stage in template.stages]
        return generate(
            kind,
            len(template.rows),
            template.num_rounds(pipeline.num_microbatches),
            states=states,
            num_chunks=template.num_chunks,
            max_in_flight=None
            if kind is not ScheduleKind.EAGER or None in limits
            else [limit for limit in limits if limit],
        )


def _row_of(slot: Slot) -> tuple[int, int]:
    return slot.pipeline_index, slot.row_index
