"""Deals a batch to the replicas of one stage: the longest samples first, in as few microbatches as the memory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import Curve
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.own.grouping import deal_to_groups
from resilient.planners.packing.balance import deal_whole, loads, longest_first
from resilient.planners.planner import Assignment, Configuration, Encoders, Place, Replica, Setting
from resilient.planners.stages.memory_shares import unit_shares
from resilient.templates.common.arrays import Floats, Ints


def deal_to_stage(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
) -> Assignment:
    """Return the places of samples.

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
    work, speeds = work_ms(setting, configuration, batch), [each.speed for each in replicas]
    shares = unit_shares(setting, configuration, batch, replicas)
    if configuration.units[LLM].cp > 1:
        return deal_to_groups(setting, configuration, batch, replicas, work, shares)
    if configuration.encoders is Encoders.REPLICATED:
        every = sum(work.values(), np.zeros(len(batch)))
        place = _in_fewest(
            batch, every, _Room(setting, batch, shares), longest_first(every, speeds), np.zeros(len(replicas))
        )
        return Assignment(units=dict.fromkeys(configuration.units, place))
    used = np.zeros(len(replicas))
    places: dict[str, Place] = {}
    for name in configuration.units:
        replica = longest_first(work[name], speeds)
        if name == LLM:
            places[name] = _in_fewest(batch, work[name], _Room(setting, batch, {name: shares[name]}), replica, used)
        else:
            places[name] = Place(replica=replica, microbatch=np.zeros_like(replica))
            used += _Room(setting, batch, {name: shares[name]}).taken(replica, len(replicas))
    return Assignment(units=places)


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


class _Room:
    """What samples take of a device's room, which in units that pad depends on who is with them.

    Args:
        setting: The job.
        batch: The samples.
        shares: By unit, what each takes of the room without padding.
    """

    def __init__(self, setting: Setting, batch: SampleTable, shares: Mapping[str, Floats]) -> None:
        self._packed: list[Floats] = []
        self._padded: list[tuple[Ints, Floats]] = []  # sequences of each sample, and what its longest one takes
        for name, share in shares.items():
            lengths = batch.units[name]
            if setting.costs.by_name[name].padded:
                longest = share / np.maximum(lengths.tokens, 1) * lengths.longest
                self._padded.append((-(-lengths.tokens // np.maximum(lengths.longest, 1)), longest))
            else:
                self._packed.append(share)

    @property
    def alone(self) -> Floats:
        """What each takes alone. [num_samples]"""
        return np.sum([*self._packed, *(sequences * longest for sequences, longest in self._padded)], axis=0)

    def taken(self, cell: Ints, num_cells: int) -> Floats:
        """Return what samples take together that are in these cells. [num_cells]"""
        found = np.zeros(num_cells)
        for share in self._packed:
            found += loads(share, cell, num_cells)
        for sequences, longest in self._padded:
            largest = np.zeros(num_cells)
            np.maximum.at(largest, cell, longest)
            found += largest * loads(sequences, cell, num_cells)
        return found


def _in_fewest(batch: SampleTable, work: Floats, room_of: _Room, replica: Ints, used: Floats) -> Place:
    """Return the places in as few microbatches as hold all samples of each replica.

    Args:
        batch: The samples.
        work: Of each.
        room_of: What they take of the room.
        replica: Of each.
        used: What each replica's room already holds.

    Raises:
        ValueError: A sample does not fit even alone.
    """
    num_replicas, room, shares = len(used), 1 + 1e-9 - used, room_of.alone
    alone = shares - room[replica]
    if np.any((alone > 0) & (shares > 0)):
        worst = int(alone.argmax())
        raise ArgumentError(
            "samples",
            "fit into the memory of a device, each alone",
            f"{batch.name(worst)} that takes {shares[worst] / max(room[replica[worst]], 1e-9):.2f} times as much",
            "configure the job again, leave it out, or use more devices",
        )
    total = loads(shares, replica, num_replicas)
    number = max(1, int(np.ceil(np.divide(total, room, out=np.zeros_like(total), where=total > 0).max(initial=0.0))))
    while True:
        place = _dealt(work, replica, np.full(num_replicas, number))
        filled = room_of.taken(replica * number + place.microbatch, num_replicas * number).reshape(-1, number)
        if np.all((filled.max(axis=1) <= room) | (total == 0)):
            return place
        number += 1


def _dealt(work: Floats, replica: Ints, counts: Ints) -> Place:
    """Return the place of each sample, when a replica has so many microbatches: first those with most work."""
    ends = np.cumsum(counts)
    bins = np.stack([ends - counts, ends], axis=1)[replica]
    slot = deal_whole(work, bins, np.zeros_like(replica))
    of_slot = np.repeat(np.arange(len(counts)), counts)
    position = np.empty(len(of_slot), dtype=np.int64)
    position[np.lexsort((-loads(work, slot, len(of_slot)), of_slot))] = np.arange(len(of_slot))
    return Place(replica=replica, microbatch=position[slot] - (ends - counts)[replica])
