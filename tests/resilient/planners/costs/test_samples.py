"""The sample table: what a sample's sequences sum up to, parts of it, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from resilient.planners.costs.samples import Lengths, SampleTable

THREE = SampleTable(units={"vision": Lengths.of([[], [2, 3], [4]]), "llm": Lengths.of(np.array([1, 6, 7]))})


def test_squares_are_those_of_sequences_and_not_of_their_sum() -> None:
    vision, llm = THREE.units["vision"], THREE.units["llm"]
    assert [vision.tokens.tolist(), vision.squares.tolist(), vision.longest.tolist()] == [
        [0, 5, 4],
        [0, 13, 16],
        [0, 3, 4],
    ]
    assert [llm.tokens.tolist(), llm.squares.tolist(), llm.longest.tolist()] == [[1, 6, 7], [1, 36, 49], [1, 6, 7]]


def test_parts_of_a_table_keep_names_and_all_units() -> None:
    named = SampleTable(units=THREE.units, names=("a", "b", "c"))
    part = named[np.array([2, 0])]
    assert (len(part), part.names, part.name(0)) == (2, ("c", "a"), "'c'")
    assert {unit: lengths.tokens.tolist() for unit, lengths in part.units.items()} == {"vision": [4, 0], "llm": [7, 1]}
    assert THREE[1:].name(1) == "sample 1"


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Lengths(tokens=ints(1, 2), squares=ints(1), longest=ints(1, 2)),
            "tokens, squares and longest must have one shape [num_samples], got ((2,), (1,), (2,)); give a number for "
            "each sample in each",
        ),
        (lambda: SampleTable(units={}), "units must name at least one unit, got none; give its lengths"),
        (
            lambda: SampleTable(units={"vision": Lengths.of(ints(1, 2)), "llm": Lengths.of(ints(1))}),
            "units and names must describe the same samples, got {'vision': 2, 'llm': 1} and 0 names; give each sample "
            "its lengths in every unit, and a name or none to all",
        ),
        (
            lambda: SampleTable(units={"llm": Lengths.of(ints(1, 2))}, names=("a",)),
            "units and names must describe the same samples, got {'llm': 2} and 1 names; give each sample its lengths "
            "in every unit, and a name or none to all",
        ),
        (
            lambda: SampleTable(units={"llm": Lengths.of(ints(3, -2))}, names=("a", "b")),
            "tokens must be >= 0, got -2 for llm of 'b'; 0 means that it has nothing to do",
        ),
    ],
)
def test_a_table_of_other_things_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
