from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import profile

from resilient.templates.partition import plan_templates
from resilient.templates.plan import Problem


def ends(problem: Problem, size: int) -> list[int]:
    return [stage.end_layer for stage in plan_templates(problem, [size])[size].stages]


def job(times_ms: list[float], devices_per_node: int = 1) -> Problem:
    return Problem(profile=profile(times_ms), num_microbatches=8, devices_per_node=devices_per_node)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
def test_slowest_stage_then_squares_equal_exhaustive_search(times: list[int], num_stages: int):
    num_stages = min(num_stages, len(times))
    template = plan_templates(job([float(t) for t in times]), [num_stages])[num_stages]
    found = [sum(times[stage.first_layer : stage.end_layer]) for stage in template.stages]
    best = min(
        (max(sums), sum(s * s for s in sums))
        for cuts in combinations(range(1, len(times)), num_stages - 1)
        for sums in [[sum(times[i:j]) for i, j in zip((0, *cuts), (*cuts, len(times)), strict=True)]]
    )
    assert (max(found), sum(s * s for s in found)) == best
    assert template.slowest_ms == pytest.approx(best[0])


@given(st.lists(st.integers(0, 9), min_size=6, max_size=12), st.integers(1, 3))
def test_stages_cover_layers_and_devices_in_order(times: list[int], devices: int):
    problem = job([float(t) for t in times], devices)
    sizes = range(1, problem.max_pipeline_nodes + 1)
    templates = plan_templates(problem, sizes)
    assert list(templates) == list(sizes)
    for size, template in templates.items():
        assert template.num_nodes == size
        bounds = [0, *(stage.end_layer for stage in template.stages)]
        assert [stage.first_layer for stage in template.stages] == bounds[:-1]
        assert bounds[-1] == len(times)
        assert all(stage.first_layer < stage.end_layer for stage in template.stages)
        places = [(stage.node_index, stage.device_index) for stage in template.stages]
        assert places == [(node, device) for node in range(size) for device in range(devices)]


def test_equal_layers_are_cut_evenly_however_their_times_round():
    assert ends(job([0.1] * 9), 3) == [3, 6, 9]


def test_layers_without_measured_times_are_cut_evenly():
    assert ends(job([0.0] * 8), 4) == [2, 4, 6, 8]


def test_ties_give_later_stages_more_layers():
    assert ends(job([1.0] * 5), 2) == [2, 5]


def test_size_with_more_devices_than_layers_is_refused():
    with pytest.raises(
        ValueError, match=r"^template size must be 1 to 2 nodes \(5 layers, 2 devices per node, .* got 3$"
    ):
        plan_templates(job([1.0] * 5, devices_per_node=2), [1, 3])
