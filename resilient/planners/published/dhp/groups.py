"""Context-parallel groups of any degree within a microbatch: what they cost, which sequences, how many ranks.

Source: DHP, its cost model (section 4.2) and its two stages: best-fit decreasing into groups that hold their sequences,
then a dynamic program over groups and ranks. With sums over a group's sequences i of s_i tokens, at degree d:

    memory   m_tok * sum(s_i) / d + M_state <= E
    compute  (a1 * sum((1 + eta_i) * s_i^2) + a2 * sum(s_i)) / d + b1
    ring     a3 * (d - 1) / d * sum(s_i) / v, and b2 once if d > 1
    time     compute + ring - min(attention's part of compute, ring)

Memory is counted in shares of what one rank has room for, so that several units and stages can have their say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Sequences of one microbatch, on one rank; all arrays ``[num_sequences]``.

    Args:
        attention_ms: Time of attention, ``a1 * (1 + eta) * s^2``: what communication can hide behind.
        other_ms: Time of everything else.
        tokens: Whose keys and values travel around the ring.
        kept: Memory, in shares of the room of one rank.
    """

    attention_ms: Floats
    other_ms: Floats
    tokens: Floats
    kept: Floats

    def __getitem__(self, chosen: Ints) -> Sequences:
        return Sequences(
            attention_ms=self.attention_ms[chosen],
            other_ms=self.other_ms[chosen],
            tokens=self.tokens[chosen],
            kept=self.kept[chosen],
        )

    @property
    def work_ms(self) -> Floats:
        """Time on one rank, without what each call takes."""
        return self.attention_ms + self.other_ms


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks of a microbatch; arrays by degree less one, ``[num_ranks]``.

    Args:
        fixed_ms: Of each call, whatever the degree.
        ring_ms: Per token, if all of it travelled: ``a3 / v``. A larger group may use slower links.
        start_ms: Of each call beside; 0 for one rank, infinite for a degree that must not be used.
    """

    fixed_ms: float
    ring_ms: Floats
    start_ms: Floats

    def __len__(self) -> int:
        return len(self.ring_ms)


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups of one microbatch. Group g has the ranks from ``sum(degrees[:g])`` on.

    Args:
        group: Of each sequence. [num_sequences]
        degrees: Of the groups, largest first; their sum is at most the number of ranks. [num_groups]
        slowest_ms: Time of the slowest of them.
    """

    group: Ints
    degrees: Ints
    slowest_ms: float


def pack(kept: Floats) -> tuple[Ints, Ints]:
    """Stage 1: put sequences into as few groups as hold them, largest first, each where it fits most tightly.

    A sequence larger than a rank opens a group of as few ranks as hold it; what is left of them takes others.

    Returns:
        The group of each sequence, ``[num_sequences]``, and the least degree of each group, ``[num_groups]``.
    """
    from resilient.planners.packing.kernels import descending
    from resilient.planners.published.dhp.group_kernels import best_fit

    sizes = np.ascontiguousarray(kept, dtype=np.float64) + 0.0  # a negative zero has other bits
    return best_fit(sizes, descending(sizes))


def pack_ranks(least: Ints, num_ranks: int) -> Ints:
    """Put groups into as few microbatches as have ranks for them, largest first, each where it fits most tightly.

    Args:
        least: Degree of each group, at most ``num_ranks``. [num_groups]
        num_ranks: Of a microbatch.

    Returns:
        The microbatch of each group.
    """
    # What fills a microbatch exactly fits, however it is rounded.
    return pack(least.astype(np.float64) * ((1 - 1e-9) / num_ranks))[0]


def plan_groups(sequences: Sequences, ranks: Ranks, bins: Ints, least: Ints) -> Groups:
    """Return the groups of a microbatch from its packing.

    The paper takes the packing as it is: where memory is plentiful, that is few large groups, which communicate much.
    So static groups are tried as well: as many as there are with 1, 2, 4, ... ranks each, or as there are sequences,
    balanced by work, and then widened where they are slow. The fastest wins. As long as that makes it faster, sequences
    are given out anew to groups of its degrees, wide ones taking more. The result is never slower than the paper's, and
    never than static groups that hold their sequences.

    Args:
        sequences: Of the microbatch.
        ranks: Its ranks.
        bins: As :func:`pack` returns, or another packing that holds them.
        least: Likewise.

    Raises:
        ValueError: The packing needs more ranks than there are.
    """
    from resilient.planners.published.dhp.group_kernels import fastest_groups

    if not len(bins):
        return Groups(group=bins, degrees=np.empty(0, dtype=np.int64), slowest_ms=0.0)
    _check(least, len(ranks))
    group, degrees, slowest_ms = fastest_groups(
        _work(sequences), sequences.kept, ranks.ring_ms, ranks.fixed_ms + ranks.start_ms, bins, least
    )
    order = np.argsort(-degrees, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return Groups(group=position[group], degrees=degrees[order], slowest_ms=slowest_ms)


def _work(sequences: Sequences) -> Floats:
    return np.stack((sequences.attention_ms, sequences.other_ms, sequences.tokens))


def _check(least: Ints, num_ranks: int) -> None:
    if least.sum() > num_ranks:
        raise ArgumentError(
            "least", f"sum to at most {num_ranks}, the number of ranks", least.sum(), "split the microbatch"
        )
