from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient.comm.agreement import Shares, all_equal

CHECKSUMS = st.integers(0, (1 << 64) - 1)
HOLDERS = st.sets(st.integers(0, 9), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
THINGS = st.lists(st.tuples(CHECKSUMS, HOLDERS), min_size=1, max_size=5)


def summed(things: list[tuple[dict[int, int], tuple[int, ...]]]) -> float:
    """Return the sum over all ranks, of things as the checksum of each holder's copy."""
    ranks = [Shares(rank) for rank in range(10)]
    for copies, holders in things:
        for rank in holders:
            ranks[rank].add(copies[rank], holders)
    return sum(float(shares.total) for shares in ranks)


@given(things=THINGS)
def test_equal_copies_cancel_out(things: list[tuple[int, tuple[int, ...]]]) -> None:
    assert all_equal(summed([(dict.fromkeys(holders, checksum), holders) for checksum, holders in things]))


@given(things=THINGS, flipped=st.integers(0, 28), data=st.data())
def test_one_copy_that_differs_is_noticed(
    things: list[tuple[int, tuple[int, ...]]], flipped: int, data: st.DataObject
) -> None:
    copies = [(dict.fromkeys(holders, checksum), holders) for checksum, holders in things]
    held, holders = copies[data.draw(st.integers(0, len(copies) - 1))]
    held[data.draw(st.sampled_from(holders))] ^= 1 << flipped
    # a weight of 1 - 9 = -8 takes a flipped bit up by three at most
    assert all_equal(summed(copies)) is (len(holders) == 1)
