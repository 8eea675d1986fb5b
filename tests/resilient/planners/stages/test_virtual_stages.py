"""Units with several stages on each device: their layers, rows, memory and sums."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Configuration, Encoders, Parallelism, Replica
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.pipeline_memory import most_held
from resilient.planners.stages.redundancy import check_redundancy
from resilient.planners.stages.stage_work import state_bytes
from resilient.planners.stages.virtual_stages import by_row, cut_rounds, held_together
from resilient.templates.inputs.cluster import Link
from resilient.templates.schedules.graph import Backward, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate
from tests.resilient.planners.jobs_of_planners import COSTS, setting, table, unit


def spread(encoder: int, language: int, chunks: int, dp: int = 2) -> Configuration:
    """Replicas of so many rows, those of the language model with so many stages each."""
    cut = (8 // (language * chunks),) * (language * chunks)
    units = {
        "vision": Parallelism(dp=dp, pp=encoder, stage_layers=(4 // encoder,) * encoder),
        LLM: Parallelism(dp=dp, pp=language, chunks=chunks, stage_layers=cut),
    }
    return Configuration(units=units, num_microbatches=8)


@pytest.mark.parametrize("lost", [0, 1])
def test_memory_holds_what_interleaved_stages_keep(lost: int) -> None:
    peaks: list[float] = []
    for configuration in (spread(1, 2, 2), spread(1, 4, 2), spread(2, 2, 4)):
        for seed, memory in product(range(8), (600_000, 1_000_000, 1_500_000, 2_000_000)):
            job, batch = setting(memory), table(32, seed)
            try:
                replicas = degraded_replicas(job, configuration, lost)
                assignment = DistTrain().assign(job, configuration, batch, replicas)
            except ValueError:
                continue  # a sample has no room
            result = evaluate(job, configuration, assignment, batch, replicas)
            validate(result.timeline.schedule)
            peaks.append(result.peak_bytes / memory)
    assert len(peaks) > 20
    assert 0.95 < max(peaks) <= 1


@pytest.mark.parametrize("rows", [(1, 2), (2, 2), (1, 4)])
def test_planned_rows_hold_what_a_step_of_mean_cells_does(rows: tuple[int, int]) -> None:
    found, batch = replace(spread(*rows, 2, dp=1), num_microbatches=16), even(32, 10, 1000)
    job = replace(setting(), num_nodes=sum(rows), num_pipelines=1)
    replicas = [Replica(num_microbatches=16)]
    assignment = DistTrain().assign(job, found, batch, replicas)
    peak = evaluate(job, found, assignment, batch, replicas).peak_bytes
    assert most_held(job, found, batch) == pytest.approx(peak, rel=0.001)


@settings(deadline=None)
@given(costs=st.lists(st.floats(0, 10), min_size=4, max_size=9), depth=st.integers(2, 3), chunks=st.integers(1, 2))
def test_layers_are_cut_as_evenly_as_one_layer_at_a_time_makes_them(
    costs: list[float], depth: int, chunks: int
) -> None:
    number = depth * chunks
    if number > len(costs):
        return
    sums = np.concatenate(([0.0], np.cumsum(costs)))

    def slowest(cut: tuple[int, ...]) -> float:
        bounds = np.concatenate(([0], np.cumsum(cut)))
        return float(np.diff(sums[bounds]).reshape(chunks, depth).max(axis=1).sum())

    found = cut_rounds(costs, depth, chunks)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    for giver, taker in ((one, other) for one in range(number) for other in range(number)):
        moved = tuple(each - (at == giver) + (at == taker) for at, each in enumerate(found))
        if min(moved) >= 1:
            assert slowest(found) <= slowest(moved) + 1e-6


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 2), st.data())
def test_rows_hold_together_what_their_schedule_keeps(pp: int, chunks: int, lead: int, data: st.DataObject) -> None:
    number = pp * chunks
    kept = np.array(data.draw(st.lists(st.integers(0, 9), min_size=number, max_size=number)))
    rows = tuple(stage % pp for stage in range(number))
    cells = tuple(range(6 * pp))
    lane = UnitLane(name=LaneName(LLM, 0), rows=rows, cells=cells, backwards=(Backward.ALL,) * number, whole=True)
    schedule = generate_units(StepGraph(lanes=(lane,), flows=(), num_rows=pp), lead=lead)
    now, most = np.zeros(pp), np.zeros(pp)
    for op, stage, *_ in schedule.codes.tolist():
        now[rows[stage]] += kept[stage] * ((op == Op.FORWARD) - (op == Op.BACKWARD))
        most = np.maximum(most, now)
    spread = Parallelism(dp=1, pp=pp, chunks=chunks)
    assert by_row(spread, 1.0 * kept * held_together(spread, 0, lead, kept)).tolist() == most.tolist()


def test_equal_layers_are_cut_as_well_as_they_can_be() -> None:
    for number, depth, chunks in ((7, 3, 2), (9, 2, 3), (10, 4, 2)):
        found = np.array(cut_rounds(np.ones(number), depth, chunks)).reshape(chunks, depth)
        ways = [np.diff([0, *way, number]) for way in combinations(range(1, number), depth * chunks - 1)]
        best = min(int(way.reshape(chunks, depth).max(axis=1).sum()) for way in ways)
        assert found.max(axis=1).sum() == best


def test_rows_have_every_second_stage_and_the_state_of_both() -> None:
    configuration = spread(1, 2, 2)
    layout = DeviceLayout(configuration, 2)
    assert layout.rows[LLM].tolist() == [[2, 3, 2, 3], [4, 5, 4, 5]]
    assert layout.sizes.tolist() == [1] * 6
    one, two = (state_bytes(setting(), COSTS.by_name[LLM], spread(1, 2, chunks).units[LLM]) for chunks in (1, 2))
    assert one.tolist() == two.tolist() == [4 * 12000.0] * 2
    check_redundancy(replace(setting(), max_failures=1), configuration)


def test_a_row_sums_the_gradients_of_its_stages_one_after_the_other() -> None:
    link, batch, taken = Link(bytes_per_s=2e4), table(4), list[float]()
    silent = CostModel(units=tuple(replace(each, output_bytes=0.0) for each in COSTS.units))
    cluster = replace(setting().cluster, inter_node=link, intra_node=link)
    job = replace(setting(), cluster=cluster, costs=silent)
    for chunks in (1, 2, 4):
        found = replace(spread(4, 2, chunks), num_microbatches=1)
        replicas = degraded_replicas(job, found, 0)
        assignment = DistTrain().assign(setting(), found, batch, replicas)
        taken.append(evaluate(job, found, assignment, batch, replicas).sum_ms)
    assert taken[0] > 500  # four layers of 4 kB, all of them after the only microbatch
    assert taken[1:] == pytest.approx([taken[0]] * 2, rel=0.05)


def even(count: int, vision: int, text: int) -> SampleTable:
    lengths = {"vision": np.full(count, vision), LLM: np.full(count, text)}
    return SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})


def test_two_stages_on_each_device_fill_the_pipeline_faster_where_the_encoder_is_faster() -> None:
    """Of four rows a step is shorter by half of what the last one waits for at the beginning and the end."""
    job = replace(setting(), costs=CostModel(units=(unit("vision", 4, 0.001, 0.0), unit(LLM, 8, 0.002, 0.0))))
    batch, times = even(16, 10, 10_000), list[float]()
    for chunks in (1, 2):
        found = replace(spread(1, 4, chunks, dp=1), num_microbatches=16)
        replicas = [Replica(num_microbatches=16)]
        assignment = DistTrain().assign(job, found, batch, replicas)
        times.append(evaluate(job, found, assignment, batch, replicas).iteration_ms)
    stage_ms = 2 * COSTS.by_name[LLM].layers[0].curves[0].forward.linear * 10_000 * 3
    assert times[0] - times[1] == pytest.approx(3 * stage_ms / 2, rel=0.02)


def test_where_units_cannot_have_several_stages_on_a_device_is_said() -> None:
    message = (
        "chunks must be >= 1, and 1 where pp is, got 2; on a single row, several stages follow each other as one does"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Parallelism(dp=1, pp=1, chunks=2)
    message = "chunks must be 1 where units share devices or divide copies, got 2; leave it out"
    for changes in ({"colocated": True}, {"encoders": Encoders.REPLICATED}, {"shard": 2}):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replace(spread(1, 4, 2), **changes)
