"""What numpy does not make of arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.common.arrays import distinct


@given(st.lists(st.integers(0, 50)))
def test_distinct_numbers_are_those_that_sorting_finds(numbers: list[int]) -> None:
    found, own = distinct(np.array(numbers, dtype=np.int64))

    expected, expected_own = np.unique(numbers, return_inverse=True)
    assert (found.tolist(), own.tolist()) == (expected.tolist(), expected_own.tolist())
