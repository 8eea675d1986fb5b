"""DHP: in each microbatch, context-parallel groups of whatever degrees make it fastest.

Source: DHP, the cost model (section 4.2) and the two stages (:mod:`resilient.planners.published.dhp.groups`). What the
paper takes as given is decided once (:mod:`resilient.planners.published.dhp.search`): stages, and the ranks of one
replica. A step's samples go to the microbatches of all replicas by work, longest first. Where they are too many for the
memory of one, all are packed first and the packs spread.

Differences to the paper: ranks that are left over are used (see
:func:`~resilient.planners.published.dhp.group_kernels.min_max_degrees`), other groups than its own are tried (see
:func:`~resilient.planners.published.dhp.groups.plan_groups`), and eta is 0: the language model's curve is that of its
own mask. What rings of encoders take is not predicted. The paper splits a microbatch that needs more ranks than there
are; here what is too much goes to the others, and where it is too much for all of them, as it may be when nodes are
lost, every replica has more microbatches. It plans one batch ahead; ``assign`` does so whenever a batch's lengths are
known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.dhp.groups import Ranks, Sequences, pack, pack_ranks, plan_groups
from resilient.planners.published.dhp.search import dhp_configuration
from resilient.planners.stages.degraded_replicas import ranks_left
from resilient.planners.stages.memory_shares import kept_shares
from resilient.templates.common.arrays import Floats, Ints

_ROUNDS = 4
"""More microbatches leave each less room: where they do not suffice by then, they are not tried."""


@dataclass(frozen=True)
class DHP:
    """The planner."""

    name: str = "dhp"
    source: str = "DHP (dynamic hybrid parallelism), section 4"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the stages, ranks and microbatches under which a step takes least, as one replica.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        return dhp_configuration(setting, samples)

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
            ValueError: A sample, or all of them, are too long for the memory; the message says what to change.
        """
        # Of ranks that replicas lost no groups are formed; all have as many as the one that has least.
        num_ranks = min(ranks_left(configuration.units[LLM], each.devices) for each in replicas)
        ranks = ranks_of(setting, configuration, num_ranks)
        sequences, replicas = _with_room(setting, configuration, batch, replicas, ranks)
        replica, microbatch, speeds = slots(replicas)
        slot, packs = _microbatches(sequences, len(ranks), speeds)
        group, degree = np.zeros(len(batch), dtype=np.int64), np.zeros(len(batch), dtype=np.int64)
        for members, (bins, least) in packs:
            groups = plan_groups(sequences[members], ranks, bins, least)
            group[members], degree[members] = groups.group, groups.degrees[groups.group]
        place = Place(replica=replica[slot], microbatch=microbatch[slot], group=group, degree=degree)
        return Assignment(units=dict.fromkeys(configuration.units, place))


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
    """Return what so many ranks of a replica cost to group.

    The ring's share of the language model's curves is what they have more than a cp-th of the curve without context
    parallelism. Degrees between profiled ones have the next higher one's links, those above all the highest one's;
    where none was profiled, groups are of one rank.
    """
    language = setting.costs.by_name[LLM]
    tp = configuration.units[LLM].tp
    alone = language.work(tp)
    together = {cp: language.work(tp, cp) for each, cp in language.degrees if each == tp and cp > 1}
    ring, start = np.zeros(num_ranks), np.full(num_ranks, np.inf)
    start[0] = 0.0
    for degree in range(2, num_ranks + 1 if together else 0):
        cp = min((each for each in together if each >= degree), default=max(together))
        ring[degree - 1] = max(together[cp].linear - alone.linear / cp, 0.0) * cp / (cp - 1)
        start[degree - 1] = max(together[cp].fixed - alone.fixed, 0.0)
    fixed = sum(setting.costs.by_name[name].work(spread.tp).fixed for name, spread in configuration.units.items())
    return Ranks(fixed_ms=fixed, ring_ms=ring, start_ms=start)


def _with_room(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica], ranks: Ranks
) -> tuple[Sequences, Sequence[Replica]]:
    """Return the batch's sequences, and the replicas with as many microbatches as hold them.

    Raises:
        ValueError: A sample, or all of them, are too long for the memory.
    """
    usable, needed, number = int(np.isfinite(ranks.start_ms).sum()), 0, 0
    for _ in range(_ROUNDS):
        sequences = sequences_of(setting, configuration, batch, replicas)
        if sequences.kept.max(initial=0) > usable:
            worst = int(sequences.kept.argmax())
            raise ArgumentError(
                "samples",
                f"fit into {usable} ranks, the most of a group",
                f"{batch.name(worst)} that needs {np.ceil(sequences.kept[worst]):.0f}",
                "leave it out, or use more devices",
            )
        needed = int(pack_ranks(pack(sequences.kept)[1], len(ranks)).max(initial=0)) + 1
        number = sum(each.num_microbatches for each in replicas)
        if needed <= number:
            return sequences, replicas
        more = -(-(needed - number) // len(replicas))
        replicas = [replace(each, num_microbatches=each.num_microbatches + more) for each in replicas]
    raise ArgumentError(
        "memory_bytes",
        f"hold a batch on {len(ranks)} ranks in some number of microbatches",
        f"{setting.cluster.memory_bytes}, which {number} did not suffice for, and {needed} are not known to",
        "use more devices, or larger ones",
    )


def _microbatches(
    sequences: Sequences, num_ranks: int, speeds: Floats
) -> tuple[Ints, list[tuple[Ints, tuple[Ints, Ints]]]]:
    """Return the microbatch of each sequence, and of each microbatch its sequences and their packing."""
    slot = longest_first(sequences.work_ms, speeds)
    packs = [(members, pack(sequences.kept[members])) for members in _members(slot, len(speeds))]
    if all(least.sum() <= num_ranks for _, (_, least) in packs):
        return slot, packs
    bins, least = pack(sequences.kept)
    slot_of_bin = _place(loads(sequences.work_ms, bins, len(least)), least, num_ranks, speeds)
    slot = slot_of_bin[bins]
    packs = []
    for members in _members(slot, len(speeds)):
        used, local = np.unique(bins[members], return_inverse=True)
        packs.append((members, (local.astype(np.int64), least[used])))
    return slot, packs


def _members(slot: Ints, num_slots: int) -> list[Ints]:
    order = np.argsort(slot, kind="stable")
    return np.split(order, np.searchsorted(slot[order], np.arange(1, num_slots)))


def _place(work: Floats, least: Ints, num_ranks: int, speeds: Floats) -> Ints:
    """Place groups, those of most ranks first, into the microbatch that has room and is done first.

    Where one is left without room they are put into as few microbatches as can be; the one with most work goes to the
    fastest replica.
    """
    slot = np.empty(len(work), dtype=np.int64)
    load, room = np.zeros(len(speeds)), np.full(len(speeds), num_ranks)
    for group in np.lexsort((-work, -least)):
        done = np.where(room >= least[group], (load + work[group]) / speeds, np.inf)
        best = int(done.argmin())
        if done[best] == np.inf:
            break
        slot[group] = best
        load[best] += work[group]
        room[best] -= least[group]
    else:
        return slot
    packed = pack_ranks(least, num_ranks)
    needed = int(packed.max()) + 1
    position = np.empty(needed, dtype=np.int64)
    position[np.argsort(-loads(work, packed, needed), kind="stable")] = np.argsort(-speeds, kind="stable")[:needed]
    return position[packed]
