"""Graphs of units: what is generated is valid and ends, what is broken is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane, chain_graph
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import ScheduleError, validate
from tests.templates.schedules.unit_steps import PlainExecutor, ViolationError, corrupted, halved, random_schedule

MS = 1_000_000
TRAINING = [ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER]


seeds = st.integers(0, 2**40)


@settings(max_examples=200)
@given(seeds)
def test_generated_steps_of_units_are_valid_and_read_back(seed: int) -> None:
    schedule = random_schedule(Random(seed))
    validate(schedule)
    PlainExecutor(schedule).run()
    assert Schedule.parse(str(schedule), schedule.graph) == schedule
    for action in (action for row in schedule.rows for action in row):
        assert Action.parse(str(action)) == action


@settings(max_examples=100)
@given(seeds)
def test_everything_of_a_step_happens_as_soon_as_what_it_waits_for(seed: int) -> None:
    schedule = halved(random_schedule(Random(seed)), Random(seed))
    graph, rng = schedule.graph, np.random.default_rng(seed)
    validate(schedule)
    shape = (graph.num_stages, graph.num_cells, int(graph.tables.parts.max(initial=1)))
    forward, latency = rng.integers(0, 9, shape[:2]), rng.integers(0, 4, (shape[0] - 1, shape[1]))
    inputs, weights = rng.integers(0, 9, shape), rng.integers(0, 9, shape)
    transfer = rng.integers(0, 9, (shape[0] - 1, *shape[1:]))
    flow_transfer, flow_latency = rng.integers(0, 9, len(graph.flows)), rng.integers(0, 9, len(graph.flows))
    costs = ActionCosts(
        forward_ms=forward,
        backward_input_ms=inputs,
        backward_weight_ms=weights,
        latency_ms=latency,
        transfer_ms=transfer,
        flow_latency_ms=flow_latency,
        flow_transfer_ms=flow_transfer,
    )

    def cost(action: Action) -> int:
        stage, cell, part = graph.first_stage[action.lane] + action.stage, action.index, action.part
        if action.flow is not None:
            return MS * int(flow_transfer[graph.flows.index(action.flow)])
        match action.op:
            case Op.FORWARD:
                return MS * int(forward[stage, cell])
            case Op.BACKWARD:
                return MS * int(inputs[stage, cell, part] + weights[stage, cell, part])
            case Op.BACKWARD_INPUT:
                return MS * int(inputs[stage, cell, part])
            case Op.BACKWARD_WEIGHT:
                return MS * int(weights[stage, cell, part])
            case Op.SEND_F:
                return MS * int(transfer[stage, cell, : graph.tables.parts[graph.tables.lane_of[stage], cell]].sum())
            case _:
                return MS * int(transfer[stage - 1, cell, part])

    def late(action: Action) -> int:
        if action.flow is not None:
            return MS * int(flow_latency[graph.flows.index(action.flow)])
        stage = graph.first_stage[action.lane] + action.stage
        return MS * int(latency[stage if action.op is Op.SEND_F else stage - 1, action.index])

    plain = PlainExecutor(schedule, cost, late)
    plain.run()
    timeline = simulate(schedule, costs)
    computed = [
        (str(action), start, end)
        for action, start, end in zip(
            (action for row in schedule.rows for action in row),
            timeline.start_ns.tolist(),
            timeline.end_ns.tolist(),
            strict=True,
        )
        if action.op is not Op.REDUCE
    ]
    expected = [(str(a), *plain.times[a]) for row in schedule.rows for a in row if a.op is not Op.REDUCE]
    assert computed == expected


@settings(max_examples=600)
@given(seeds)
def test_a_step_is_refused_exactly_when_running_it_breaks_a_rule(seed: int) -> None:
    rng = Random(seed)
    schedule = corrupted(halved(random_schedule(rng), rng), rng)
    check_alike(schedule)


def check_alike(schedule: Schedule) -> bool:
    """Check that validator and plain executor come to the same conclusion; return whether that is a refusal."""
    broken = refused = None
    try:
        PlainExecutor(schedule).run()
    except ViolationError as error:
        broken = str(error)
    try:
        validate(schedule)
    except ScheduleError as error:
        refused = str(error)
    assert (broken is None) == (refused is None), f"{broken}, {refused}\n{schedule}"
    return refused is not None


VISION, LLM = LaneName("vision"), LaneName("llm")
WHOLE = (Backward.ALL, Backward.ALL)
DEFERRED = StepGraph(
    lanes=(
        UnitLane(name=VISION, rows=(0, 1), cells=(0, 2), backwards=WHOLE),
        UnitLane(name=LLM, rows=(2, 3), cells=(0, 1, 2), backwards=WHOLE),
    ),
    flows=(Flow(VISION, 0, LLM, 0), Flow(VISION, 0, LLM, 2), Flow(VISION, 2, LLM, 2)),
    num_rows=4,
)
"""Cell 1 of the encoder is empty; of the samples of cell 0 some are for a later cell of the language model."""


def test_encoder_whose_samples_are_used_in_two_cells_runs_its_backward_in_two_parts_as_text() -> None:
    golden = """\
