"""What microbatches keep of the devices' memory, and microbatches for when that is scarce.

Under 1F1B a stage with d stages after it holds d + 1 microbatches in a row, and 2 d + 1 where forwards run ahead by
two; of virtual stages the first ones hold more. In encoders, stages of the language model count as after them. An
encoder also holds what is deferred of the microbatch before them (Entrain). Where backwards are split (ZB-H1), every
stage whose backward has both halves holds as many as the first one of its lane that has a backward: the first ones of
these wait for their second half, with the gradients for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.packing.balance import deal_whole, fullest, loads, longest_first
from resilient.planners.planner import Configuration, Replica, Setting
from resilient.planners.stages.degraded_replicas import left_bytes, tokens_held
from resilient.planners.stages.device_layout import lanes_of_pipelines
from resilient.planners.stages.stage_work import dealt_by, deferred_bytes, first_differentiated, halved, kept_bytes
from resilient.planners.stages.virtual_stages import in_flight, passed, room_parts
from resilient.templates.common.arrays import Flags, Floats, Ints


def windows(configuration: Configuration, unit: str) -> Ints:
    """Return how many microbatches in a row each stage of a unit holds. [num_stages]"""
    return in_flight(configuration.units[unit], passed_behind(configuration, unit), configuration.lead)


def passed_behind(configuration: Configuration, unit: str) -> int:
    """Return how many microbatches go on in units behind one until one comes back from them."""
    names = list(configuration.units)
    after = names[max(names.index(unit) + 1, names.index(LLM)) :]
    return sum(passed(configuration.units[each]) for each in after)


def put_off(in_flight: Ints, halved: Flags, first: int) -> Ints:
    """Return how many cells stages hold between the halves of their backward, beside those in flight until the first.

    The second half comes as late as the backward of the lane's first stage that has one. [..., num_stages]

    Args:
        in_flight: Cells until the first half. [..., num_stages]
        halved: Which stages have both. [..., num_stages]
        first: That stage.
    """
    return np.where(halved, np.maximum(in_flight[..., first, None] - in_flight, 0), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """Activations that the stages of a unit keep.

    Args:
        windows: Microbatches in a row that each stage holds. [num_stages]
        waiting: Of so many of them, the first ones, gradients wait for the second part of a backward. [num_stages]
        parts: What a token takes of what each stage has left. [num_stages]
        deferred: What it takes besides while its gradients wait. [num_stages]
        encodes: Whether it comes before the language model, and has microbatches with samples that are deferred.
        lanes: Over which the samples of a microbatch are dealt, each of them whole.
        work: By which they are.
    """

    windows: Ints
    waiting: Ints
    parts: Floats
    deferred: Floats
    encodes: bool
    lanes: int
    work: Curve

    @property
    def most(self) -> Floats:
        """What a token takes at most. [num_stages]"""
        return self.parts + self.deferred

    def tokens(self, samples: Lengths, microbatch: Ints, num_microbatches: int) -> Floats:
        """Return the tokens of each microbatch on the lane that has most. [num_microbatches]"""
        return fullest(self.work.of(samples), samples.tokens, microbatch, num_microbatches, self.lanes)

    def used(self, samples: Lengths, cell: Ints, late: Ints, num_microbatches: int) -> float:
        """Return the largest part that is used of what a stage has left.

        A lane begins with a cell when the language model needs the first of its samples, and differentiates each of
        them when it has done so.

        Args:
            samples: Of the replica.
            cell: Of each sample, the position of its microbatch in the unit.
            late: In the language model.
            num_microbatches: Of the replica.
        """
        lane = deal_whole(self.work.of(samples), np.tile([0, self.lanes], (len(cell), 1)), cell)
        slot, there = lane * num_microbatches + cell, samples.tokens > 0
        begins = np.full(self.lanes * num_microbatches, num_microbatches)
        np.minimum.at(begins, slot[there], late[there])
        begun, halfway = (
            np.pad(
                loads(samples.tokens, lane * num_microbatches + turn, len(begins)).reshape(self.lanes, -1),
                ((0, 0), (1, 0)),
            )
            for turn in (np.where(there, begins[slot], late), late)
        )
        begun, halfway = np.cumsum(begun, axis=1), np.cumsum(halfway, axis=1)
        turns, largest = np.arange(num_microbatches), 0.0
        for window, waiting, part, besides in zip(
            *(each.tolist() for each in (self.windows, self.waiting, self.parts, self.deferred)), strict=True
        ):
            ends, halves = (np.minimum(turns + each, num_microbatches) for each in (window, waiting))
            held = part * (begun[:, ends] - halfway[:, :-1]) + besides * (halfway[:, halves] - halfway[:, :-1])
            largest = max(largest, float(held.max()))
        return largest


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryBudget:
    """Memory for activations that a replica of the language model has left, with its share of all other units.

    Args:
        units: By name.
    """

    units: Mapping[str, Kept]

    @classmethod
    def of(cls, setting: Setting, configuration: Configuration) -> MemoryBudget | None:
        """Return the budget of a replica that lost nothing; None without a limit.

        Raises:
            ValueError: There is none.
        """
        whole = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp
        return cls.of_each(setting, configuration, whole)[0]

    @classmethod
    def of_each(
        cls, setting: Setting, configuration: Configuration, replicas: Sequence[Replica]
    ) -> Sequence[MemoryBudget | None]:
        """Return the budget of each replica, beside parameters, gradients and the optimizer.

        Where devices were lost, those that are left hold more state. What they keep of microbatches is the same on the
        first of fewer stages: of fewer microbatches more layers.

        Raises:
            ValueError: There is none.
        """
        budgets: dict[tuple[float, ...], MemoryBudget | None] = {}
        state = {
            name: left_bytes(setting, setting.costs.by_name[name], spread, configuration, replicas)
            for name, spread in configuration.units.items()
        }
        language = configuration.units[LLM]
        lanes = {
            name: np.diff(lanes_of_pipelines(spread, language, len(replicas)))[:, 0].tolist()
            for name, spread in configuration.units.items()
        }
        kinds = [
            (each.devices, *numbers) for each, numbers in zip(replicas, zip(*lanes.values(), strict=True), strict=True)
        ]
        for number, kind in enumerate(kinds):
            if kind not in budgets:
                state_of_one = {name: rows[number] for name, rows in state.items()}
                lanes_of_one = {name: numbers[number] for name, numbers in lanes.items()}
                budgets[kind] = cls._of(setting, configuration, state_of_one, lanes_of_one, replicas[number].devices)
        return [budgets[kind] for kind in kinds]

    @classmethod
    def _of(
        cls,
        setting: Setting,
        configuration: Configuration,
        states: Mapping[str, Floats],
        lanes: Mapping[str, int],
        devices: float,
    ) -> MemoryBudget | None:
        memory = setting.cluster.memory_bytes
        if memory is None:
            return None
        units: dict[str, Kept] = {}
        names = list(configuration.units)
        language = names.index(LLM)
        for position, name in enumerate(names):
            unit, spread = setting.costs.by_name[name], configuration.units[name]
            state = states[name]
            if state.max() >= memory:
                raise ArgumentError(
                    "memory_bytes",
                    f"be more than the {state.max():.0f} bytes of parameters, gradients and optimizer "
                    f"on a device of {name!r}",
                    memory,
                    "configure the job again",
                )
            held, kept = windows(configuration, name), kept_bytes(unit, spread)
            waiting, deferred = np.zeros_like(held), np.zeros_like(kept)
            if setting.splits and configuration.shard == 1:
                two = halved(unit, spread)
                late = put_off(held, two, first_differentiated(unit, spread))
                held, waiting = held + late, np.where(two, late + 1, 0)
                deferred = deferred_bytes(unit, spread)
            room = np.tile(memory - state, spread.chunks) * room_parts(spread, kept * held + deferred * waiting)
            # Of several pipelines that a stage works for, each has a part of it.
            of_room = tokens_held(spread, devices) / room * -(-configuration.units[LLM].dp // spread.dp)
            units[name] = Kept(
                windows=held,
                waiting=waiting,
                parts=kept * of_room,
                deferred=deferred * of_room,
                encodes=position < language,
                lanes=lanes[name],
                work=dealt_by(unit, spread),
            )
        return cls(units=units)

    def check(self, batch: SampleTable, own: Ints) -> None:
        """Refuse a sample that does not fit even alone.

        Args:
            batch: The global batch.
            own: The samples of it that the replica has.

        Raises:
            ValueError: There is one; the message names it.
        """
        for name, unit in self.units.items():
            tokens, part = batch.units[name].tokens[own], float(unit.most.max())
            if tokens.max(initial=0) * part > 1:
                raise ValueError(
                    f"tokens of {batch.name(int(own[tokens.argmax()]))} in {name!r} must be <= {int(1 / part)}, which "
                    f"fit into memory alone, got {tokens.max()}; leave it out, or configure the job for longer samples"
                )

    def holds(self, samples: SampleTable) -> Flags:
        """Return whether each sample fits if it is alone. [num_samples]"""
        fits = [samples.units[name].tokens * unit.most.max() <= 1 for name, unit in self.units.items()]
        return np.logical_and.reduce(fits)

    def fewest(self, samples: SampleTable) -> int:
        """Return how many equal microbatches the samples would need."""
        fewest = 1.0
        for name, unit in self.units.items():
            total = float(samples.units[name].tokens.sum()) / unit.lanes * unit.most
            # A stage that all fits into need not hold fewer.
            needed = np.where(total <= 1, 1.0, np.ceil(total * (unit.windows + unit.encodes)))
            fewest = max(fewest, float(needed.max()))
        return int(min(fewest, 2.0**31))

    @property
    def windows(self) -> Ints:
        """Microbatches in a row that each stage of all units holds. [num_stages]"""
        return np.concatenate([unit.windows for unit in self.units.values()])

    def needs(self, samples: SampleTable, microbatch: Ints, num_microbatches: int) -> Floats:
        """Return the part of each stage's budget that each microbatch takes at most. [num_stages, num_microbatches]

        Args:
            samples: Of the replica, or of several.
            microbatch: Of each sample, the same in all units.
            num_microbatches: Of all these replicas.
        """
        return np.concatenate(
            [
                unit.most[:, None] * unit.tokens(samples.units[name], microbatch, num_microbatches)
                for name, unit in self.units.items()
            ]
        )

    def used(self, samples: SampleTable, early: Ints, late: Ints, num_microbatches: int) -> float:
        """Return the largest part that is used of what a stage has left; what has more than 1 does not fit.

        Args:
            samples: Of the replica.
            early: The position of each one's microbatch in encoders.
            late: In the language model: the same or the next.
            num_microbatches: Of the replica.
        """
        return max(
            unit.used(samples.units[name], early if unit.encodes else late, late, num_microbatches)
            for name, unit in self.units.items()
        )

    def even(self, samples: SampleTable, num_microbatches: int) -> Ints:
        """Return the microbatch of each sample such that all take as much, and large ones are apart.

        The largest part that is used of what a stage has left is at most (sum + (n - 1) * largest) / n with n
        microbatches, of what samples take when a stage holds only such; less where the largest are few.
        """
        share = np.zeros(len(samples))
        for name, unit in self.units.items():
            share = np.maximum(share, float((unit.windows * unit.most).max()) * samples.units[name].tokens)
        microbatch = longest_first(share, np.ones(num_microbatches))
        return self.apart(loads(share, microbatch, num_microbatches))[microbatch]

    def apart(self, size: Floats) -> Ints:
        """Return the position of each microbatch such that large ones are apart. [num_microbatches]

        In any window, one is of the largest, one of the next, and so on.
        """
        window = int(self.windows.max())
        rank = np.argsort(np.argsort(-size, kind="stable"), kind="stable")
        rows = -(-len(size) // window)
        place = (rank % rows) * window + rank // rows
        return np.argsort(np.argsort(place, kind="stable"), kind="stable")


def able(budgets: Sequence[MemoryBudget | None], batch: SampleTable) -> Ints:
    """Return the replicas that have memory for each sample of a batch alone: losses may leave others too little.

    Args:
        budgets: Of each replica.
        batch: The samples.

    Raises:
        ValueError: There is none; the message names a sample that has no room in any one.
    """
    found = [number for number, each in enumerate(budgets) if each is None or each.holds(batch).all()]
    if not found and budgets[-1] is not None:
        budgets[-1].check(batch, np.arange(len(batch)))
    return np.array(found)
