from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.inputs.cluster import MOST_BYTES, Cluster
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.replan import first_plan, replan
from tests.templates.jobs import profile

FIELDS = ("parameter_bytes", "optimizer_bytes", "gradient_bytes", "input_bytes", "activation_bytes")


def of_bytes(field: str, num_bytes: int) -> ModelProfile:
    """Six layers with so many bytes of one kind each, and none of the others."""
    nothing = dict.fromkeys(FIELDS[:4], 0)
    layers = [
        replace(layer, costs=(LayerCost(forward_ms=1.0, backward_weight_ms=1.0),), **nothing)
        for layer in profile([1.0] * 6).layers
    ]
    if field != "activation_bytes":
        return ModelProfile(layers=tuple(replace(layer, **{field: num_bytes}) for layer in layers))
    costs = [tuple(replace(cost, activation_bytes=num_bytes) for cost in layer.costs) for layer in layers]
    return ModelProfile(layers=tuple(replace(layer, costs=of) for layer, of in zip(layers, costs, strict=True)))


@given(st.sampled_from(FIELDS), st.integers(0, MOST_BYTES // 6), st.booleans())
def test_layers_of_up_to_a_petabyte_can_be_planned(field: str, num_bytes: int, limited: bool) -> None:
    # Six stages keep up to six microbatches.
    cluster = Cluster(memory_bytes=MOST_BYTES if limited and num_bytes < MOST_BYTES // 40 else None)
    problem = PlanningProblem(profile=of_bytes(field, num_bytes), num_microbatches=12, cluster=cluster)
    plan = replan(problem, first_plan(problem, range(6)), range(1, 6))
    assert sorted(plan.nodes) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("field", FIELDS)
def test_layers_of_more_bytes_than_can_be_computed_with_are_refused(field: str) -> None:
    for num_bytes in (MOST_BYTES // 6 + 1, 2**63, 2**400):
        fix = "lower the microbatch, or profile the layers again"
        told = f"must be at most {MOST_BYTES} bytes in all, got {6 * num_bytes}; {fix}"
        with pytest.raises(ValueError, match=re.escape(told)):
            of_bytes(field, num_bytes)


def test_memory_of_more_bytes_than_can_be_computed_with_is_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"^memory_bytes must be 1 to {MOST_BYTES}, got {2**63}; None means no limit$"
    ):
        Cluster(memory_bytes=2**63)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 3), st.integers(0, 70), st.integers(1, 5))
def test_devices_have_parts_of_a_parameter_and_the_same_of_its_slots(
    trained: int, frozen: int, num_slots: int, own: int, degree: int
) -> None:
    segments = (4 * trained, 4 * frozen, *[4 * trained] * num_slots, own)
    parameter_bytes = 4 * trained + 4 * frozen + own
    layer = LayerProfile(
        name="l", costs=(), segments=segments,
        parameter_bytes=parameter_bytes, optimizer_bytes=4 * trained * num_slots,
    )  # fmt: skip
    shares = [layer.share(index, degree) for index in range(degree)]
    assert reduce(or_, shares) == layer.whole
    assert sum(share.size for share in shares) == layer.whole.size
    for share in shares:
        own_parts = {
            tuple((a - start, b - start) for a, b in share & ByteIntervals.of(start, start + 4 * trained))
            for start in [0, *(4 * (trained + frozen + slot * trained) for slot in range(num_slots))]
        }
        assert len(own_parts) == 1


def test_segments_that_do_not_add_up_are_refused() -> None:
    message = r"^segments of layer 'l' must add up to its 12 bytes, got \(8, 8\); profile the layer again$"
    with pytest.raises(ValueError, match=message):
        LayerProfile(name="l", costs=(), parameter_bytes=12, segments=(8, 8))


def test_tensor_parallel_devices_have_rows_or_equal_parts() -> None:
    layer = LayerProfile(name="layer", costs=(LayerCost(forward_ms=1.0),), parameter_bytes=64)
    assert [layer.part(index, 4) for index in range(4)] == [layer.share(index, 4) for index in range(4)]
    cut = replace(layer, rows=((40, 8), (16, 0), (8, 4)))
    assert [cut.part(index, 2).bounds for index in range(2)] == [(0, 16, 40, 60), (16, 56, 60, 64)]
    assert [cut.part(index, 3).bounds for index in range(3)] == [(0, 8, 40, 56), (8, 24, 40, 60), (24, 56, 60, 64)]


@pytest.mark.parametrize("rows", [((40, 8), (16, 0)), ((64, 24),), ((64, -8),), ((32, 64), (32, 0))])
def test_rows_that_do_not_add_up_are_refused(rows: tuple[tuple[int, int], ...]) -> None:
    told = re.escape(f"rows of layer 'layer' must add up to its 64 bytes, got {rows}; profile the layer again")
    with pytest.raises(ValueError, match=f"^{told}$"):
        LayerProfile(name="layer", costs=(LayerCost(forward_ms=1.0),), parameter_bytes=64, rows=rows)


def test_profile_of_one_degree_is_that_of_stages_which_all_have_it() -> None:
    model = replace(profile([8.0] * 3, tp_degrees=(1, 2, 4)), undivided="there are 4 heads")
    halves = model.at_degree(2)
    assert (halves.tp_degrees, {layer.costs[0].forward_ms for layer in halves.layers}) == (
        (2,),
        {layer.costs[1].forward_ms for layer in model.layers},
    )
    told = "tp must be one of the model's degrees (1, 2, 4: there are 4 heads), got 8; choose one of them"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        model.at_degree(8)