vision.0:0F0 vision.0:0SEND_F0 vision.0:0F2 vision.0:0SEND_F2 \
vision.0:0RECV_B0 vision.0:0B0 vision.0:0RECV_B0.1 vision.0:0B0.1 vision.0:0RECV_B2 vision.0:0B2
vision.0:1RECV_F0 vision.0:1F0 vision.0:1SEND_F0>llm.0:0 vision.0:1SEND_F0.1>llm.0:2 \
vision.0:1RECV_F2 vision.0:1F2 vision.0:1SEND_F2>llm.0:2 vision.0:1RECV_B0<llm.0:0 vision.0:1B0 vision.0:1SEND_B0 \
vision.0:1RECV_B0.1<llm.0:2 vision.0:1B0.1 vision.0:1SEND_B0.1 vision.0:1RECV_B2<llm.0:2 vision.0:1B2 vision.0:1SEND_B2
llm.0:0RECV_F0<vision.0:0 llm.0:0F0 llm.0:0SEND_F0 llm.0:0F1 llm.0:0SEND_F1 \
llm.0:0RECV_B0 llm.0:0B0 llm.0:0SEND_B0>vision.0:0 \
llm.0:0RECV_F2<vision.0:0.1 llm.0:0RECV_F2<vision.0:2 llm.0:0F2 llm.0:0SEND_F2 llm.0:0RECV_B1 llm.0:0B1 \
llm.0:0RECV_B2 llm.0:0B2 llm.0:0SEND_B2>vision.0:0.1 llm.0:0SEND_B2>vision.0:2
llm.0:1RECV_F0 llm.0:1F0 llm.0:1B0 llm.0:1SEND_B0 llm.0:1RECV_F1 llm.0:1F1 llm.0:1B1 llm.0:1SEND_B1 \
llm.0:1RECV_F2 llm.0:1F2 llm.0:1B2 llm.0:1SEND_B2"""
    assert str(generate_units(DEFERRED)) == golden


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 1, 0, 1), (1, 0, 0, 1)])
def test_all_that_one_change_can_break_is_refused(rows: tuple[int, ...]) -> None:
    """Every action is left out, is doubled, and changes places with every other of its row."""
    encoder, llm = DEFERRED.lanes
    lanes = (replace(encoder, rows=rows[:2]), replace(llm, rows=rows[2:]))
    graph = replace(DEFERRED, lanes=lanes, num_rows=max(rows) + 1)
    schedule = generate_units(graph, states=[[0], [1], [2], [3, 0]])
    refused = 0
    for row, actions in enumerate(schedule.rows):
        changed = [(*actions[:at], *actions[at + 1 :]) for at in range(len(actions))]
        changed += [(*actions[: at + 1], *actions[at:]) for at in range(len(actions))]
        swaps = combinations(range(len(actions)), 2)
        changed += [
            (*actions[:one], actions[two], *actions[one + 1 : two], actions[one], *actions[two + 1 :])
            for one, two in swaps
        ]
        for each in changed:
            others = list(schedule.rows)
            others[row] = each
            refused += check_alike(Schedule.of(others, graph))
    assert refused > 2 * len(schedule.codes), "what is left out or doubled at least"


def test_parts_share_evenly_what_is_said_of_their_cell() -> None:
    timeline = simulate(
        generate_units(DEFERRED),
        ActionCosts(forward_ms=0, backward_input_ms=5e-6, transfer_ms=3e-6, activation_bytes=[7, 0, 1, 1]),
    )
    lengths = {str(span.action): span.length_ns for span in timeline.spans}
    assert [lengths[f"vision.0:0B{each}"] for each in ("0", "0.1", "2")] == [3, 2, 5]
    assert [lengths[f"vision.0:1SEND_B{each}"] for each in ("0", "0.1", "2")] == [2, 1, 3]
    assert lengths["vision.0:0SEND_F0"] == 3
    assert timeline.peak_bytes[0] == 14


def test_parts_that_a_cell_does_not_have_cost_nothing() -> None:
    schedule, ones = generate_units(DEFERRED), np.ones((4, 3, 2))
    timeline = simulate(
        schedule,
        ActionCosts(forward_ms=ones, backward_input_ms=ones, transfer_ms=ones[:3], activation_bytes=ones),
    )
    lengths = {str(span.action): span.length_ns / MS for span in timeline.spans}
    assert [lengths[f"vision.0:0{each}"] for each in ("F0", "F2", "SEND_F0", "SEND_F2")] == [2, 1, 2, 1]
    assert timeline.peak_bytes == (3, 3, 2, 1)


def test_state_of_several_lanes_of_a_row_is_summed_after_the_last_backward_of_them_all() -> None:
    lanes = tuple(
        UnitLane(name=LaneName("vision", number), rows=(0,), cells=cells, backwards=(Backward.ALL,))
        for number, cells in enumerate([(0,), (1, 2)])
    )
    llm = UnitLane(name=LLM, rows=(1,), cells=(0, 1, 2), backwards=(Backward.ALL,))
    flows = tuple(Flow(lane.name, cell, LLM, cell) for lane in lanes for cell in lane.cells)
    graph = StepGraph(lanes=(*lanes, llm), flows=flows, num_rows=2)
    schedule = generate_units(graph, states=[[0], [0], [1]])
    assert [str(row[-1]) for row in schedule.rows] == ["vision.1:0REDUCE0", "llm.0:0REDUCE1"]
    timeline = simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1, reduce_ms={0: 1}))
    first = len(schedule.rows[0])
    assert timeline.start_ns[first - 1] == timeline.end_ns[first - 2], "of the last backward"


@given(st.sampled_from(TRAINING), st.integers(1, 6), st.integers(1, 12))
def test_chains_are_those_of_1f1b_and_eager_1f1b(kind: ScheduleKind, num_rows: int, num_microbatches: int) -> None:
    states = [[stage, 99] for stage in range(num_rows)]
    chain = generate(kind, num_rows, num_microbatches, states=states)
    assert generate_units(chain.graph, lead=TRAINING.index(kind) + 1, states=states) == chain


@given(st.sampled_from(TRAINING), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_chains_cut_into_units_compute_in_the_same_order(
    kind: ScheduleKind, num_before: int, num_after: int, num_microbatches: int
) -> None:
    lanes = tuple(
        UnitLane(
            name=name,
            rows=tuple(rows),
            cells=tuple(range(num_microbatches)),
            backwards=(Backward.ALL,) * len(rows),
        )
        for name, rows in [(VISION, range(num_before)), (LLM, range(num_before, num_before + num_after))]
    )
    flows = tuple(Flow(VISION, cell, LLM, cell) for cell in range(num_microbatches))
    graph = StepGraph(lanes=lanes, flows=flows, num_rows=num_before + num_after)
    schedules = (
        generate(kind, graph.num_rows, num_microbatches),
        generate_units(graph, lead=TRAINING.index(kind) + 1),
    )
    chain, units = (
        [[(action.op, action.index) for action in row if action.op.computes] for row in schedule.rows]
        for schedule in schedules
    )
    assert units == chain


def test_encoders_apart_run_all_forwards_first_and_all_backwards_last() -> None:
    lanes = tuple(replace(lane, rows=(0, 1)) for lane in DEFERRED.lanes)
    schedule = generate_units(replace(DEFERRED, lanes=lanes, num_rows=2), apart=True)
    validate(schedule)
    first, second = (" ".join(str(action) for action in row if action.op.computes) for row in schedule.rows)
    assert first == (
        "vision.0:0F0 vision.0:0F2 llm.0:0F0 llm.0:0F1 llm.0:0B0 llm.0:0F2 llm.0:0B1 llm.0:0B2 "
        "vision.0:0B0 vision.0:0B0.1 vision.0:0B2"
    )
    assert second == (
        "vision.0:1F0 vision.0:1F2 llm.0:1F0 llm.0:1B0 llm.0:1F1 llm.0:1B1 llm.0:1F2 llm.0:1B2 "
        "vision.0:1B0 vision.0:1B0.1 vision.0:1B2"
    )


def test_a_cell_without_samples_is_a_turn_in_which_less_is_kept() -> None:
    graph = chain_graph([0, 1], 2, 3)
    gaps = replace(graph, lanes=(replace(graph.lanes[0], cells=(0, 2, 4)),))
    schedule = generate_units(gaps)
    validate(schedule, [1, 1])
    assert [str(action) for action in schedule.row(0) if action.op.computes] == [
        "0F0",
        "0B0",
        "0F2",
        "0B2",
        "0F4",
        "0B4",
    ]


def test_a_pipeline_without_cells_only_sums_its_gradients() -> None:
    lanes = tuple(replace(lane, cells=()) for lane in DEFERRED.lanes)
    schedule = generate_units(StepGraph(lanes=lanes, num_rows=4), states=[[0], [], [1], [1, 2]])
    assert str(schedule) == "vision.0:0REDUCE0\n\nllm.0:0REDUCE1\nllm.0:1REDUCE2 llm.0:1REDUCE1"
    validate(schedule)
    timeline = simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1, reduce_ms={1: 2, 2: 3}))
    assert timeline.iteration_ms == 5
    assert Schedule.parse(str(schedule), schedule.graph) == schedule


def test_cells_kept_for_their_backwards_are_counted_until_the_last_part() -> None:
    schedule = generate_units(DEFERRED)
    validate(schedule, [2, 2, 2, 1])
    with pytest.raises(ScheduleError, match=r"^row 1 must keep at most 1 microbatches in flight, got 2\n") as raised:
        validate(schedule, [2, 1, 2, 1])
    assert "[vision.0:1F2]" in str(raised.value)


def test_frozen_encoder_has_no_backward_and_frozen_language_model_none_for_weights() -> None:
    frozen = (Backward.NONE, Backward.NONE)
    encoder, llm = DEFERRED.lanes
    lanes = (replace(encoder, backwards=frozen), replace(llm, backwards=(Backward.INPUTS, Backward.ALL)))
    schedule = generate_units(replace(DEFERRED, lanes=lanes))
    validate(schedule)
    ops = [{action.op.text for action in row if action.op.computes} for row in schedule.rows]
    assert ops == [{"F"}, {"F"}, {"F", "I"}, {"F", "B"}]
    assert "SEND_B" not in str(schedule).splitlines()[2]


def test_actions_are_sorted_by_unit_lane_stage_cell_and_part() -> None:
    ordered = ["vision.0:0F2", "vision.0:0F10", "vision.0:0B10.1", "vision.0:1F0", "vision.1:0F0", "llm.0:0F0"]
    actions = [Action.parse(text) for text in ordered]
    given = actions[::-1]
    assert sorted(given, key=lambda action: action.order(["vision", "llm"])) == actions


@pytest.mark.parametrize(
    "text",
    [
        "vision.0:0F2", "llm.12:2B7.1", "vision.0:1SEND_F3>llm.0:7", "vision.0:1SEND_F3.1>llm.0:7",
        "llm.0:0RECV_F7<vision.0:3.1", "llm.0:0SEND_B7>vision.0:3.1", "vision.0:1RECV_B3.1<llm.0:7", "a-b_2.0:0I0",
    ],
)  # fmt: skip
def test_actions_of_units_print_as_they_are_read(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "vision:0F2", "vision.0.0F2", "2vision.0:0F2", ".0:0F2", "vision.0:0F2.0", "vision.0:1SEND_F3<llm.0:7",
        "vision.0:1SEND_F3>llm.0:7.1", "llm.0:0RECV_F7.1<vision.0:3", "vision.0:1F3<llm.0:7", "vision.00:0F2",
        "vision.0:1SEND_F3>llm:7", "vision.0:1SEND_F3>",
    ],
)  # fmt: skip
def test_text_that_is_no_action_of_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '{re.escape(text)}'; ops are"):
        Action.parse(text)


GOOD, ORDERED = DEFERRED.lanes[1], generate_units(DEFERRED)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(GOOD, name=LaneName("2b", 0)), "name must be a word and a number >= 0, got ('2b', 0); begin "
         "units with a letter: vision, llm"),
        (lambda: replace(GOOD, rows=(1,)), "lane llm.0 must have a row and a backward for each stage, 1 or more, got 1 "
         "rows and 2 backwards; list each stage"),
        (lambda: replace(GOOD, cells=(1, 1)), "cells of lane llm.0 must be ascending and >= 0, got [1, 1]; list each "
         "once"),
        (lambda: replace(GOOD, backwards=(Backward.ALL, Backward.NONE)), "backwards of lane llm.0 must go on to the "
         "last stage, got ALL, NONE; gradients come from there: INPUTS at least"),
        (lambda: replace(DEFERRED, lanes=(GOOD, GOOD)), "lanes must be 1 or more, each once, unit by unit, got [llm.0, "
         "llm.0]; sort them"),
        (lambda: replace(DEFERRED, num_rows=3), "rows of stages must be below 3, got 3; number rows from 0"),
        (lambda: replace(DEFERRED, flows=(Flow(VISION, 1, LLM, 0),)), "flows must join cells that have samples, got "
         "vision.0:1>llm.0:0; name lanes of the graph"),
        (lambda: replace(DEFERRED, flows=(Flow(LLM, 1, VISION, 0),)), "flows must lead to a later unit, got "
         "llm.0:1>vision.0:0; units are vision, llm"),
        (lambda: replace(DEFERRED, flows=DEFERRED.flows[::-1]), "flows must be sorted by source and target, each once, "
         "got [vision.0:2>llm.0:2, vision.0:0>llm.0:2, vision.0:0>llm.0:0]; sort them"),
        (lambda: replace(DEFERRED, lanes=(DEFERRED.lanes[0], replace(GOOD, backwards=(Backward.NONE, Backward.ALL)))),
         "flows must give a trained unit its gradient, got vision.0:0>llm.0:0; llm.0 needs a backward: INPUTS"),
        (lambda: generate_units(DEFERRED, pace="text"), "pace must be one of vision, llm, got 'text'; name a unit"),
        (lambda: UnitLane(rows=(-2,), cells=(0,), backwards=(Backward.ALL,)), "rows of the chain must be >= -1, got "
         "[-2]; -1 is none"),
        (lambda: validate(ORDERED, [1]), "max_in_flight must list each of the 4 rows, got 1; list one number per row"),
        (lambda: Schedule.of([[Action(-1, Op.FORWARD, 0)], [], [], []], chain_graph([0], 4, 1)), "an action must be of "
         "a stage and a cell of the graph, got -1F0; add it, or drop the action"),
        (lambda: Schedule.of([[Action(0, Op.REDUCE, -1)], [], [], []], chain_graph([0], 4, 1)), "an action must be of "
         "a stage and a cell of the graph, got 0REDUCE-1; add it, or drop the action"),
        (lambda: generate_units(DEFERRED, lead=0), "lead must be >= 1, got 0; 1 is 1F1B, 2 is eager 1F1B"),
        (lambda: generate_units(DEFERRED, states=[[0]]), "states must list each of the 4 stages, got 1; list one per "
         "stage"),
        (lambda: Schedule.parse("vision.0:0F0"), "a schedule of units must come with its graph, got vision.0:0F0 "
         "without; give it"),
        (lambda: Schedule.parse("0F0", DEFERRED), "rows must be the 4 of the graph, got 1; add empty ones"),
        (lambda: Schedule.parse("llm.0:2F0\n\n\n", DEFERRED), "an action must be of a stage and a cell of the graph, "
         "got llm.0:2F0; add it, or drop the action"),
        (lambda: Schedule.parse("vision.0:1SEND_F0.1>llm.0:0\n\n\n", DEFERRED), "a message between units must be of a "
         "flow of the graph, got vision.0:1SEND_F0.1>llm.0:0; add it, or drop both ends"),
        (lambda: Schedule.parse("vision.0:0SEND_F0>llm.0:0\n\n\n", DEFERRED), "a message between units must be of a "
         "flow of the graph, got vision.0:0SEND_F0>llm.0:0; add it, or drop both ends"),
        (lambda: simulate(ORDERED, ActionCosts(forward_ms=1, backward_input_ms=1, flow_latency_ms=[1])),
         "flow_latency_ms must be one number, 3 numbers, got (1,); give one for all, or one for each flow"),
        (lambda: simulate(ORDERED, ActionCosts(forward_ms=[1], backward_input_ms=1)),
         "forward_ms must be one number, 4 or 4 x 3 or 4 x 3 x 2 numbers, got (1,); give one for all, one for each "
         "stage (border), or one for each of its microbatches"),
    ],
)  # fmt: skip
def test_what_is_no_step_of_units_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
