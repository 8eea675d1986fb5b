"""Pipeline templates: stage layouts of one model replica on exactly n nodes, computed before training."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from resilient.errors import ArgumentError, literal
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.durations import nanoseconds
from resilient.templates.schedules.graph import CHAIN, LaneName

FORMAT_VERSION = 7
"""Of :meth:`TemplateSet.to_json`; files of another version are refused."""

Part = tuple[tuple[tuple[tuple[int, int], ...], int, int], ...]
"""What one node runs. Of each of its rows: first and end layer of each stage, first device, number of devices."""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Contiguous layers on one device group, the devices of which are in one node.

    Args:
        lane: Of which unit, and which of its replicas in the pipeline; :data:`CHAIN` where the model is not cut into
            units.
        first_layer: Index of the first layer.
        end_layer: One past the index of the last layer.
        node_index: Which of the template's nodes (0 .. num_nodes - 1) runs the stage.
        first_device: Index, within the node, of the first of its devices.
        num_devices: The stage has devices ``first_device .. first_device + num_devices - 1``.
        shard: How many of its devices have microbatches of their own, which divide the stage's state among them and
            gather it layer by layer: all of them, or 1 where the stage is not sharded and they share each microbatch.
        recomputed_layers: How many layers, the first ones, keep only their inputs and run their forward again in the
            backward (activation checkpointing).
        forward_ms: Forward time of one round of microbatches; where nothing is sharded, that is one. Of units: what
            falls to the lane for one microbatch of the language model.
        backward_ms: Backward time of one round, the forward that is run again included.
        weights_ms: The part of ``backward_ms`` that the schedule can put off, as zero-bubble schedules do with what
            parameters need; half of it where others do not wait for that, but it is not put off; 0 elsewhere, and where
            layers run again or are gathered: all is done at once.
        send_ms: Time of the messages of one round over the boundary before the stage, 0 for the first.
        memory_bytes: Most that one device holds: states, gradients and the activations in flight; under eager 1F1B
            those of 1F1B. Of a device with several stages, the stage's part of the most that it holds of all.
        max_in_flight: For eager 1F1B, how many rounds the memory holds; None where it is not limited.
    """

    lane: LaneName = CHAIN
    first_layer: int
    end_layer: int
    node_index: int
    first_device: int = 0
    num_devices: int = 1
    shard: int = 1
    recomputed_layers: int = 0
    forward_ms: float
    backward_ms: float
    weights_ms: float = 0.0
    send_ms: float = 0.0
    memory_bytes: int = 0
    max_in_flight: int | None = None

    @property
    def checkpointing(self) -> bool:
        """Return whether any layer runs its forward again."""
        return self.recomputed_layers > 0

    @property
    def tp_degree(self) -> int:
        """Devices that share each microbatch of the stage."""
        return self.num_devices // self.shard

    @property
    def stage_ms(self) -> float:
        """Time of one round here: computing, and the messages over the boundary before."""
        return self.forward_ms + self.backward_ms + self.send_ms

    @property
    def filling_ms(self) -> float:
        """What the stage adds to the time that a pipeline takes to fill and to drain.

        While it fills, later stages wait for the first forwards; while it drains, earlier ones wait for the last
        gradients. Weights that are put off neither delay these, nor leave the wait idle that they then take place in.

        Source: Zero Bubble Pipeline Parallelism (ICLR'24), table 2: ZB-H1 idles (p - 1) (F + B - W).
        """
        return max(0.0, self.stage_ms - 2 * self.weights_ms)


class RowTimes(NamedTuple):
    """The rows of a template as arrays.

    Args:
        node: The node of each. [rows]
        busy_ms: What its stages take for a round. [rows]
        filling_ms: What they add to the time that the pipeline takes to fill and to drain. [rows]
    """

    node: Ints
    busy_ms: Floats
    filling_ms: Floats


