from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyomo.environ as pyo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.composition.batch_split import Line, Lines, finish_ns, split_microbatches
from resilient.templates.composition.batch_split_model import split_with_constraints
from tests.templates.jobs import step_ns

EQUAL: list[Lines] = [(Line(0, 10),)] * 4


def splits(total: int, choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """All ways to sum up to ``total`` with one of each pipeline's choices."""
    if not choices:
        if total == 0:
            yield ()
        return
    for first in choices[0]:
        for rest in splits(total - first, choices[1:]):
            yield (first, *rest)


def quality(pipelines: Sequence[Lines], split: Sequence[int]) -> tuple[int, int, int]:
    """What is to be least: the latest finish, how many finish then, and the sum of all finishing times."""
    times = list(map(finish_ns, pipelines, split))
    return max(times), times.count(max(times)), sum(times)


line = st.builds(Line, st.integers(0, 12), st.integers(1, 5), st.sampled_from([1, 1, 2, 3]))
pipeline = st.lists(line, min_size=1, max_size=3).map(tuple)


@settings(max_examples=100)
@given(st.data())
def test_split_equals_exhaustive_search_under_constraints(data: st.DataObject) -> None:
    pipelines = data.draw(st.lists(pipeline, min_size=1, max_size=4))
    indices = range(len(pipelines))
    least = [data.draw(st.integers(1, 3)) for _ in indices]
    most = [low + data.draw(st.integers(0, 9)) for low in least]
    multiples = [data.draw(st.integers(1, 3)) for _ in indices]
    total = data.draw(st.integers(sum(least), sum(most)))
    together = data.draw(st.none() | st.integers(4, 16))

    choices = [[n for n in range(least[i], most[i] + 1) if n % multiples[i] == 0] for i in indices]
    allowed = [split for split in splits(total, choices) if together is None or split[0] + split[-1] <= together]

    def constrain(model: Any) -> None:
        if together is not None:
            model.together = pyo.Constraint(
                expr=model.microbatches[0] + model.microbatches[len(pipelines) - 1] <= together
            )

    def split() -> tuple[int, ...]:
        return split_with_constraints(
            pipelines,
            total,
            min_microbatches=least,
            max_microbatches=most,
            multiple_of=multiples,
            constrain=constrain,
        )

    if not allowed:
        with pytest.raises(ValueError, match=rf"\(minima and maxima: {sum(least)} to {sum(most)}\), got {total}; "):
            split()
        return
    found = split()
    assert found in allowed
    assert quality(pipelines, found) == min(quality(pipelines, split) for split in allowed)


@settings(max_examples=20)
@given(st.data())
def test_without_constraints_the_finishing_times_are_those_of_the_direct_split(data: st.DataObject) -> None:
    """Times as measured: milliseconds in nanoseconds, with odd ends. Any pipeline can be filled up to the latest."""
    layout = st.builds(Line, st.integers(10**6, 10**7), st.integers(5 * 10**6, 10**7), st.just(1))
    pipelines = data.draw(st.lists(st.lists(layout, min_size=1, max_size=2).map(tuple), min_size=2, max_size=6))
    total = data.draw(st.integers(8, 40)) * len(pipelines)
    found = split_with_constraints(pipelines, total)
    direct = split_microbatches(pipelines, total)
    assert sorted(map(finish_ns, pipelines, found)) == sorted(map(finish_ns, pipelines, direct))


def test_a_nanosecond_decides_though_the_solver_does_not_see_it() -> None:
    """Steps of 1000 s: with its tolerances HiGHS alone ends 3 ns later."""
    fill, slow = 10**12, 10**7
    pipelines: list[Lines] = [
        (Line(fill + 3, slow), Line(fill + slow + 1, slow - 1), Line(fill + 2 * slow, slow - 20)),
        (Line(fill + 4, slow), Line(fill + slow + 4, slow - 3), Line(fill + 2 * slow + 1, slow - 10)),
        (Line(fill, slow), Line(fill + slow + 1, slow - 1), Line(fill + 2 * slow + 5, slow - 2)),
        (Line(fill + 3, slow), Line(fill + slow, slow - 1), Line(fill + 2 * slow, slow - 2)),
    ]
    assert max(map(finish_ns, pipelines, split_with_constraints(pipelines, 21))) == step_ns(pipelines, 21)


def test_few_pipelines_finish_last_then_all_together_take_the_least_time() -> None:
    """The first is latest with one microbatch; the second is fastest, but with ten it would be as late."""
    assert split_with_constraints([(Line(109, 1),), (Line(100, 1),), (Line(0, 2),)], 16) == (1, 9, 6)


def test_memory_caps_move_work_to_slower_pipelines() -> None:
    pipelines: list[Lines] = [(Line(0, 10),), (Line(0, 20),), (Line(0, 30),)]
    assert split_with_constraints(pipelines, 11) == (6, 3, 2)
    assert split_with_constraints(pipelines, 11, max_microbatches=[4, 11, 11]) == (4, 4, 3)


def test_interleaved_schedules_get_multiples_of_their_stages() -> None:
    assert sorted(split_with_constraints(EQUAL, 24, multiple_of=[4] * 4)) == [4, 4, 8, 8]


def test_a_number_that_a_constraint_fixes_stays() -> None:
    def fix(model: Any) -> None:
        model.microbatches[1].fix(7)

    assert split_with_constraints(EQUAL, 10, constrain=fix) == (1, 7, 1, 1)


ALL_EVEN = [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("total", "constraints", "message"),
    [
        (17, {"multiple_of": ALL_EVEN}, "4 to any number), got 17; use 16 or 18"),
        (3, {}, "4 to any number), got 3; use 4"),
        (9, {"max_microbatches": ALL_EVEN}, "4 to 8), got 9; use 8"),
        (5, {"min_microbatches": ALL_EVEN, "max_microbatches": [9] * 4}, "8 to 36), got 5; use 8"),
        (
            9,
            {"min_microbatches": [5, 1, 1, 1], "max_microbatches": [2] * 4},
            "8 to 8), got 9; no sum is allowed: take constraints back",
        ),
    ],
)
def test_impossible_split_names_the_sums_and_the_nearest_that_are_possible(
    total: int, constraints: dict[str, Any], message: str
) -> None:
    start = "num_microbatches must be a sum that the constraints of 4 pipelines allow (minima and maxima: "
    with pytest.raises(ValueError, match=f"^{re.escape(start + message)}$"):
        split_with_constraints(EQUAL, total, **constraints)


@pytest.mark.parametrize(
    ("name", "values"), [("min_microbatches", [1, 1]), ("max_microbatches", [1, 1, 1, 0]), ("multiple_of", [])]
)
def test_constraints_must_be_one_for_each_pipeline(name: str, values: list[int]) -> None:
    constraint: dict[str, Any] = {name: values}
    message = (
        f"{name} must be a number >= 1 for each of 4 pipelines, got {values}; give 1, or num_microbatches as a "
        f"maximum, where there is no constraint"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        split_with_constraints(EQUAL, 8, **constraint)


def test_no_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pipelines must be one or more, got none; give the lines of each$"):
        split_with_constraints([], 8)
