"""Sets of bytes behave as sets of numbers, and what several hold is cut into as few pieces as can be."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, Piece, common_pieces, redundancy

NUMBERS = st.frozensets(st.integers(0, 30))


def intervals_of(numbers: frozenset[int]) -> ByteIntervals:
    """Return the set with these bytes, found byte by byte."""
    starts = [number for number in sorted(numbers) if number - 1 not in numbers]
    ends = [number + 1 for number in sorted(numbers) if number + 1 not in numbers]
    return ByteIntervals(tuple(bound for pair in zip(starts, ends, strict=True) for bound in pair))


def numbers_of(intervals: ByteIntervals) -> frozenset[int]:
    return frozenset(number for start, end in intervals for number in range(start, end))


@given(NUMBERS, NUMBERS)
def test_union_intersection_and_difference_are_those_of_the_bytes(ours: frozenset[int], theirs: frozenset[int]) -> None:
    one, other = intervals_of(ours), intervals_of(theirs)
    assert one | other == intervals_of(ours | theirs)
    assert one & other == intervals_of(ours & theirs)
    assert one - other == intervals_of(ours - theirs)
    assert one.size == len(ours)
    assert bool(one) is bool(ours)
    assert numbers_of(one) == ours


@given(NUMBERS, NUMBERS)
def test_positions_are_those_in_a_buffer_of_the_held_bytes(held: frozenset[int], asked: frozenset[int]) -> None:
    buffer = sorted(held)
    found = intervals_of(held).positions(intervals_of(asked))
    assert numbers_of(found) == {buffer.index(number) for number in held & asked}


@given(NUMBERS, st.integers(0, 40))
def test_the_first_bytes_are_the_smallest(numbers: frozenset[int], count: int) -> None:
    assert intervals_of(numbers).first(count) == intervals_of(frozenset(sorted(numbers)[:count]))
    assert intervals_of(numbers).before(count) == len([number for number in numbers if number < count])


HELD = st.lists(NUMBERS, min_size=1, max_size=5).flatmap(lambda drawn: st.lists(st.sampled_from(drawn), max_size=9))
"""By rank; several hold the same."""


@given(HELD, st.lists(st.integers(0, 2), min_size=9, max_size=9), st.integers(1, 6))
def test_redundancy_is_that_of_the_byte_in_the_fewest_places(
    held: list[frozenset[int]], places: list[int], size: int
) -> None:
    inside = [frozenset(number for number in numbers if number < size) for numbers in held]
    expected = min(len({places[rank] for rank, has in enumerate(inside) if byte in has}) for byte in range(size))
    holders = {rank: intervals_of(numbers) for rank, numbers in enumerate(inside)}
    assert redundancy(holders, ByteIntervals.of(0, size), dict(enumerate(places))) == expected


@given(HELD)
def test_pieces_are_the_bytes_with_the_same_holders(held: list[frozenset[int]]) -> None:
    if not any(held):
        return
    by_holders: dict[tuple[int, ...], set[int]] = {}
    for number in frozenset[int]().union(*held):
        ranks = tuple(rank for rank, numbers in enumerate(held) if number in numbers)
        by_holders.setdefault(ranks, set()).add(number)
    expected = [Piece(ranks, intervals_of(frozenset(numbers))) for ranks, numbers in by_holders.items()]
    found = common_pieces({rank: intervals_of(numbers) for rank, numbers in enumerate(held)})
    assert list(found) == sorted(expected, key=lambda piece: piece.intervals.bounds)


def test_pieces_do_not_depend_on_the_order_of_the_holders() -> None:
    whole, half = ByteIntervals.of(0, 8), ByteIntervals.of(4, 8)
    expected = (Piece((1, 3), ByteIntervals.of(0, 4)), Piece((0, 1, 3), half))
    assert common_pieces({3: whole, 0: half, 1: whole}) == common_pieces({0: half, 1: whole, 3: whole}) == expected


def test_a_state_that_all_hold_whole_is_one_piece() -> None:
    whole = ByteIntervals.of(0, 12)
    assert common_pieces(dict.fromkeys((2, 0, 1), whole)) == (Piece((0, 1, 2), whole),)


def test_empty_interval_is_nothing() -> None:
    assert ByteIntervals.of(4, 4) == NO_BYTES
    assert common_pieces({0: NO_BYTES, 1: ByteIntervals.of(0, 4)}) == (Piece((1,), ByteIntervals.of(0, 4)),)


def test_state_without_bytes_is_one_piece_of_all_who_have_it() -> None:
    assert common_pieces({1: NO_BYTES, 0: NO_BYTES}) == (Piece((0, 1), NO_BYTES),)


def test_intervals_come_through_a_message_as_they_were() -> None:
    intervals = ByteIntervals((0, 4, 8, 12))
    assert msgspec.json.encode(intervals) == b'{"bounds":[0,4,8,12]}'
    assert msgspec.json.decode(msgspec.json.encode(intervals), type=ByteIntervals) == intervals


@pytest.mark.parametrize("bounds", [(0,), (4, 0), (0, 4, 4, 8), (-1, 2), (0, 0)])
def test_bounds_that_are_no_ascending_pairs_are_refused(bounds: tuple[int, ...]) -> None:
    message = f"bounds of intervals must be ascending pairs >= 0, got {bounds}; merge those that touch"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ByteIntervals(bounds)
