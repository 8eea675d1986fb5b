"""Sums of gradients: whose are at the same time, what is final last, and how far their rings reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Assignment, Configuration, Parallelism, Replica
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.evaluation.test_evaluate import place, setting, spread, table, unit

SLOW = Cluster(inter_node=Link(bytes_per_s=1e6))


def _step(
    units: dict[str, Parallelism], *, cluster: Cluster = SLOW, embedding: int = 0, colocated: bool = True
) -> Result:
    """One token of everything on each replica; all layers but the first one of the language model have 1000 bytes."""
    costs = [unit(name, [1.0] * sum(each.stage_layers), gradient_bytes=1000) for name, each in units.items()]
    if embedding:
        first, *others = costs[-1].layers
        costs[-1] = replace(costs[-1], layers=(replace(first, gradient_bytes=embedding), *others))
    dp = units["llm"].dp
    return evaluate(
        setting(*costs, cluster=cluster),
        Configuration(units=units, num_microbatches=1, colocated=colocated),
        Assignment(units=dict.fromkeys(units, place(list(range(dp)), [0] * dp))),
        table(**dict.fromkeys(units, [1] * dp)),
        [Replica(num_microbatches=1)] * dp,
    )


def test_units_on_the_same_devices_sum_one_after_the_other() -> None:
    """Gradients of 1 ms each: the language model's hide behind the encoder's backward of 2 ms, as far as they go."""
    assert _step({"vision": spread(2, 1), "llm": spread(2, 1)}).sum_ms == 1
    # 5 ms of the language model's begin with its backward, 4 ms before the end: the encoder's come after them
    long = _step({"vision": spread(2, 1), "llm": spread(2, 1)}, embedding=6000)
    assert long.sum_ms == 6 - 2 + 1
    apart = _step({"vision": spread(2, 1), "llm": spread(2, 1)}, embedding=6000, colocated=False)
    assert apart.sum_ms == 6 - 2


@pytest.mark.parametrize(("embedding", "sum_ms"), [(1000, 1), (7000, 7), (0, 1)])
def test_what_is_final_last_is_the_first_layer_however_large_it_is(embedding: int, sum_ms: float) -> None:
    """Sums begin with the backward, but that of a large embedding cannot."""
    units = {"llm": Parallelism(dp=2, pp=1, stage_layers=(4,))}
    assert _step(units, embedding=embedding).sum_ms == sum_ms


@pytest.mark.parametrize(
    ("devices_per_node", "dp", "pp", "sum_ms"),
    [
        (4, 2, 2, 0.0),  # all in one node
        (3, 2, 2, 0.0),  # the second stages are not, but the first ones' backward hides their sum
        (2, 2, 2, 1.0),
        (4, 3, 3, 2 / 3 * 2),  # rings of three: each on two nodes or three, with one member on some
        (2, 4, 1, 1.5 / 2 * 1.0),  # two on each of two nodes, through a card each
        (3, 4, 1, 1.5),  # three and one, which has one card
    ],
)
def test_rings_are_between_nodes_wherever_a_boundary_lies_inside(
    devices_per_node: int, dp: int, pp: int, sum_ms: float
) -> None:
    cluster = replace(SLOW, devices_per_node=devices_per_node)
    assert _step({"llm": spread(dp, pp)}, cluster=cluster).sum_ms == pytest.approx(sum_ms)


@pytest.mark.parametrize(("devices_per_node", "sum_ms"), [(4, 0.0), (3, 1.0)])
def test_replicas_of_an_encoder_are_as_far_apart_as_their_pipelines(devices_per_node: int, sum_ms: float) -> None:
    """Two devices of an encoder would fit a node, but those of the language model lie between them."""
    units = {"vision": spread(2, 1), "llm": spread(2, 2)}
    assert _step(units, cluster=replace(SLOW, devices_per_node=devices_per_node), colocated=False).sum_ms == sum_ms
