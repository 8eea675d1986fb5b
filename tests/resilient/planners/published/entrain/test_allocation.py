"""When the proportion of units' work is known."""

from __future__ import annotations

import numpy as np
import pytest

from resilient.planners.published.entrain.allocation import num_checks, settle


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
