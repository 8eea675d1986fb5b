"""Tells which copies of a state are right: those that most independent witnesses vouch for. Pure, without torch.

A worker that has computed a state by itself since all copies were last found equal is a witness to it. A copy made
since then says no more than what it was made of, and may be as damaged: its origin is that copy's witness, not its
holder. So a damaged copy gains nothing by being copied: whatever one memory has damaged has one witness.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.common.words import counted

SEVERAL = 0
"""The origin of a copy whose pieces come from several witnesses: it may be as damaged as any of them."""

_MOST_WORKERS = 1 << 16
_MOST_NAMED = 3

Copies = Mapping[int, int]
"""Of a state: per holder, a worker as a witness, the origin of its copy; its own where the two are equal."""


class HeldCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells of its copy of a state: its fingerprint, its origin, and the kind of device it is on."""

    fingerprint: int
    origin: int
    device: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A state of which not all copies are equal.

    Args:
        state: Its name, or that of a piece of it (:func:`piece_name`).
        copies: Who holds it.
        odd: The holders whose copy is not that of most witnesses; none where no copy is.
    """

    state: str
    copies: Copies
    odd: tuple[int, ...]


def piece_name(state: str, intervals: ByteIntervals | None) -> str:
    """Return what the copies of a piece of a state are told of by; None for all of it."""
    return state if intervals is None else f"{state}\0{','.join(map(str, intervals.bounds))}"


def state_of(piece: str) -> str:
    """Return the state that something with a name of :func:`piece_name` is of."""
    return piece.partition("\0")[0]


def witness(node: int, local_rank: int) -> int:
    """Return the number of a worker as a witness: the same in all generations."""
    return node * _MOST_WORKERS + local_rank + 1


def worker_of(number: int) -> tuple[int, int]:
    """Return node and local rank of a witness."""
    return divmod(number - 1, _MOST_WORKERS)


def joint_origin(origins: Collection[int]) -> int:
    """Return the origin of a copy whose pieces have these."""
    return next(iter(origins)) if len(set(origins)) == 1 else SEVERAL


def find_differences(copies: Mapping[str, Copies], is_equal: Callable[[str, int, int], bool]) -> list[Difference]:
    """Return the states of which not all copies are equal.

    Args:
        copies: Who holds which state.
        is_equal: Whether two holders' copies of a state are equal.
    """
    found: list[Difference] = []
    for state, held in copies.items():
        groups = _groups(tuple(held), partial(is_equal, state))
        if len(groups) == 1:
            continue
        votes = {group: _num_witnesses(held, group) for group in groups}
        most = max(groups, key=votes.__getitem__)
        odd = tuple(holder for holder in held if holder not in most)
        is_ahead = all(votes[group] < votes[most] for group in groups if group != most)
        is_decided = is_ahead and votes[most] > _num_witnesses(held, odd)
        found.append(Difference(state=state, copies=held, odd=odd if is_decided else ()))
    return found


def _num_witnesses(copies: Copies, holders: Collection[int]) -> int:
    """Return how many witnesses a group has for certain: pieces of several may be any other's."""
    return max(1, len({copies[holder] for holder in holders} - {SEVERAL}))


def _groups(holders: Sequence[int], is_equal: Callable[[int, int], bool]) -> set[tuple[int, ...]]:
    """Return sets of holders all equal to each other; one is in two of them if it is close to some that are not."""
    groups: set[tuple[int, ...]] = set()
    for one in holders:
        group = [one]
        for other in holders:
            if other != one and all(is_equal(other, member) for member in group):
                group.append(other)
        groups.add(tuple(sorted(group)))
    return groups


def why_undecided(undecided: Sequence[Difference], step: int) -> str:
    """Return what to tell of differences that no majority decides, of copies of the states after a step."""
    named = undecided[:_MOST_NAMED]
    places = [f"{state_of(difference.state)} on nodes {_holders(difference.copies)}" for difference in named]
    more = len(undecided) - len(places)
    listed = "; ".join([*places, *([counted(more, "more layer")] if more else [])])
    return (
        f"all copies of a layer's state must be equal, got different ones after step {step} ({listed}) and no majority "
        "to tell which is right; check the memory of these nodes, and keep three copies (max_failures=2) or more for "
        "most to decide"
    )


def _holders(copies: Copies) -> str:
    """Return the nodes, and those whose copies theirs were made of: they may be the ones to blame, and gone."""
    told: list[str] = []
    for holder, origin in sorted(copies.items()):
        made_of = "several others'" if origin == SEVERAL else f"node {worker_of(origin)[0]}'s"
        told.append(f"{worker_of(holder)[0]}{'' if origin == holder else f' (made of {made_of})'}")
    return ", ".join(told)
