"""Parameters of any types, cut in any dimension, have their places in a layer's buffer, whole and in parts of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from resilient.errors import ArgumentError
from resilient.models.layer import LayerSpec, initialize_layer
from resilient.models.tensor_parallel.devices import part_bounds
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals
from resilient.templates.inputs.profile import LayerCost, LayerProfile
from tests.resilient.small import CPU, draw

SLOTS = ("first", "second")
OWN = (torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Given:
    """A parameter: its shape, its type where it is frozen (None: it is trained), and its cut dimension."""

    shape: tuple[int, ...]
    frozen: torch.dtype | None
    cut: int


@st.composite
def parameters(draw: st.DrawFn) -> Given:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    frozen = draw(st.sampled_from([None, None, torch.float32, torch.float64, *OWN]))
    return Given(shape, frozen, draw(st.integers(0, max(0, len(shape) - 1))))


LAYERS = st.lists(parameters(), max_size=5)


def spec_of(layer: list[Given]) -> LayerSpec:
    def build() -> nn.Module:
        module = nn.Module()
        for index, each in enumerate(layer):
            values = torch.empty(each.shape, dtype=each.frozen)
            module.register_parameter(f"p{index}", nn.Parameter(values, requires_grad=each.frozen is None))
        return module

    def initialize(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.copy_(torch.randint(0, 100, parameter.shape))

    cut = {f"p{index}": each.cut for index, each in enumerate(layer) if each.cut}
    return LayerSpec(name="layer", unit="llm", build=build, initialize=initialize, cut=cut)


def state_of(spec: LayerSpec, dtype: torch.dtype, held: ByteIntervals | None = None) -> LayerState:
    return LayerState(spec, BufferLayout.of(spec), SLOTS, dtype, CPU, held)


def filled(state: LayerState) -> LayerState:
    """Give each byte of the canonical buffer a value by its place."""
    places = [torch.arange(start, end) for start, end in state.held]
    state.bytes.copy_(torch.cat([torch.zeros(0), *places]) % 113)  # so that no element of a float is not a number
    return state


def same(one: Tensor, other: Tensor) -> bool:
    both = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*both)


def places(state: LayerState) -> dict[str, tuple[int, int, int]]:
    """Where each tensor starts and ends in a whole state's buffer, and the size of its elements."""
    first = state.bytes.data_ptr()
    return {
        name: (tensor.data_ptr() - first, tensor.data_ptr() - first + tensor.nbytes, tensor.itemsize)
        for name, tensor in state.tensors().items()
        if tensor.numel()
    }


