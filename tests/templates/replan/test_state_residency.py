from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.replan.state_residency import EMPTY, INTRA_NODE_SPEEDUP, StateResidency
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import cost, cut, layer

DEVICES = 4


@st.composite
def cuts(draw: st.DrawFn, num_layers: int) -> PipelineTemplate:
    """Templates of one or two nodes of four devices, of any degree that one degree for all stages allows.

    In some, each device has several stages, and in some a further node has none.
    """
    degree, num_nodes = draw(st.sampled_from([(4, 1), (4, 2), (2, 1), (2, 2), (1, 1)]))
    num_rows = num_nodes * DEVICES // degree
    num_stages = num_rows * draw(st.integers(1, num_layers // num_rows))
    inner = draw(st.sets(st.integers(1, num_layers - 1), min_size=num_stages - 1, max_size=num_stages - 1))
    spread = cut(*sorted(inner), num_layers, degree=degree, devices=DEVICES)
    stages = tuple(
        replace(stage, node_index=spread.stages[i % num_rows].node_index, first_device=i % num_rows * degree % DEVICES)
        for i, stage in enumerate(spread.stages)
    )
    without = draw(st.integers(0, num_nodes + 1))
    stages = tuple(replace(stage, node_index=stage.node_index + (stage.node_index >= without)) for stage in stages)
    return PipelineTemplate(num_nodes=num_nodes + (without <= num_nodes), stages=stages)


def bytes_on(model: ModelProfile, template: PipelineTemplate, node: int, cells: int) -> dict[int, dict[tuple, int]]:
    """Per device of a node, the (state, cell)s it holds and their bytes x cells; the k-th of d has the k-th 1/d."""
    held: dict[int, dict[tuple, int]] = {device: {} for device in range(DEVICES)}
    for stage in template.stages:
        if stage.node_index == node:
            for k in range(stage.num_devices):
                first, end = (shard * cells // stage.num_devices for shard in (k, k + 1))
                for state in model.states(stage.first_layer, stage.end_layer):
                    size = model.layers[model.index(state)].state_bytes
                    held[stage.first_device + k].update({(state, cell): size for cell in range(first, end)})
    return held


def price(model: ModelProfile, needs: dict[int, dict[tuple, int]], has: dict[int, dict[tuple, int]], cells: int) -> int:
    """In the unit of :meth:`StateResidency.prices`, counted cell by cell."""
    needed = {key: size for of in needs.values() for key, size in of.items()}
    on_node = {key for of in has.values() for key in of}
    from_nodes = sum(size for key, size in needed.items() if key not in on_node)
    missing = sum(size for device, of in needs.items() for key, size in of.items() if key not in has[device])
    return INTRA_NODE_SPEEDUP * from_nodes + (missing - from_nodes)


@given(st.data())
def test_prices_are_those_of_counting_cells(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(8, 10))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=num_layers, max_size=num_layers))
    last_owners = data.draw(st.sampled_from([(), (0,)]))
    model = ModelProfile(
        layers=tuple(
            layer(i, [cost(1.0)], size, owners=last_owners if i == num_layers - 1 else ())
            for i, size in enumerate(sizes)
        )
    )
    residency = StateResidency(model)
    new, old = data.draw(cuts(num_layers)), data.draw(cuts(num_layers))
    prices = residency.prices(residency.number(new), np.array([*residency.number(old), EMPTY]))
    cells = lcm(*(stage.num_devices for template in (new, old) for stage in template.stages))
    needs = [bytes_on(model, new, node, cells) for node in range(new.num_nodes)]
    has = [bytes_on(model, old, node, cells) for node in range(old.num_nodes)] + [{d: {} for d in range(DEVICES)}]
    assert prices.tolist() == [[price(model, n, h, cells) for h in has] for n in needs]


def test_equal_parts_have_one_number() -> None:
    residency = StateResidency(ModelProfile(layers=tuple(layer(i, [cost(1.0)], 1) for i in range(6))))
    assert residency.number(cut(2, 4, 6)).tolist() == [1, 2, 3]
    assert residency.number(cut(2, 6)).tolist() == [1, 4]
    assert residency.number(cut(2, 4, 6)).tolist() == [1, 2, 3]


def test_a_part_holds_the_states_of_all_its_stages_and_their_tied_ones() -> None:
    layers = [layer(i, [cost(1.0)], 1, owners=(0,) if i == 5 else ()) for i in range(6)]
    residency = StateResidency(ModelProfile(layers=tuple(layers)))
    numbers = residency.number(cut(1, 2, 4, 6, devices=2))
    assert residency.states(np.array([EMPTY, *numbers])).tolist() == [
        [False] * 6,
        [True, True, False, False, False, False],
        [True, False, True, True, True, True],
    ]
