"""Deals a batch evenly to the replicas of one stage, in as few microbatches as the memory holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import units_of_step
from resilient.planners.evaluation.shard_groups import in_step_groups
from resilient.planners.own.grouping import deal_to_groups
from resilient.planners.own.recomputation import StepChoice
from resilient.planners.own.spreading import by_length, evenly
from resilient.planners.packing.balance import deal_whole, largest, loads
from resilient.planners.planner import Assignment, Configuration, Encoders, Place, Replica, Setting
from resilient.planners.stages.memory_shares import unit_shares
from resilient.templates.common.arrays import Floats, Ints


def deal_to_stage(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
) -> Assignment:
    """Return the places of samples, and what runs again in the backward: no more than memory asks for.

    Replicas of several ranks form groups of them (DHP). With replicated encoders samples go to replicas by what they
    take in all units; else each unit's by itself, and encoders do theirs in one microbatch, before the language model.

    Args:
        setting: The job.
        configuration: Of one stage.
        batch: The global batch.
        replicas: As they are now.

    Raises:
        ValueError: A sample does not fit even alone.
    """
    found = list(_ways(setting, configuration, batch, replicas))
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda each: _step_ms(setting, configuration, each, batch, replicas))


def _step_ms(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> float:
    """Return what a step takes, without sums of gradients: unit by unit what its slowest replica does."""
    _, run = units_of_step(setting, configuration, assignment, batch, replicas)
    cells = [(unit.work.forward_ms[0] + unit.work.backward_ms[0]) / unit.speeds for unit in run]
    return sum(float(each.reshape(-1, unit.width).sum(axis=1).max()) for each, unit in zip(cells, run, strict=True))


def _ways(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
) -> Iterator[Assignment]:
    """Yield assignments of which one should be the fastest."""
    work = work_ms(setting, configuration, batch)
    shares = whole_shares(setting, configuration, batch, replicas)
    choice = StepChoice(setting, configuration, batch, replicas)
    speeds = np.array([each.speed for each in replicas])
    if configuration.units[LLM].cp > 1:
        yield from deal_to_groups(setting, configuration, batch, replicas, work, shares, choice)
    elif configuration.encoders is Encoders.REPLICATED:
        every = sum(work.values(), np.zeros(len(batch)))
        room = _Room(setting, batch, shares)
        for place, parts in _dealt(batch, every, evenly(every, speeds), len(speeds), room, {}, choice):
            yield Assignment(units=dict.fromkeys(configuration.units, place), recompute=parts)
    else:
        replica = _by_unit(setting, configuration, batch, work, speeds)
        rooms = {name: _Room(setting, batch, {name: shares[name]}) for name in replica}
        before = {name: (rooms[name], replica[name]) for name in replica if name != LLM}
        first = {name: Place(replica=each, microbatch=np.zeros_like(each)) for name, each in replica.items()}
        for place, parts in _dealt(batch, work[LLM], replica[LLM], len(speeds), rooms[LLM], before, choice):
            yield Assignment(units={**first, LLM: place}, recompute=parts)


def whole_shares(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
) -> Mapping[str, Floats]:
    """Return what samples take of a rank's room, by unit, where nothing runs again. [num_samples]

    Raises:
        ValueError: The state alone does not fit.
    """
    units = {name: replace(spread, recompute=0.0) for name, spread in configuration.units.items()}
    return unit_shares(setting, replace(configuration, units=units), batch, replicas)


def work_ms(setting: Setting, configuration: Configuration, batch: SampleTable) -> dict[str, Floats]:
    """Return what samples take in each unit on one rank. [num_samples]

    Args:
        setting: The job.
        configuration: Of one stage.
        batch: The samples.
    """
    found: dict[str, Floats] = {}
    for name, spread in configuration.units.items():
        unit, lengths = setting.costs.by_name[name], batch.units[name]
        own = unit.work(spread.tp)
        if spread.recompute:
            index = unit.index(spread.tp, 1)
            passed = (layer.curves[index].forward for layer in unit.layers if layer.has_backward)
            own = own + sum(passed, Curve()) * spread.recompute
        found[name] = own.of(lengths) * setting.correction.factor(name, spread.tp, lengths.longest)
    return found


def _by_unit(
    setting: Setting, configuration: Configuration, batch: SampleTable, work: Mapping[str, Floats], speeds: Floats
) -> dict[str, Ints]:
    """Return the replica of each sample, by unit, where encoders have samples of their own.

    Of the encoders those that pad are dealt first, by length. One clip may take much longer than an even share: where
    it is, and on devices that are in step with that, other encoders have less to do.
    """
    found: dict[str, Ints] = {}
    before = np.zeros(len(speeds))
    for name in sorted(configuration.units, key=lambda name: not setting.costs.by_name[name].padded):
        if not setting.costs.by_name[name].padded:
            found[name] = evenly(work[name], speeds, before if before.any() and name != LLM else None)
            continue
        lengths = batch.units[name]
        sequences, units = lengths.num_sequences(), {**batch.units, name: Lengths.of(lengths.longest)}
        longest = work_ms(setting, configuration, SampleTable(units=units))[name]
        found[name] = by_length(longest, sequences, speeds)
        group = in_step_groups(len(speeds), configuration)
        padded = largest(longest, found[name], len(speeds)) * loads(sequences, found[name], len(speeds))
        before += largest(padded, group, len(speeds))[group]
    return {name: found[name] for name in configuration.units}


class _Room:
    """What samples take of a device's room, which in units that pad depends on who is with them.

    Args:
        setting: The job.
        batch: The samples.
        shares: By unit, what each takes of the room without padding, where nothing runs again.
    """

    def __init__(self, setting: Setting, batch: SampleTable, shares: Mapping[str, Floats]) -> None:
        self._packed: dict[str, Floats] = {}
        self._padded: dict[str, tuple[Ints, Floats]] = {}  # sequences of each sample, and what its longest one takes
        for name, share in shares.items():
            lengths = batch.units[name]
            if setting.costs.by_name[name].padded:
                longest = share / np.maximum(lengths.tokens, 1) * lengths.longest
                self._padded[name] = lengths.num_sequences(), longest
            else:
                self._packed[name] = share

    def alone(self, kept: Mapping[str, float]) -> Floats:
        """Return what each takes alone, where units keep these parts. [num_samples]"""
        packed = [kept[name] * share for name, share in self._packed.items()]
        padded = [kept[name] * sequences * longest for name, (sequences, longest) in self._padded.items()]
        return np.sum([*packed, *padded], axis=0)

    def taken(self, cell: Ints, num_cells: int, kept: Mapping[str, float]) -> Floats:
        """Return what samples take together that are in these cells, where units keep these parts. [num_cells]"""
        found = np.zeros(num_cells)
        for name, share in self._packed.items():
            found += kept[name] * loads(share, cell, num_cells)
        for name, (sequences, longest) in self._padded.items():
            found += kept[name] * largest(longest, cell, num_cells) * loads(sequences, cell, num_cells)
        return found


def _dealt(
    batch: SampleTable,
    work: Floats,
    replica: Ints,
    num_replicas: int,
    room: _Room,
    before: Mapping[str, tuple[_Room, Ints]],
    choice: StepChoice,
) -> list[tuple[Place, dict[str, float]]]:
    """Return the microbatches of samples whose replicas are known, and what runs again.

    Args:
        batch: The samples.
        work: Of each.
        replica: Of each.
        num_replicas: How many.
        room: What they take of it.
        before: Units that have done all they do before, with what they take of the room, and their samples' replicas.
        choice: What is faster.

    Raises:
        ValueError: A sample does not fit even alone.
    """

    def free(kept: Mapping[str, float]) -> Floats:
        used = [taken.taken(where, num_replicas, kept) for taken, where in before.values()]
        return 1 + 1e-9 - np.sum([np.zeros(num_replicas), *used], axis=0)

    least = choice.least
    alone, rooms = room.alone(least), free(least)
    if np.any((alone > rooms[replica]) & (alone > 0)):
        worst = int((alone - rooms[replica]).argmax())
        raise ArgumentError(
            "samples",
            "fit into the memory of a device, each alone",
            f"{batch.name(worst)} that takes {alone[worst] / max(rooms[replica[worst]], 1e-9):.2f} times as much",
            "configure the job again, leave it out, or use more devices",
        )
    total = loads(alone, replica, num_replicas)

    def fits(place: tuple[Ints, int], kept: Mapping[str, float]) -> bool:
        cell, number = place
        filled = room.taken(replica * number + cell, num_replicas * number, kept).reshape(-1, number)
        return bool(np.all((filled.max(axis=1) <= free(kept)) | (total == 0)))

    needed = np.divide(total, rooms, out=np.zeros_like(total), where=total > 0)
    found = choice.fastest(
        lambda number: (_cells(work, replica, num_replicas, number), number),
        fits,
        max(1, int(np.ceil(needed.max(initial=0.0)))),
    )
    return [(Place(replica=replica, microbatch=cell), again.parts) for (cell, _), again in found]


def _cells(work: Floats, replica: Ints, num_replicas: int, number: int) -> Ints:
    """Return the microbatch of each sample, of so many of each replica: first those with most work."""
    first = number * np.arange(num_replicas)
    slot = deal_whole(work, np.stack([first, first + number], axis=1)[replica], np.zeros_like(replica))
    position = np.empty(num_replicas * number, dtype=np.int64)
    order = np.lexsort((-loads(work, slot, len(position)), np.repeat(np.arange(num_replicas), number)))
    position[order] = np.arange(len(position))
    return position[slot] - first[replica]
