"""Units run ahead as far as each row's memory holds, and their backwards may be split."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.errors import ArgumentError
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import Backward, StepGraph, UnitLane
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate
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


def chain_behind(num_frozen: int, num_rows: int, num_cells: int) -> StepGraph:
    """A chain whose first stages are frozen; none before them is trained."""
    kinds = (Backward.NONE,) * num_frozen + (Backward.ALL,) * (num_rows - num_frozen)
    lane = UnitLane(rows=tuple(range(num_rows)), cells=tuple(range(num_cells)), backwards=kinds)
    return StepGraph(lanes=(lane,), num_rows=num_rows)


def test_weights_are_put_off_as_far_as_the_first_stage_that_has_any() -> None:
    """Behind two frozen stages; nobody waits for what the first one that trains differentiates."""
    schedule = generate_units(chain_behind(2, 4, 3), split=[False, False, False, True])
    assert [
        " ".join(str(action) for action in schedule.row(row) if action.op.computes) for row in range(4)
    ] == [
        "0F0 0F1 0F2",
        "1F0 1F1 1F2",
        "2F0 2F1 2B0 2F2 2B1 2B2",
        "3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 3W2",
    ]  # fmt: skip


def ends_of_cells(timeline: Timeline) -> dict[tuple[bool, int, int], int]:
    """Return when forwards end, and backwards for what came in, by stage and cell."""
    codes = timeline.schedule.codes.tolist()
    return {
        (op == Op.FORWARD, stage, cell): end
        for (op, stage, cell, _, _), end in zip(codes, timeline.end_ns.tolist(), strict=True)
        if op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)
    }


@pytest.mark.parametrize("alike", [False, True])
def test_split_backwards_delay_nobody_where_messages_are_free(alike: bool) -> None:
    """Of cells that are alike; only what is put off may end later, and not where stages are alike, too."""
    rng = Random(0)
    for _ in range(600):
        num_rows, num_cells = rng.randint(1, 6), rng.randint(1, 8)
        num_frozen = rng.randrange(num_rows)
        drawn = [rng.choices([0, 1, 2, 3, 5, 8, 20], k=3) for _ in range(num_rows)]
        forward, inputs, weights = np.array(drawn[:1] * num_rows if alike else drawn).T
        passes, trains = np.arange(num_rows) > num_frozen, np.arange(num_rows) >= num_frozen
        costs = ActionCosts(forward_ms=forward, backward_input_ms=inputs * passes, backward_weight_ms=weights * trains)
        graph = chain_behind(num_frozen, num_rows, num_cells)
        whole, split = (simulate(generate_units(graph, split=each), costs) for each in (False, passes.tolist()))
        before, after = ends_of_cells(whole), ends_of_cells(split)
        assert all(after[each] <= before[each] for each in before)
        late = np.minimum(np.arange(num_rows) - num_frozen, num_cells - 1) * weights
        put_off_ms = 0 if alike else late[passes].max(initial=0)
        assert split.iteration_ms <= whole.iteration_ms + put_off_ms


def test_limit_of_other_rows_is_refused() -> None:
    message = "max_in_flight must be >= 1 for each of the 2 rows, got [2]; a row whose memory holds no cell cannot run"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        generate_units(generate(ScheduleKind.ONE_F_ONE_B, 2, 3).graph, max_in_flight=[2])