@st.composite
def parts(draw: st.DrawFn, state: LayerState) -> ByteIntervals:
    """Some elements of each tensor, cut between elements."""
    held = NO_BYTES
    for start, end, itemsize in places(state).values():
        bounds = [draw(st.integers(0, (end - start) // itemsize)) for _ in range(draw(st.sampled_from([0, 2, 2, 4])))]
        for one, other in list(pairwise(sorted(bounds)))[::2]:
            held |= ByteIntervals.of(start + one * itemsize, start + other * itemsize)
    return held


@given(LAYERS, st.sampled_from([torch.float32, torch.float64]))
def test_every_byte_belongs_to_one_tensor_which_may_be_read_there(layer: list[Given], dtype: torch.dtype) -> None:
    spec = spec_of(layer)
    state = state_of(spec, dtype)
    found = sorted(places(state).values())
    assert [start for start, _, _ in found] == [0, *(end for _, end, _ in found)][: len(found)]
    assert (found[-1][1] if found else 0) == state.whole.size == len(state.bytes)
    assert all(start % itemsize == 0 for start, _, itemsize in found)
    for index, each in enumerate(layer):
        own = each.frozen in OWN
        assert state.parameters[f"p{index}"].dtype == (each.frozen if own else dtype)
        assert (f"optimizer/first/p{index}" in state.tensors()) == (each.frozen is None)
    trained = sum(torch.Size(each.shape).numel() for each in layer if each.frozen is None)
    assert (state.layout.num_trainable, state.grad.numel(), state.grad.dtype) == (trained, trained, dtype)


@given(LAYERS, st.sampled_from([torch.float32, torch.float64]), st.data())
def test_a_layer_has_its_values_and_shapes_whatever_is_cut(
    layer: list[Given], dtype: torch.dtype, data: st.DataObject
) -> None:
    spec = spec_of(layer)
    state = state_of(spec, dtype)
    state.initialize(seed=3)
    alone, module = initialize_layer(spec, 3, dtype), bind(spec, {"layer": state}, CPU)
    for name, expected in alone.named_parameters():
        assert same(module.get_parameter(name), expected)
        assert same(state.tensors()[name], expected)
    part = state_of(spec, dtype, data.draw(parts(state)))
    part.initialize(seed=3)
    assert torch.equal(part.bytes, state.held_bytes(part.held))


@given(LAYERS, st.sampled_from([torch.float32, torch.float64]), st.data())
def test_parts_are_saved_and_loaded_by_whoever_holds_what(
    layer: list[Given], dtype: torch.dtype, data: st.DataObject
) -> None:
    spec = spec_of(layer)
    whole = filled(state_of(spec, dtype))
    source = filled(state_of(spec, dtype, data.draw(parts(whole))))
    target = state_of(spec, dtype, data.draw(parts(whole)))
    target.load(source.tensors(), source.held)
    for start, end in target.held:
        there = source.held & ByteIntervals.of(start, end)
        assert torch.equal(target.held_bytes(there), source.held_bytes(there))
    again = state_of(spec, dtype)
    again.load(whole.tensors())
    assert torch.equal(again.bytes, whole.bytes)
    assert source.values(source.held).dtype is dtype
    counted = sum(tensor.numel() for tensor in source.tensors().values())
    assert source.values(source.held).numel() == counted


@given(LAYERS, st.sampled_from([torch.float32, torch.float64]), st.integers(1, 4), st.data())
def test_a_shard_is_an_interval_of_each_parameter(
    layer: list[Given], dtype: torch.dtype, degree: int, data: st.DataObject
) -> None:
    """Rows of the cut dimension, of the parameter and of what each slot has for it."""
    spec = spec_of(layer)
    whole = filled(state_of(spec, dtype))
    index = data.draw(st.integers(0, degree - 1))
    held, expected = NO_BYTES, dict[int, Tensor]()
    for name, (start, end, _) in places(whole).items():
        each = layer[int(name.rpartition("p")[2])]
        shape = each.shape or (1,)
        length = shape[each.cut]
        first, last = length * index // degree, length * (index + 1) // degree
        row = (end - start) // length
        held |= ByteIntervals.of(start + first * row, start + last * row)
        rows = whole.tensors()[name].view(shape).narrow(each.cut, first, last - first).movedim(each.cut, 0)
        expected[start] = rows.reshape(-1).view(torch.uint8)
    shard = filled(state_of(spec, dtype, held))
    assert torch.equal(shard.bytes, torch.cat([shard.bytes[:0], *(expected[start] for start in sorted(expected))]))


def test_training_a_cut_parameter_is_training_it() -> None:
    def spec(cut: dict[str, int]) -> LayerSpec:
        return LayerSpec(
            name="layer",
            unit="llm",
            build=lambda: nn.Linear(3, 4),
            initialize=draw,
            cut=cut,
        )

    plain, turned = (state_of(each, torch.float64) for each in (spec({}), spec({"weight": 1})))
    for state in (plain, turned):
        state.initialize(seed=1)
        module = bind(state.spec, {"layer": state}, CPU)
        module(torch.arange(6.0, dtype=torch.float64).view(2, 3)).pow(2).sum().backward()
        for window in state.windows:
            assert window.parameter.grad is not None
            window.parameter.data.sub_(0.1 * window.parameter.grad)
    for name, expected in plain.parameters.items():
        torch.testing.assert_close(turned.parameters[name], expected, rtol=1e-12, atol=1e-12)
    assert turned.parameters["weight"].is_contiguous() is False
    assert torch.equal(turned.buffer[:12].view(3, 4), turned.parameters["weight"].t())


@pytest.mark.parametrize("cut", [{"other": 0}, {"weight": 2}, {"weight": -1}])
def test_cut_of_what_is_not_there_is_refused(cut: dict[str, int]) -> None:
    spec = LayerSpec(name="layer", unit="llm", build=lambda: nn.Linear(2, 2), initialize=lambda _: None, cut=cut)
    message = (
        f"cut of layer 'layer' must give parameters of its own and a dimension of each, got {cut}; "
        "see the names and shapes of the layer's parameters"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        BufferLayout.of(spec)


def test_frozen_integers_of_64_bits_are_refused() -> None:
    message = (
        "frozen parameter 'p0' of layer 'layer' must have elements of at most 4 bytes, or be float64, got torch.int64; "
        "make it a buffer, or give it a smaller type"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        BufferLayout.of(spec_of([Given((2,), torch.int64, 0)]))


def parts_of(whole: LayerState, degree: int) -> list[ByteIntervals]:
    """Return what each of so many devices has of a state."""
    cost, rows = LayerCost(forward_ms=0.0), whole.layout.rows(len(SLOTS), whole.dtype.itemsize)
    layer = LayerProfile(name="layer", costs=(cost,), parameter_bytes=whole.whole.size, rows=rows)
    return [layer.part(index, degree) for index in range(degree)]


@given(LAYERS, st.integers(1, 4))
def test_tensor_parallel_devices_have_rows_of_what_is_cut_and_all_of_the_rest(layer: list[Given], degree: int) -> None:
    spec = spec_of(layer)
    whole = filled(state_of(spec, torch.float32))
    states = [state_of(spec, torch.float32, part) for part in parts_of(whole, degree)]
    for state in states:
        state.take(whole, state.held)
    for entry in whole.layout.entries:
        found, expected = [state.parameters[entry.name] for state in states], whole.parameters[entry.name]
        for index, each in enumerate(found):
            if entry.is_cut and entry.numel:
                first, end = part_bounds(entry.shape[entry.cut], degree)[index : index + 2]
                assert same(each, expected.narrow(entry.cut, first, end - first))
            else:
                assert same(each, expected)
        if entry.trainable:
            assert all(each.grad is not None and each.grad.shape == each.shape for each in found)
    for slot in SLOTS:  # those of the elements that are here
        assert all(len(state.slots[slot]) == len(state.grad) for state in states)


def test_part_of_a_layer_is_cut_with_all_its_parameters_that_have_the_dimension() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3), "upper": nn.Linear(3, 3)})

    layout = BufferLayout.of(
        LayerSpec(name="layer", unit="llm", build=build, initialize=draw, cut={"up": 0, "down": 1})
    )
    found = {entry.name: (entry.cut, entry.is_cut) for entry in layout.entries}
    assert found == {
        "up.weight": (0, True),
        "up.bias": (0, True),
        "down.weight": (1, True),
        "down.bias": (0, False),
        "upper.weight": (0, False),
        "upper.bias": (0, False),
    }
