"""Units run ahead as far as each row's memory holds, and their backwards may be split."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.errors import ArgumentError
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate
from tests.templates.schedules.unit_steps import PlainExecutor, random_graph

seeds = st.integers(0, 2**40)


@given(st.sampled_from([ScheduleKind.ZB_H1, ScheduleKind.ZB_H2]), st.integers(1, 6), st.integers(1, 12))
def test_split_chains_are_those_of_zero_bubble_orders(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> None:
    chain = generate(kind, num_rows, num_microbatches)
    assert generate_units(chain.graph, lead=1 + (kind is ScheduleKind.ZB_H2), split=True) == chain


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_chains_run_ahead_as_far_as_memory_holds(max_in_flight: list[int], num_microbatches: int) -> None:
    chain = generate(ScheduleKind.EAGER, len(max_in_flight), num_microbatches, max_in_flight=max_in_flight)
    assert generate_units(chain.graph, lead=2, max_in_flight=max_in_flight) == chain


@settings(max_examples=200)
@given(seeds, st.integers(1, 2), st.booleans())
def test_rows_keep_no_more_than_they_may_or_the_limit_is_refused(seed: int, lead: int, split: bool) -> None:
    rng = Random(seed)
    graph = random_graph(rng)
    most = [rng.randint(1, 6) for _ in range(graph.num_rows)]
    try:
        schedule = generate_units(graph, lead=lead, split=split, max_in_flight=most)
    except ArgumentError as error:
        needed, row = map(int, re.findall(r"must be >= (\d+) for row (\d+), got", str(error))[0])
        assert needed > most[row]
        enough = [needed if at == row else 99 for at in range(graph.num_rows)]
        validate(generate_units(graph, lead=lead, split=split, max_in_flight=enough), enough)
        return
    validate(schedule, most)
    PlainExecutor(schedule).run()
    kept = simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1, activation_bytes=1000)).peak_bytes
    assert all(size <= 1000 * limit for size, limit in zip(kept, most, strict=True))


def test_limit_of_other_rows_is_refused() -> None:
    message = "max_in_flight must be >= 1 for each of the 2 rows, got [2]; a row whose memory holds no cell cannot run"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        generate_units(generate(ScheduleKind.ONE_F_ONE_B, 2, 3).graph, max_in_flight=[2])
