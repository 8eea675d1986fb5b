"""Random holders of a layer's state: pipelines of any degree and method beside each other, and what they hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals

Held = dict[int, ByteIntervals]
"""What each rank holds of a state."""


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """A canonical buffer: trainable parameters, frozen ones, then for each slot as much as is trainable.

    Args:
        trainable: Numbers of elements of the parameters.
        frozen: Likewise.
        num_slots: Of the optimizer.
        itemsize: Of an element.
    """

    trainable: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    num_slots: int = 0
    itemsize: int = 1

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return (sum(self.trainable) * (1 + self.num_slots) + sum(self.frozen)) * self.itemsize

    def cut(self, first: int, end: int) -> ByteIntervals:
        """Return what goes with these elements of the parameters, be they trainable or frozen."""
        num_trainable, num_both = sum(self.trainable), sum(self.trainable) + sum(self.frozen)
        found = ByteIntervals.of(first * self.itemsize, end * self.itemsize)
        for slot in range(self.num_slots):
            start = (num_both + slot * num_trainable) * self.itemsize
            last = min(end, num_trainable) * self.itemsize
            found |= ByteIntervals.of(start + first * self.itemsize, start + last)
        return found


SIZES = st.builds(
    StateSizes,
    trainable=st.lists(st.integers(1, 6), max_size=3).map(tuple),
    frozen=st.lists(st.integers(1, 6), max_size=2).map(tuple),
    num_slots=st.integers(0, 2),
)


@st.composite
def devices(draw: st.DrawFn, sizes: StateSizes) -> list[ByteIntervals]:
    """What each device of one stage holds: equal shares of everything, or parts of each parameter, unequal ones too.

    Of several devices all together hold the state; what is not cut is held by each.
    """
    degree = draw(st.integers(1, 4))
    sections = [sum(sizes.trainable), sum(sizes.frozen)]
    cut = sections if draw(st.booleans()) else [*sizes.trainable, *sizes.frozen]
    held = [NO_BYTES] * degree
    for first, end in pairwise(accumulate(cut, initial=0)):
        equal = [first + (end - first) * index // degree for index in range(degree + 1)]
        uneven = [first, *sorted(draw(st.integers(first, end)) for _ in range(degree - 1)), end]
        bounds = draw(st.sampled_from([equal, uneven]))
        is_cut = cut is sections or draw(st.booleans())
        for device, (one, other) in enumerate(pairwise(bounds)):
            held[device] |= sizes.cut(one, other) if is_cut else sizes.cut(first, end)
    return held


@st.composite
def holders(draw: st.DrawFn, sizes: StateSizes, num_ranks: int, idle: int = 1) -> Held:
    """What ranks hold: the devices of some stages, in any order, and some that hold nothing."""
    ranks: Sequence[int] = draw(st.permutations(range(num_ranks)))
    held: Held = {}
    while len(held) < num_ranks:
        of_stage = draw(devices(sizes) if draw(st.integers(0, idle + 2)) >= idle else st.just([NO_BYTES]))
        if len(of_stage) <= num_ranks - len(held):
            held |= dict(zip(ranks[len(held) :], of_stage, strict=False))
    return held
