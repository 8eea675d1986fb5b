"""Deals a batch to replicas of several ranks, which form groups that share samples: where some are long (DHP).

Each unit has groups of its own: a ring of the language model sends little beside what it computes, one of an encoder
much, and its pictures go to ranks whole, as long as these hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.own.recomputation import StepChoice
from resilient.planners.own.spreading import evenly
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Assignment, Configuration, Place, Replica, Setting
from resilient.planners.published.dhp.groups import Ranks, Sequences, pack, plan_groups
from resilient.planners.published.dhp.planner import ranks_of_unit
from resilient.planners.stages.degraded_replicas import ranks_left
from resilient.templates.common.arrays import Floats, Ints

_FILLED = 0.95
"""Part of the ranks' room that is filled where that can be: groups that have to fill it are uneven."""


def deal_to_groups(
    setting: Setting,
    configuration: Configuration,
    batch: SampleTable,
    replicas: Sequence[Replica],
    work: Mapping[str, Floats],
    shares: Mapping[str, Floats],
    choice: StepChoice,
) -> Iterator[Assignment]:
    """Yield the places of samples, and their groups, and what runs again in the backward.

    Args:
        setting: The job.
        configuration: Of one stage.
        batch: The global batch.
        replicas: As they are now.
        work: By unit, what each sample takes on one rank.
        shares: By unit, what each sample takes of the room of a rank, where nothing runs again.
        choice: What is faster.

    Raises:
        ValueError: A sample has no room even alone.
    """
    num_ranks = min(ranks_left(configuration.units[LLM], each.devices) for each in replicas)
    every = sum(work.values(), np.zeros(len(batch)))

    def share(kept: Mapping[str, float]) -> Floats:
        return sum((kept[name] * each for name, each in shares.items()), np.zeros(len(batch)))

    least = share(choice.least)
    if least.max(initial=0.0) > num_ranks:
        worst = int(least.argmax())
        raise ArgumentError(
            "samples",
            f"fit into {num_ranks} ranks, each alone",
            f"{batch.name(worst)} that needs {np.ceil(least[worst]):.0f}",
            "configure the job again, leave it out, or use more devices",
        )

    room = num_ranks * (_FILLED if least.max(initial=0.0) <= _FILLED * num_ranks else 1 + 1e-9)

    def fits(slots: tuple[Ints, int], kept: Mapping[str, float]) -> bool:
        return bool(loads(share(kept), *slots).max() <= room)

    def deal(number: int) -> tuple[Ints, int]:
        speeds = np.repeat([each.speed for each in replicas], number)
        slots = evenly(every, speeds), len(speeds)
        return slots if fits(slots, choice.least) else (evenly(least, speeds), len(speeds))

    fewest = max(1, int(np.ceil(least.sum() / room / len(replicas) - 1e-9)))
    for (slot, num_slots), (parts, kept) in choice.fastest(deal, fits, fewest):
        tables = {
            name: _Table(
                ranks_of_unit(setting.costs.by_name[name], spread.tp, num_ranks),
                Sequences(
                    attention_ms=np.zeros(len(batch)),  # nothing hides the messages of a ring
                    other_ms=work[name],
                    tokens=batch.units[name].tokens.astype(np.float64),
                    kept=kept[name] * shares[name],
                ),
            )
            for name, spread in configuration.units.items()
        }
        yield Assignment(units=_placed(tables, slot, num_slots // len(replicas), num_slots), recompute=parts)


class _Table:
    """A unit's samples, and what ranks cost that share them."""

    def __init__(self, ranks: Ranks, sequences: Sequences) -> None:
        self.ranks, self.sequences = ranks, sequences

    def groups(self, members: Ints, room: float) -> tuple[Ints, Ints]:
        """Return the group of each of some samples, and the degree of it, where the unit has a part of the room."""
        group, degree = np.zeros(len(members), dtype=np.int64), np.full(len(members), len(self.ranks))
        there = np.flatnonzero(self.sequences.tokens[members] > 0)
        if len(there):
            chosen = self.sequences[members[there]]
            kept = chosen.kept / room if room else chosen.kept
            chosen = Sequences(
                attention_ms=chosen.attention_ms, other_ms=chosen.other_ms, tokens=chosen.tokens, kept=kept
            )
            bins, least = pack(kept)
            if least.sum() > len(self.ranks):
                bins, least = np.zeros_like(bins), np.array([len(self.ranks)])
            found = plan_groups(chosen, self.ranks, bins, least)
            degree[:] = found.degrees[0]
            group[there], degree[there] = found.group, found.degrees[found.group]
        return group, degree


def _placed(tables: Mapping[str, _Table], slot: Ints, number: int, num_slots: int) -> dict[str, Place]:
    """Return the places of samples whose replicas and microbatches are known."""
    order = np.argsort(slot, kind="stable")
    slots = np.split(order, np.searchsorted(slot[order], np.arange(1, num_slots)))
    found = {name: (np.zeros_like(slot), np.zeros_like(slot)) for name in tables}
    for members in slots:
        needs = {name: float(each.sequences.kept[members].sum()) for name, each in tables.items()}
        for name, each in tables.items():
            group, degree = found[name]
            # What a unit needs on the fullest rank may be as much of the room as it has of all.
            room = needs[name] / sum(needs.values()) if needs[name] else 0.0
            group[members], degree[members] = each.groups(members, room)
    return {
        name: Place(replica=slot // number, microbatch=slot % number, group=group, degree=degree)
        for name, (group, degree) in found.items()
    }
