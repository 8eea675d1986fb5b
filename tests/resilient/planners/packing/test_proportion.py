"""Devices in proportion to work."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.proportion import proportional


@pytest.mark.parametrize(
    ("work", "sizes", "num_devices", "expected"),
    [
        ([1.0, 3.0], [1, 1], 8, (2, 6)),
        ([1.0, 2.0], [1, 1], 8, (3, 5)),  # 2.67 and 5.33
        ([1.0, 1.0], [1, 1], 3, (2, 1)),  # equal remainders: the first
        ([1.0, 99.0], [1, 1], 8, (1, 7)),  # at least one
        ([1.0, 99.0], [2, 4], 10, (2, 8)),
        ([1.0, 1.0, 98.0], [1, 1, 1], 4, (1, 1, 2)),
        ([5.0, 3.0], [4, 2], 16, (8, 8)),  # 2.5 groups of four and 3 of two: no four devices are left
        ([0.0, 0.0], [1, 1], 4, (2, 2)),
        ([3.0], [4], 11, (8,)),
    ],
)
def test_proportional_examples(
    work: list[float], sizes: list[int], num_devices: int, expected: tuple[int, ...]
) -> None:
    assert proportional(work, sizes, num_devices) == expected


UNITS = st.lists(st.tuples(st.floats(0, 1e3), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(UNITS, st.integers(0, 100))
def test_proportional_gives_whole_groups_and_leaves_less_than_one(units: list[tuple[float, int]], more: int) -> None:
    work, sizes = [each[0] for each in units], [each[1] for each in units]
    num_devices = sum(sizes) + more
    devices = proportional(work, sizes, num_devices)
    assert all(got >= size and got % size == 0 for got, size in zip(devices, sizes, strict=True))
    assert 0 <= num_devices - sum(devices) < min(sizes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1, 10), min_size=1, max_size=4), st.integers(40, 100))
def test_proportional_is_off_by_less_than_a_device_where_every_share_is_more_than_one(
    work: list[float], num_devices: int
) -> None:
    for each, got in zip(work, proportional(work, [1] * len(work), num_devices), strict=True):
        assert abs(got - num_devices * each / sum(work)) < 1


def test_proportional_refuses_too_few_devices() -> None:
    message = "num_devices must be >= 6, a group of [2, 4] each, got 5; use more devices or smaller groups"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        proportional([1.0, 1.0], [2, 4], 5)
