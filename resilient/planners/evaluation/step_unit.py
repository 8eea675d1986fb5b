"""What one unit does in a step: the cells of its lanes, and what they take.

A sample is a whole: one lane has it. Planners say its pipeline and microbatch; over a pipeline's lanes the samples of a
microbatch are dealt the longest first, and of such heaps the larger goes to the lane that had less to do before. The
devices of a lane share its samples by tensor and context parallelism, with the messages that these take.

Samples of a cell that go to different cells of the next unit are parts of it, as the executor runs them: each a call of
its own, that takes what calls take beside their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.packing.balance import deal_whole, largest, loads
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Replica, Setting
from resilient.planners.stages.call_work import Calls, CallWork, Work
from resilient.planners.stages.degraded_replicas import ranks_left, tokens_held
from resilient.planners.stages.device_layout import lane_part, lanes_of_pipelines
from resilient.planners.stages.stage_work import by_stage, dealt_by
from resilient.templates.common.arrays import Flags, Floats, Ints
from resilient.templates.schedules.graph import Backward


@dataclass(frozen=True, kw_only=True, eq=False)
class StepUnit:
    """A unit's work. Cells are numbered lane by lane, equally many of each, used or not.

    Args:
        costs: Of the unit.
        spread: Over devices.
        lengths: Of the samples.
        width: Cells of each lane.
        cell: Of each sample.
        counted: The cells that count as microbatches: of each lane those up to the last that is used.
        whole: Whether cells have one part.
        tokens: Of each part of each cell. [num_cells, num_parts]
        there: Whether a cell is: if it has some, or devices are in step with those of another that does.
        parts: What the parts of cells take at full speed. [num_stages, num_cells, num_parts]
        calls: What they take, call by call; None where devices that divide a copy wait for each other.
        held: Times the tokens of before that devices of each cell hold of it, after losses.
        speeds: Of each cell's pipeline.
        backwards: What each stage differentiates.
    """

    costs: UnitCosts
    spread: Parallelism
    lengths: Lengths
    width: int
    cell: Ints
    counted: Flags
    whole: bool
    tokens: Floats
    there: Flags
    parts: Work
    calls: CallWork | None
    held: Floats
    speeds: Floats
    backwards: tuple[Backward, ...]

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        costs: UnitCosts,
        assignment: Assignment,
        batch: SampleTable,
        replicas: Sequence[Replica],
        then: StepUnit | None = None,
    ) -> StepUnit:
        """Return a unit's work.

        Args:
            configuration: How the job uses its devices.
            costs: Of the unit.
            assignment: Where the samples go.
            batch: They.
            replicas: What ``assign`` was given.
            then: The unit that uses what this one makes, in cells of its own; None: none does.

        Raises:
            ValueError: Its layers are not spread over its stages, or a place is not within the replicas.
        """
        spread = assignment.spread(configuration, costs.name)
        place, lengths = assignment.units[costs.name], batch.units[costs.name]
        _check(costs, spread, place, replicas)
        lanes = lanes_of_pipelines(spread, configuration.units[LLM], len(replicas))
        num_lanes = int(lanes.max())
        # A lane that works for several pipelines takes their microbatches in turn.
        first = lanes[:, 0]
        several = np.bincount(first, minlength=num_lanes)
        turn = np.arange(len(replicas)) - np.searchsorted(first, first)
        counts = np.array([each.num_microbatches for each in replicas])
        np.maximum.at(counts, place.replica, place.microbatch + 1)
        width = int(counts.max() * several.max())
        lane = deal_whole(dealt_by(costs, spread).of(lengths), lanes[place.replica], place.microbatch)
        position = place.microbatch * several[first[place.replica]] + turn[place.replica]
        cell = lane * width + position
        last = np.zeros(num_lanes, np.int64)
        np.maximum.at(last, lane, position + 1)
        pipeline = np.repeat(np.searchsorted(lanes[:, 1], np.arange(num_lanes), side="right"), width)
        pipeline[cell] = place.replica
        backwards = _backwards(costs, spread)
        whole = configuration.has_whole_cells(costs.name) or not backwards[-1]
        part = np.zeros_like(cell) if whole or then is None else _parts(cell, lengths, then)
        num_parts = int(part.max(initial=0)) + 1
        piece = cell * num_parts + part
        calls = _calls(place, piece, lengths, spread, num_lanes * width * num_parts, padded=costs.padded)
        alone = CallWork.of(costs, spread, calls)
        tokens = loads(lengths.tokens, piece, num_lanes * width * num_parts).reshape(-1, num_parts)
        grouped = place.degree is not None
        held = np.array([1.0 if grouped else tokens_held(spread, each.devices) for each in replicas])
        speeds = np.array([_grouped_speed(spread, each) if grouped else each.speed for each in replicas])
        speeds = speeds * lane_part(spread, configuration.units[LLM], len(replicas))
        return cls(
            costs=costs,
            spread=spread,
            lengths=lengths,
            width=width,
            cell=cell,
            counted=(np.arange(width) < last[:, None]).ravel(),
            whole=whole,
            tokens=tokens,
            there=tokens.sum(axis=1) > 0,
            parts=_held(alone.by_cell(spread.cp).in_parts(num_parts), held[pipeline]),
            calls=alone,
            held=held[pipeline],
            speeds=speeds[pipeline],
            backwards=backwards,
        )

    @cached_property
    def work(self) -> Work:
        """What cells take at full speed. [num_stages, num_cells]"""
        return self.parts.together()

    def with_encoders(self, encoders: Sequence[StepUnit]) -> StepUnit:
        """Return the language model as one unit with encoders that each of its stages runs for itself.

        Raises:
            ValueError: An encoder has a sample in another microbatch.
        """
        for each in encoders:
            if not np.array_equal(each.cell[each.lengths.tokens > 0], self.cell[each.lengths.tokens > 0]):
                raise ValueError(
                    f"places in {each.costs.name!r} must be those of the language model where encoders are replicated, "
                    f"got others; assign them alike"
                )
        return replace(
            self,
            tokens=np.sum([each.tokens for each in (self, *encoders)], axis=0),
            there=np.any([each.there for each in (self, *encoders)], axis=0),
            parts=self._with_work_of(encoders),
            backwards=tuple(max([each, *(other.backwards[0] for other in encoders)]) for each in self.backwards),
        )

    def _with_work_of(self, encoders: Sequence[StepUnit]) -> Work:
        """Return the work of a microbatch in all units.

        A group goes from one unit to the next by itself, but where it gathers parameters with others.
        """
        if self.calls is not None:
            together = self.calls
            for each in encoders:
                assert each.calls is not None
                together = each.calls.followed_by(together)
            return _held(together.by_cell(self.spread.cp).in_parts(1), self.held)
        works = [each.parts for each in (self, *encoders)]
        sums = self.parts.mapped(np.zeros_like)
        for work in works:
            sums = {name: sums[name] + table for name, table in work.mapped(np.asarray).items()}
        filled = sum(((each.forward_ms + each.backward_ms) * each.filled for each in works), np.zeros(1))
        total = sums["forward_ms"] + sums["backward_ms"]
        return Work(**sums, filled=np.divide(filled, total, out=np.ones_like(total), where=total > 0))

    @property
    def std_ms(self) -> float:
        """Standard deviation of its cells' times at full speed."""
        total = (self.parts.forward_ms + self.parts.backward_ms).sum(axis=(0, 2))[self.counted]
        return float(total.std()) if len(total) else 0.0