@dataclass(frozen=True, kw_only=True)
class PipelineTemplate:
    """Stages in order; together they cover every device of the template's nodes in order, and every layer: once where
    the model is a chain, once in each lane of its unit otherwise.

    Interleaved, a device has several stages: stage ``s`` is in row ``s % len(rows)``, under ZB-V on the way back in
    ``len(stages) - 1 - s``. Stages of units come lane after lane, in the units' order; a device may have some of
    several lanes, and several of one.

    What its schedule calls a microbatch is a round of them: one for each device of a sharded stage. Where one stage is
    sharded all are, over as many devices: device d of a stage hands what it makes to device d of the next.

    Args:
        num_nodes: Nodes it is made for.
        stages: The stages.
        sync_ms: The part of the gradient sum over pipelines that no backward hides: that of the first stage.
        lone_sync_ms: What of it is left where a plan has one pipeline: sums over the lanes of a unit. 0 for chains.
        only_alone: Whether memory holds it as a plan's only pipeline, which has all microbatches, but not whatever its
            share is beside others: some schedules keep more in flight of fewer.
        decision: What a planner of units decided of it, for those who assign samples by it: the JSON of a
            :class:`resilient.planners.planner.Configuration`. Empty for chains.
    """

    num_nodes: int
    stages: tuple[StageSpec, ...]
    sync_ms: float = 0.0
    lone_sync_ms: float = 0.0
    only_alone: bool = False
    decision: str = ""

    @cached_property
    def row_stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device group by number, in order of the first ones."""
        rows: dict[tuple[int, int], list[int]] = {}
        for number, stage in enumerate(self.stages):
            rows.setdefault((stage.node_index, stage.first_device), []).append(number)
        return tuple(map(tuple, rows.values()))

    @cached_property
    def rows(self) -> tuple[tuple[StageSpec, ...], ...]:
        """The stages of each device group."""
        return tuple(tuple(self.stages[number] for number in row) for row in self.row_stages)

    @cached_property
    def row_of(self) -> tuple[int, ...]:
        """The row of each stage."""
        place = {number: row for row, numbers in enumerate(self.row_stages) for number in numbers}
        return tuple(place[number] for number in range(len(self.stages)))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What each node runs; () of one that only fills the number of nodes up."""
        rows: list[list[tuple[tuple[tuple[int, int], ...], int, int]]] = [[] for _ in range(self.num_nodes)]
        for row in self.rows:
            layers = tuple((stage.first_layer, stage.end_layer) for stage in row)
            rows[row[0].node_index].append((layers, row[0].first_device, row[0].num_devices))
        return tuple(map(tuple, rows))

    @cached_property
    def lanes(self) -> tuple[LaneName, ...]:
        """The lanes in order."""
        return tuple(dict.fromkeys(stage.lane for stage in self.stages))

    @property
    def num_chunks(self) -> int:
        """Stages of each device group of a chain."""
        return len(self.stages) // len(self.rows) if self.lanes == (CHAIN,) else 1

    @cached_property
    def round_size(self) -> int:
        """Microbatches of a round."""
        return self.stages[0].shard

    def num_rounds(self, num_microbatches: int) -> int:
        """Return the rounds that microbatches take; the last may leave groups without one."""
        return -(-num_microbatches // self.round_size)

    @cached_property
    def slowest_ms(self) -> float:
        """Time of the slowest row: what one more round costs."""
        return self._line[1]

    @cached_property
    def fill_ms(self) -> float:
        """Time of a step beside its rounds, where there are other pipelines: one through all other rows, and the sum.

        Units are passed one after the other, lanes of one side by side. A lane with several stages in the slowest row
        fills as many times faster; to one that is not there cells come too late for that.
        """
        return self.line_ms()[0]

    def line_ms(self, node_factors: Sequence[float] | None = None, *, alone: bool = False) -> tuple[float, float]:
        """Return the time of a step beside its rounds, and of its slowest row: what one more round costs.

        Args:
            node_factors: For each of the nodes, by how much the stages on it take longer; by default all are as fast as
                profiled.
            alone: Whether it is the only pipeline of a plan, and has no gradients to sum with others.

        Raises:
            ValueError: Not one factor per node.
        """
        if node_factors is not None and len(node_factors) != self.num_nodes:
            raise ArgumentError(
                "node_factors",
                f"be one for each of the template's {self.num_nodes} nodes",
                len(node_factors),
                "give 1.0 for nodes as fast as profiled",
            )
        fill, slowest = self._line if node_factors is None else self._line_ms(node_factors)
        return fill + (self.lone_sync_ms if alone else self.sync_ms), slowest

    @cached_property
    def line_ns(self) -> tuple[int, int]:
        """:meth:`line_ms` in whole nanoseconds, where there are other pipelines; a round counts for 1 at least."""
        return _rounded(self.line_ms())

    @cached_property
    def lone_line_ns(self) -> tuple[int, int]:
        """The same where there are none."""
        return _rounded(self.line_ms(alone=True))

    @cached_property
    def _rows_ms(self) -> list[tuple[int, float, float]]:
        """The node of each row, what its stages take for a round, and what they fill."""
        return [
            (row[0].node_index, math.fsum(s.stage_ms for s in row), math.fsum(s.filling_ms for s in row))
            for row in self.rows
        ]

    @cached_property
    def _stages_ms(self) -> list[tuple[LaneName, int, int, float]]:
        """The lane of each stage, its row, its node, and what it fills."""
        each = zip(self.stages, self.row_of, strict=True)
        return [(stage.lane, row, stage.node_index, stage.filling_ms) for stage, row in each]

    @cached_property
    def row_times(self) -> RowTimes:
        """What the rows take."""
        node, busy, filling = zip(*self._rows_ms, strict=True)
        return RowTimes(np.array(node, dtype=np.int64), np.array(busy), np.array(filling))

    @cached_property
    def idlest_nodes(self) -> Ints:
        """The nodes, those first whose longest row takes least; and those first whose rows take least. [2, nodes]"""
        node, busy, _ = self.row_times
        longest, total = np.zeros(self.num_nodes), np.zeros(self.num_nodes)
        np.maximum.at(longest, node, busy)
        np.add.at(total, node, busy)
        return np.argsort((longest, total), axis=1, kind="stable")

    @cached_property
    def _line(self) -> tuple[float, float]:
        return self._line_ms((1.0,) * self.num_nodes)

    def _line_ms(self, node_factors: Sequence[float]) -> tuple[float, float]:
        rows = [(busy * node_factors[node], filling * node_factors[node]) for node, busy, filling in self._rows_ms]
        slowest, its_own = max(rows)
        if self.lanes == (CHAIN,) and self.num_chunks == 1:
            return max(math.fsum(filling_ms for _, filling_ms in rows), its_own) - its_own, slowest
        slowest_row = rows.index((slowest, its_own))
        chunks = Counter(stage.lane for stage in self.rows[slowest_row])
        lanes: dict[LaneName, list[float]] = {}
        for lane, row, node, filling_ms in self._stages_ms:
            times_faster = chunks[lane] if row != slowest_row and lane in chunks else 1
            lanes.setdefault(lane, []).append(filling_ms * node_factors[node] / times_faster)
        units: dict[str, float] = {}
        for lane, times in lanes.items():
            units[lane.unit] = max(units.get(lane.unit, 0.0), math.fsum(times))
        through = max(math.fsum(units.values()), its_own)  # colocated lanes may take longer than one microbatch's way
        return through - its_own, slowest

    def iteration_ms(self, num_microbatches: int, *, alone: bool = False) -> float:
        """Return the time of one step of N rounds, with one stage for each device ``sum(t) + (N - 1) max(t) + sync``.

        The only pipeline of a plan, ``alone``, has no gradients to sum with others.

        1F1B takes no longer where messages are free and every stage's backward is the same multiple of its forward.
        Otherwise it can: its warm-up runs forwards of later rounds before a backward that is ready.

        Source: Oobleck (SOSP'23), section 4.1.2, to first order.
        """
        fill_ms, slowest_ms = self.line_ms(alone=alone)
        return fill_ms + self.num_rounds(num_microbatches) * slowest_ms


def _rounded(line_ms: tuple[float, float]) -> tuple[int, int]:
    fill_ms, slowest_ms = line_ms
    return nanoseconds(fill_ms), max(1, nanoseconds(slowest_ms))


@dataclass(frozen=True, kw_only=True, eq=False)
class TemplateSet:
    """All templates of a job: for each number of nodes the layouts among which the number of microbatches decides.

    Layouts of one size trade the slowest stage against the sum of all: the more microbatches, the more the slowest
    counts.

    Args:
        problem_digest: Of what they were computed for (:attr:`resilient.templates.plan.PlanningProblem.digest`).
        layouts: By size, consecutive and ascending; each non-empty, by rising ``round_size``, falling ``slowest_ms``.
    """

    problem_digest: str
    layouts: tuple[tuple[PipelineTemplate, ...], ...]

    def __hash__(self) -> int:
        return hash(self.digest)  # to hash and to compare all layouts takes longer than what is kept by them

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TemplateSet) and self.digest == other.digest)

    @property
    def sizes(self) -> range:
        """The numbers of nodes there are templates for; the first is n0."""
        first = self.layouts[0][0].num_nodes
        return range(first, first + len(self.layouts))

    @cached_property
    def sizes_beside(self) -> range:
        """Those of the sizes that pipelines have which stand beside others; empty where a plan has one at most."""
        first = next((of[0].num_nodes for of in self.layouts if not of[0].only_alone), self.sizes.stop)
        return range(first, self.sizes.stop)

    def most_pipelines(self, num_nodes: int, num_microbatches: int) -> int:
        """Return how many pipelines a plan of so many nodes has at most, each with a microbatch; 0 where none fits."""
        beside = min(num_microbatches, num_nodes // self.sizes_beside.start) if self.sizes_beside else 0
        return max(beside, int(num_nodes >= self.sizes.start))

    def of(self, num_nodes: int) -> tuple[PipelineTemplate, ...]:
        """Return the layouts for a number of nodes.

        Raises:
            ValueError: There are none for it.
        """
        if num_nodes not in self.sizes:
            raise ValueError(
                f"num_nodes of a template must be {self.sizes.start} to {self.sizes.stop - 1}, got {num_nodes}; "
                f"plan templates for more nodes"
            )
        return self.layouts[num_nodes - self.sizes.start]

    def best(self, num_nodes: int, num_microbatches: int, *, alone: bool = False) -> PipelineTemplate:
        """Return the layout with the shortest step for a number of microbatches (ties: the first).

        Args:
            num_nodes: One of :attr:`sizes`.
            num_microbatches: Of the pipeline.
            alone: Whether it is the only pipeline of a plan.
        """
        return min(
            self.of(num_nodes), key=lambda template: nanoseconds(template.iteration_ms(num_microbatches, alone=alone))
        )

    @cached_property
    def digest(self) -> str:
        """Content hash; nodes with the same digest use the same templates."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def to_json(self) -> bytes:
        """Encode as JSON, with the format's version and the digest."""
        return msgspec.json.encode(_File(version=FORMAT_VERSION, digest=self.digest, templates=self))

    @classmethod
    def from_json(cls, data: bytes) -> TemplateSet:
        """Decode what :meth:`to_json` wrote.

        Raises:
            ValueError: Another version, or content that does not fit its digest (``msgspec.ValidationError``, which is
                a ValueError, where it is not such a file at all); compute the templates again.
        """
        file = msgspec.json.decode(data, type=_File)
        if file.version != FORMAT_VERSION:
            raise ArgumentError("version", f"be {FORMAT_VERSION}", file.version, "compute the templates again")
        if file.digest != file.templates.digest:
            raise ArgumentError(
                "templates",
                literal(f"have the digest {file.digest[:12]}"),
                f"{file.templates.digest[:12]}: the file was changed",
                "compute the templates again",
            )
        return file.templates


@dataclass(frozen=True, kw_only=True)
class _File:
    version: int
    digest: str
    templates: TemplateSet
