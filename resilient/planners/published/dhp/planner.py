"""DHP: in each microbatch, context-parallel groups of whatever degrees make it fastest.

Source: DHP, the cost model (section 4.2) and the two stages (:mod:`resilient.planners.published.dhp.groups`). What the
paper takes as given is decided once (:mod:`resilient.planners.published.dhp.search`): stages, replicas, and the ranks
of each. A step's samples go to the microbatches of all replicas by work, longest first. A microbatch whose groups need
more ranks than there are is split into several, as published: a replica may have more microbatches than it is given.

Differences to the paper: groups lie within a node, but for :func:`dhp_across_nodes`; ranks that are left over are used
(see :func:`~resilient.planners.published.dhp.group_kernels.min_max_degrees`), other groups than its own are tried (see
:func:`~resilient.planners.published.dhp.groups.plan_groups`), and eta is 0: the language model's curve is that of its
own mask. What rings of encoders take is not predicted. It plans one batch ahead; ``assign`` does so whenever a batch's
lengths are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Assignment, Configuration, Encoders, Place, Replica, Setting
from resilient.planners.published.dhp.groups import Ranks, Sequences, pack, pack_ranks, plan_groups
from resilient.planners.published.dhp.search import dhp_configuration, has_rings
from resilient.planners.stages.degraded_replicas import ranks_left
from resilient.planners.stages.memory_shares import kept_shares
from resilient.templates.common.arrays import Floats, Ints


@dataclass(frozen=True)
class DHP:
    """The planner.

    Args:
        across_nodes: Whether groups are of the ranks of all nodes, as published. One replica has all of them then.
    """

    name: str = "dhp"
    source: str = "DHP (dynamic hybrid parallelism), section 4"
    across_nodes: bool = False

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the stages, replicas, ranks and microbatches under which a step takes least.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        return dhp_configuration(setting, samples, self.name, across_nodes=self.across_nodes)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Spread samples over microbatches, and choose the groups of each; all units place a sample alike.

        Args:
            setting: The job.
            configuration: As decided; ``cp`` of the language model is the number of ranks of each replica.
            batch: The global batch.
            replicas: The language model's replicas as they are now.

        Raises:
            ValueError: A sample needs more memory than the ranks of any replica have; the message says what to change.
        """
        # Of ranks that replicas lost no groups are formed.
        there = [ranks_left(configuration.units[LLM], each.devices) for each in replicas]
        ranks = {number: ranks_of(setting, configuration, number) for number in set(there)}
        sequences = sequences_of(setting, configuration, batch, replicas)
        most = [int(np.isfinite(ranks[number].start_ms).sum()) for number in there]
        # More microbatches leave each less room, until stages hold as many as they do at a time.
        number = max(each.num_microbatches for each in replicas)
        if configuration.encoders is Encoders.REPLICATED:
            # Nothing flows from stage to stage: microbatches are as large as the memory holds.
            replicas = [replace(each, num_microbatches=1) for each in replicas]
        while True:
            _check(sequences, batch, max(most))
            parts = _split(sequences, replicas, there, most)
            count = max(part.microbatch for part in parts) + 1 if parts else 0
            if count <= number:
                break
            number = count
            more = [replace(each, num_microbatches=number) for each in replicas]
            sequences = replace(sequences, kept=kept_shares(setting, configuration, batch, more))
        replica, microbatch, group, degree = np.zeros((4, len(batch)), dtype=np.int64)
        for part in parts:
            own = part.members
            groups = plan_groups(sequences[own], ranks[there[part.replica]], part.bins, part.least)
            replica[own], microbatch[own] = part.replica, part.microbatch
            group[own], degree[own] = groups.group, groups.degrees[groups.group]
        place = Place(replica=replica, microbatch=microbatch, group=group, degree=degree)
        return Assignment(units=dict.fromkeys(configuration.units, place))


def dhp_across_nodes() -> DHP:
    """Return the planner in the paper's setting: groups may cross nodes."""
    return DHP(name="dhp-across-nodes", across_nodes=True)


def sequences_of(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica] = ()
) -> Sequences:
    """Return what samples cost on one rank; of memory, where replicas are not as configured, on that with least."""
    tp, lengths = configuration.units[LLM].tp, batch.units[LLM]
    work = setting.costs.by_name[LLM].work(tp)
    factor = setting.correction.factor(LLM, tp, lengths.longest)
    other = work.linear * lengths.tokens * factor
    for name, spread in configuration.units.items():
        if name != LLM:
            other = other + setting.sample_ms(name, batch.units[name], spread.tp)
    return Sequences(
        attention_ms=work.attention * lengths.squares * factor,
        other_ms=other,
        tokens=lengths.tokens.astype(np.float64),
        kept=kept_shares(setting, configuration, batch, replicas),
    )


def ranks_of(setting: Setting, configuration: Configuration, num_ranks: int) -> Ranks:
    """Return what so many ranks of a replica cost to group, by the language model."""
    tp = configuration.units[LLM].tp
    fixed = sum(setting.costs.by_name[name].work(spread.tp).fixed for name, spread in configuration.units.items())
    ranks = replace(ranks_of_unit(setting.costs.by_name[LLM], tp, num_ranks), fixed_ms=fixed)
    if has_rings(setting, tp):
        return ranks
    return replace(ranks, start_ms=np.where(np.arange(num_ranks) == 0, ranks.start_ms, np.inf))


