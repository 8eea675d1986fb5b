"""What all planners have in common: what they are given and what they answer.

``configure`` is asked once per job (and again only when the model, the data or the cluster changed), ``assign`` in
every step, after failures too: the replicas it is given are the pipelines of the current plan, of unequal speed and
with unequal numbers of microbatches. Both are functions of their arguments alone, so every worker finds the same
answer by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.planners.costs.correction import UNCORRECTED, Correction
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.inputs.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job that planners plan: its costs, its cluster and its batch.

    Args:
        costs: Of the model's units.
        cluster: The nodes.
        num_nodes: How many.
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch, on average.
        max_failures: Nodes that it survives losing at the same time: no state is on fewer nodes than one more.
        num_pipelines: Copies of the language model that are asked for, on all devices, as the runtime runs them: each
            is that of one replica, or is divided by those of a node, which have all units of their samples (replicated
            encoders). None leaves all that to the planner.
        num_peers: As many others as all of these together are there beside them, so many times, for other parts of the
            steps' samples: steps take as long as the slowest of all.
        splits: Whether backwards for the weights stand apart, as workers run zb-h1: as late as those of each lane's
            first stage that has a backward.
        correction: What was learnt from measured times.
    """

    costs: CostModel
    cluster: Cluster
    num_nodes: int
    global_batch: int
    microbatch: int
    max_failures: int = 0
    num_pipelines: int | None = None
    num_peers: int = 0
    splits: bool = False
    correction: Correction = UNCORRECTED

    def __post_init__(self) -> None:
        for name in ("num_nodes", "global_batch", "microbatch"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, "be >= 1", getattr(self, name), "a job has one at least")
        if self.max_failures < 0:
            raise ArgumentError("max_failures", "be >= 0", self.max_failures, "0 means no redundancy")
        if self.num_pipelines is not None and self.num_pipelines < 1:
            raise ArgumentError("num_pipelines", "be >= 1", self.num_pipelines, "None leaves it to the planner")

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.cluster.devices_per_node

    @property
    def with_peers(self) -> Setting:
        """The job of which this is a part."""
        times = 1 + self.num_peers
        return replace(
            self,
            num_nodes=times * self.num_nodes,
            global_batch=times * self.global_batch,
            num_pipelines=self.num_pipelines and times * self.num_pipelines,
            num_peers=0,
        )

    @property
    def least_devices(self) -> int:
        """Devices that an answer uses at least."""
        return self.num_devices if self.num_pipelines else 0

    @property
    def language(self) -> int:
        """Position of the language model among the units.

        Raises:
            ValueError: There is none.
        """
        names = [unit.name for unit in self.costs.units]
        if LLM not in names:
            raise ArgumentError("costs", f"have a unit {LLM!r}", names, "name it so")
        return names.index(LLM)

    def sharded_part(self, copies: npt.ArrayLike) -> Floats:
        """Return the part that each of so many copies holds of what they share, with as many pieces as redundancy asks.

        Args:
            copies: They; any shape. Less than one where devices were lost: those that are left hold so much more.
        """
        number = np.asarray(copies, dtype=np.float64)
        return np.clip(number, 1, self.max_failures + 1) / number

    def sample_ms(self, unit: str, lengths: Lengths, tp: int = 1, cp: int = 1) -> Floats:
        """Return what a unit's layers take for each sample, forward and backward, corrected. [num_samples]"""
        predicted = self.costs.by_name[unit].work(tp, cp).of(lengths)
        return predicted * self.correction.factor(unit, tp, lengths.longest)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Devices of one unit: ``dp`` replicas of ``pp`` rows of ``tp * cp`` devices.

    Each row has a stage, or ``chunks`` (virtual) stages: stage ``s`` is on row ``s % pp``. ``stage_layers`` counts the
    layers of each stage; it sums up to the unit's layers. ``recompute`` is the part of the
    layers of each stage, rounded up, that keep nothing but their inputs, and run their forward again in the backward
    (activation checkpointing).
    """

    dp: int
    pp: int
    tp: int = 1
    cp: int = 1
    chunks: int = 1
    stage_layers: tuple[int, ...] = ()
    recompute: float = 0.0

    def __post_init__(self) -> None:
        if self.chunks < 1 or (self.chunks > 1 and self.pp == 1):
            fix = "on a single row, several stages follow each other as one does"
            raise ArgumentError("chunks", "be >= 1, and 1 where pp is", self.chunks, fix)
        if not 0 <= self.recompute <= 1:
            raise ArgumentError("recompute", "be a part of the layers, 0 to 1", self.recompute, "1 means all")

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def num_stages(self) -> int:
        """Stages of a replica."""
        return self.pp * self.chunks

    @cached_property
    def first_layers(self) -> Ints:
        """The first layer of each stage. [num_stages]"""
        return np.cumsum((0, *self.stage_layers[:-1]))


class Encoders(str, Enum):
    """Places of the encoders beside the language model.

    ``parallel``: each has stages of its own, and they run side by side. ``colocated``: they share theirs, the k-th
    stage of each being on the same devices, one after the other. ``replicated``: every stage of the language model has
    all of them and runs them again.
    """

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    REPLICATED = "replicated"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A planner's decision for the whole job.

    Args:
        units: By unit, in order of execution.
        num_microbatches: Of each replica of the language model, in one step.
        colocated: Whether the encoders' stages lie on the language model's devices (and all encoder work comes first)
            instead of on their own.
        encoders: How encoders share devices with each other.
        shard: Devices, of consecutive replicas, that divide one copy of parameters, gradients and the optimizer, and
            gather it layer by layer: 1 if each has its own (and all divide the optimizer alone), those of a node
            (HSDP), or all (FSDP). Their microbatches are in step, as all take part in all gathers.
        lead: Microbatches that a stage runs ahead of the next one: 1 is 1F1B, 2 is eager 1F1B. Less, in steps in which
            memory does not hold so many.
        assigned_by: The planner that assigns samples, where it is another one than decided.
        predicted_ms: Step time as the planner itself predicts it.
        notes: What people should know of the decision, a sentence each.
    """

    units: Mapping[str, Parallelism]
    num_microbatches: int
    colocated: bool = False
    encoders: Encoders = Encoders.PARALLEL
    shard: int = 1
    lead: int = 1
    assigned_by: str = ""
    predicted_ms: float = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.shard < 1:
            raise ArgumentError("shard", "be >= 1", self.shard, "1 means that each device has a copy")
        if self.lead < 1:
            raise ArgumentError("lead", "be >= 1", self.lead, "1 is 1F1B, 2 is eager 1F1B")
        chunks = max((each.chunks for each in self.units.values()), default=1)
        if chunks > 1 and (self.colocated or self.encoders is not Encoders.PARALLEL or self.shard > 1):
            raise ArgumentError("chunks", "be 1 where units share devices or divide copies", chunks, "leave it out")

    @property
    def encoders_come_first(self) -> bool:
        """Whether encoders do all their forwards before the language model's, and their backwards after them."""
        return self.colocated and self.encoders is not Encoders.REPLICATED

    def has_whole_cells(self, unit: str) -> bool:
        """Return whether a unit differentiates each of its cells at once, not what went to each later cell apart.

        Encoders that come first have the gradients of all their samples before their first backward. Devices that
        divide a copy would gather it again for each part.
        """
        return self.shard > 1 or (self.encoders_come_first and unit != LLM)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One pipeline of the current plan as a planner sees it.

    Args:
        num_microbatches: Its microbatches of the step; an assignment may have more where fewer do not fit.
        speed: Work per time, relative to the others.
        devices: Part of its devices that is left, after losses; these hold what all of them held.
    """

    num_microbatches: int
    speed: float = 1.0
    devices: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.devices <= 1:
            raise ArgumentError(
                "devices", "be a part of all, > 0 and <= 1", self.devices, "leave out pipelines without any"
            )
        if self.num_microbatches < 1 or not self.speed > 0:
            raise ArgumentError(
                "num_microbatches",
                "be >= 1 and speed > 0",
                f"{self.num_microbatches} and {self.speed}",
                "leave out pipelines without work",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Replica and microbatch in which one unit processes each sample; all arrays ``[num_samples]``.

    Args:
        replica: Index of the replica.
        microbatch: Position, within the replica's order of execution, of the microbatch.
        group: Within the microbatch, which of the context-parallel groups; None where all its devices are one.
        degree: Devices of that group.
    """

    replica: Ints
    microbatch: Ints
    group: Ints | None = None
    degree: Ints | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """Places of all samples of a global batch: by construction each has one per unit.

    A unit may process a sample in a later microbatch than the encoder before it (deferral), and on another replica
    (rearrangement).

    Args:
        units: By unit.
        recompute: By unit, the part of its layers that run again in this step, where that is not as configured.
    """

    units: Mapping[str, Place]
    recompute: Mapping[str, float] = field(default_factory=dict[str, float])

    def spread(self, configuration: Configuration, unit: str) -> Parallelism:
        """Return how a unit is spread in this step."""
        spread = configuration.units[unit]
        return replace(spread, recompute=self.recompute.get(unit, spread.recompute))

    def members(self, unit: str, replica: int, microbatch: int) -> npt.NDArray[np.intp]:
        """Return the samples of one microbatch, ascending."""
        place = self.units[unit]
        return np.flatnonzero((place.replica == replica) & (place.microbatch == microbatch))


class Planner(Protocol):
    """A way to balance the work.

    ``name`` is what people call it by; ``source`` names the paper and its sections.
    """

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Decide how the job uses its devices.

        Args:
            setting: The job.
            samples: A sample of the data set, some thousand samples; no batch that the answer is judged by. A planner
                may simulate batches of them.

        Raises:
            ValueError: It fits in no way; the message says what to change.
        """
        ...

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Decide where each sample of one global batch goes. Deterministic.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        ...