def step_units(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> list[StepUnit]:
    """Return what each unit does in a step as if each lane were alone, in order of execution.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        assignment: Where the samples go.
        batch: They.
        replicas: What ``assign`` was given.

    Raises:
        ValueError: As :meth:`StepUnit.of`.
    """
    found: dict[str, StepUnit] = {}
    for costs in reversed(setting.costs.units):
        # Encoders make what the language model uses, and that what the unit behind it does.
        then = found.get(LLM) or (next(iter(found.values()), None) if costs.name == LLM else None)
        if configuration.encoders is Encoders.REPLICATED:
            then = None  # all are one unit
        found[costs.name] = StepUnit.of(configuration, costs, assignment, batch, replicas, then)
    return list(found.values())[::-1]


def _held(work: Work, held: Floats) -> Work:
    """Return the work of parts of cells whose devices hold so many times the tokens."""
    held = held[:, None]
    return replace(work, kept_bytes=work.kept_bytes * held, deferred_bytes=work.deferred_bytes * held)


def _parts(cell: Ints, lengths: Lengths, then: StepUnit) -> Ints:
    """Return the part of its cell that each sample is in: the next unit's cells are numbered as it needs them.

    Samples that do not go there are in the first part.
    """
    uses = (lengths.tokens > 0) & (then.lengths.tokens > 0)
    pairs, of_sample = np.unique((cell * len(then.tokens) + then.cell)[uses], return_inverse=True)
    source = pairs // len(then.tokens)
    part = np.zeros_like(cell)
    part[uses] = (np.arange(len(pairs)) - np.searchsorted(source, source))[of_sample]
    return part


def _check(costs: UnitCosts, spread: Parallelism, place: Place, replicas: Sequence[Replica]) -> None:
    """Refuse places that there are not."""
    if len(spread.stage_layers) != spread.num_stages or sum(spread.stage_layers) != len(costs.layers):
        raise ValueError(
            f"stage_layers of {costs.name!r} must spread {len(costs.layers)} layers over {spread.num_stages} stages, "
            f"got {spread.stage_layers}; give each stage its number of layers"
        )
    if np.any(place.replica >= len(replicas)):
        raise ValueError(
            f"places in {costs.name!r} must be within {len(replicas)} replicas, got replica "
            f"{place.replica.max(initial=0)}; assign the batch to these replicas"
        )
    if place.group is None or place.degree is None:
        return
    groups, first = np.unique(np.stack([place.replica, place.microbatch, place.group]), axis=1, return_index=True)
    cells, cell = np.unique(groups[:2], axis=1, return_inverse=True)
    used = loads(place.degree[first], cell.ravel(), cells.shape[1])
    there = np.array([ranks_left(spread, each.devices) for each in replicas])[cells[0]]
    if np.any(used > there):
        worst = int((used - there).argmax())
        raise ValueError(
            f"groups in {costs.name!r} must be of the {there[worst]} ranks that are there, got {used[worst]:.0f} ranks "
            f"in microbatch {cells[1, worst]} of replica {cells[0, worst]}; assign the batch to these replicas"
        )


def _grouped_speed(spread: Parallelism, replica: Replica) -> float:
    """Return how fast groups are: they are of whole ranks that are left, or of what is left of one."""
    return replica.speed / replica.devices * min(1.0, replica.devices * spread.cp)


def _calls(place: Place, cell: Ints, lengths: Lengths, spread: Parallelism, num_cells: int, *, padded: bool) -> Calls:
    """Return the calls of a unit: one of each group of devices in each cell, or part of one."""
    if place.group is None or place.degree is None:
        group, degree = np.zeros_like(cell), np.full_like(cell, spread.cp)
    else:
        group, degree = place.group, place.degree
    keys, first, call = np.unique(
        cell * (int(group.max(initial=0)) + 1) + group, return_index=True, return_inverse=True
    )
    tokens, squares = (loads(each, call, len(keys)) for each in (lengths.tokens, lengths.squares))
    if padded:
        longest = largest(lengths.longest, call, len(keys))
        sequences = loads(lengths.num_sequences(), call, len(keys))
        tokens, squares = sequences * longest, sequences * longest**2
    return Calls(
        cell=cell[first],
        group=group[first],
        degree=degree[first],
        tokens=tokens,
        squares=squares,
        num_cells=num_cells,
    )


def _backwards(costs: UnitCosts, spread: Parallelism) -> tuple[Backward, ...]:
    """Return what each stage differentiates: from the first on that is trained, or gets a gradient for its input."""
    trained = by_stage(spread, [layer.trainable for layer in costs.layers])
    runs = by_stage(spread, [layer.has_backward for layer in costs.layers])
    return tuple(
        Backward.ALL if some else Backward.INPUTS if passes else Backward.NONE
        for some, passes in zip(trained > 0, runs > 0, strict=True)
    )