def ranks_of_unit(unit: UnitCosts, tp: int, num_ranks: int) -> Ranks:
    """Return what so many ranks cost to group, by one unit.

    The ring's share of the unit's curves is what they have more than a cp-th of the curve without context
    parallelism. Degrees between profiled ones have the next higher one's links, those above all the highest one's;
    where none was profiled, groups are of one rank.
    """
    alone = unit.work(tp)
    together = {cp: unit.work(tp, cp) for each, cp in unit.degrees if each == tp and cp > 1}
    ring, start = np.zeros(num_ranks), np.full(num_ranks, np.inf)
    start[0] = 0.0
    for degree in range(2, num_ranks + 1 if together else 0):
        cp = min((each for each in together if each >= degree), default=max(together))
        ring[degree - 1] = max(together[cp].linear - alone.linear / cp, 0.0) * cp / (cp - 1)
        start[degree - 1] = max(together[cp].fixed - alone.fixed, 0.0)
    return Ranks(fixed_ms=alone.fixed, ring_ms=ring, start_ms=start)


class _Part(NamedTuple):
    """A microbatch: its samples, and their packing into groups."""

    replica: int
    microbatch: int
    members: Ints
    bins: Ints
    least: Ints


def _check(sequences: Sequences, batch: SampleTable, most: int) -> None:
    """Refuse a sample that needs more ranks than a group has at most."""
    if sequences.kept.max(initial=0) > most:
        worst = int(sequences.kept.argmax())
        raise ArgumentError(
            "samples",
            f"fit into {most} ranks, the most of a group",
            f"{batch.name(worst)} that needs {np.ceil(sequences.kept[worst]):.0f}",
            "leave it out, or use more devices",
        )


def _split(
    sequences: Sequences, replicas: Sequence[Replica], there: Sequence[int], most: Sequence[int]
) -> Sequence[_Part]:
    """Return the microbatches of all replicas, those that need more ranks than there are split.

    Args:
        sequences: Of the batch.
        replicas: They.
        there: Ranks of each.
        most: Of which a group has so many at most.
    """
    replica, _, speeds = slots(replicas)
    slot = _spread(sequences, speeds, np.array(most)[replica])
    parts: list[_Part] = []
    done = [0] * len(replicas)
    for index, members in zip(replica.tolist(), _members(slot, len(speeds)), strict=True):
        for own, (bins, least) in _parts(sequences, members, there[index]):
            parts.append(_Part(index, done[index], own, bins, least))
            done[index] += 1
    return parts


def _parts(sequences: Sequences, members: Ints, num_ranks: int) -> list[tuple[Ints, tuple[Ints, Ints]]]:
    """Return sequences of as few microbatches as have ranks for them, and the packing of each."""
    bins, least = pack(sequences.kept[members])
    if least.sum() <= num_ranks:
        return [(members, (bins, least))]
    packed = pack_ranks(least, num_ranks)
    number = int(packed.max()) + 1
    work = sequences.work_ms[members]
    parts = [members[each] for each in _members(longest_first(work, np.ones(number)), number)]
    packs = [pack(sequences.kept[each]) for each in parts]
    if all(each.sum() <= num_ranks for _, each in packs):
        return list(zip(parts, packs, strict=True))
    part_of = _place(loads(work, bins, len(least)), least, packed, num_ranks)
    found: list[tuple[Ints, tuple[Ints, Ints]]] = []
    for each in _members(part_of[bins], number):
        used, local = np.unique(bins[each], return_inverse=True)
        found.append((members[each], (local.astype(np.int64), least[used])))
    return found


def _spread(sequences: Sequences, speeds: Floats, most: Ints) -> Ints:
    """Return the microbatch of each sequence, longest first; of those that have ranks for it."""
    needed = np.ceil(sequences.kept)
    if needed.max(initial=0) <= most.min():
        return longest_first(sequences.work_ms, speeds)
    slot, load = np.empty(len(needed), dtype=np.int64), np.zeros(len(speeds))
    for item in np.argsort(-sequences.work_ms, kind="stable"):
        after = np.where(most >= needed[item], (load + sequences.work_ms[item]) / speeds, np.inf)
        slot[item] = best = int(after.argmin())
        load[best] += sequences.work_ms[item]
    return slot


def _members(slot: Ints, num_slots: int) -> list[Ints]:
    order = np.argsort(slot, kind="stable")
    return np.split(order, np.searchsorted(slot[order], np.arange(1, num_slots)))


def _place(work: Floats, least: Ints, packed: Ints, num_ranks: int) -> Ints:
    """Place groups, those of most ranks first, into the microbatch with room that has least work so far.

    Where one is left without room they stay as they are packed.
    """
    number = int(packed.max()) + 1
    part = np.empty(len(work), dtype=np.int64)
    load, room = np.zeros(number), np.full(number, num_ranks)
    for group in np.lexsort((-work, -least)):
        best = int(np.where(room >= least[group], load, np.inf).argmin())
        if room[best] < least[group]:
            return packed
        part[group] = best
        load[best] += work[group]
        room[best] -= least[group]
    return part
