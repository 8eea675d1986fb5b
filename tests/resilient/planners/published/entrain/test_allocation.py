"""Devices in proportion to work, and when the proportion is known."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.published.entrain.allocation import num_checks, proportional, settle


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


def test_num_checks_of_the_paper() -> None:
    assert num_checks(0.05, 0.05) == 59
    assert num_checks(0.5, 0.25) == 2


def test_settle_needs_few_samples_of_even_work() -> None:
    found = settle(np.tile([[1.0], [3.0]], 10), [1, 1], 8, 4096)
    assert found.settled
    assert (found.num_samples, found.devices) == (16, (2, 6))
    assert str(found) == "batches of 16 samples agree on (2, 6) devices"


def test_settle_needs_more_samples_of_uneven_work() -> None:
    draw = np.random.default_rng(0)
    found = settle(np.stack([draw.lognormal(0, 0.5, 5000), np.full(5000, 2.9)]), [1, 1], 8, 4096)
    assert found.settled
    assert 16 < found.num_samples < 4096
    assert found.devices == (2, 6)
    assert found == settle(
        np.stack([np.random.default_rng(0).lognormal(0, 0.5, 5000), np.full(5000, 2.9)]), [1, 1], 8, 4096
    )


def test_settle_gives_up_on_a_rounding_edge() -> None:
    found = settle(np.stack([np.tile([4.5, 5.5], 50), np.full(100, 11.0)]), [1, 1], 8, 4096)  # a share of exactly 2.5
    assert not found.settled
    assert found.num_samples == 4096
    (other, count), *more = found.others
    assert not more
    assert {found.devices, other} == {(2, 6), (3, 5)}
    assert str(found) == (
        f"batches of 4096 samples do not agree on {found.devices} devices: of 59, some come to {other} by {count}"
    )


def test_settle_refuses_no_samples() -> None:
    with pytest.raises(ValueError, match=r"^samples must be one or more, got none; draw some from the data set$"):
        settle(np.empty((2, 0)), [1, 1], 8, 4096)
