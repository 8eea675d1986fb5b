"""Both parts of a backward give what the whole gives, and compute no more than the whole does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from resilient.pipeline.backward_split import differentiate_inputs

Forward = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Scaled(torch.autograd.Function):
    """x times w, written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w, grads[0] * x


class Case(nn.Module):
    """Parts that the cases put together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.table = nn.Embedding(4, 4, dtype=torch.float64)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, dtype=torch.float64)


def chain(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [m.c(m.norm(torch.tanh(m.b(torch.relu(m.a(x))))))]


def attention(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [m.attention(m.attention.norm1(x))]  # norm1 is used twice


def used_twice_in_a_row(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [m.a(torch.tanh(m.a(x)))]


def used_twice_side_by_side(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [m.a(x) + m.a(2 * y)]


def used_thrice_behind_more(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    def scaled(x: Tensor) -> Tensor:
        return functional.linear(x, torch.cat([m.a.weight[:2] * m.scale, m.b.weight[2:].exp()]), m.scale)

    return [scaled(m.a(torch.tanh(scaled(m.norm(x))))), scaled(y)]


def made_once_used_twice(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    matrix = m.a.weight * m.scale
    return [torch.tanh(x @ matrix) @ matrix * m.b(y)]


def one_way_to_it_leads_to_the_other(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    for _ in range(2):
        scale = m.scale.exp()
        x = torch.addcmul(torch.tanh(x), scale, 2 * scale)
    return [x * y]


def hooked(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    matrix = m.b.weight.exp()
    made = [m.a(x), m.a(y), m.norm(x), m.norm(y)]
    for each in [matrix, *made]:
        each.register_hook(lambda grad: 0.5 * grad)
    return [torch.tanh(made[0] @ matrix + made[1]) @ matrix, made[2] * made[3]]


def used_here_and_aside(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [m.a(m.table(torch.arange(4))), m.a(m.a(x))]


def several_outputs(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    hidden = m.a(x)
    return [m.b(hidden), m.c(hidden), hidden, x]


def output_aside(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    aside = m.d(m.table(torch.arange(4)))
    return [aside, m.a(x)]


def aside_joins(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    aside = m.d(m.table(torch.arange(4)))
    return [aside, m.a(x) + aside, torch.tanh(aside) * y]


def written_in_python(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [Scaled.apply(m.a(Scaled.apply(x, m.scale.exp())), y)]  # pyright: ignore[reportReturnType]


def one_input_unused(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [m.a(y)]


def no_parameter(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [x * y]


def split_then_joined(m: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    q, k, v = functional.linear(x, torch.cat([m.a.weight, m.b.weight, m.c.weight])).chunk(3, dim=-1)
    return [torch.softmax(q @ k.T, -1) @ v * m.scale]


CASES = [
    chain, attention, used_twice_in_a_row, used_twice_side_by_side, used_thrice_behind_more, made_once_used_twice,
    one_way_to_it_leads_to_the_other, used_here_and_aside, several_outputs, output_aside, aside_joins,
    written_in_python, one_input_unused, no_parameter, split_then_joined, hooked,
]  # fmt: skip


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def in_two_parts(module: Case, forward: Any, received: Sequence[Tensor]) -> Sequence[Tensor | None]:
    outputs = forward(module, *received)
    weights = [torch.cos(output.detach()) for output in outputs]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients, deferred = differentiate_inputs(outputs, weights, received, parameters)
    assert all(parameter.grad is None for parameter in module.parameters()), "nothing but the inputs' in the first part"
    del outputs
    deferred.accumulate()
    return gradients


def at_once(module: Case, forward: Any, received: Sequence[Tensor]) -> Sequence[Tensor | None]:
    outputs = forward(module, *received)
    torch.autograd.backward(outputs, [torch.cos(output.detach()) for output in outputs])
    return [tensor.grad for tensor in received]


def named_gradients(module: Case) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("forward", CASES)
@pytest.mark.parametrize("frozen", ["", "a", "a.weight", "scale"])
def test_both_parts_together_are_the_whole(forward: Forward, frozen: str) -> None:
    split, whole = Case(), Case()
    for module in (split, whole):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
    torch.testing.assert_close(
        in_two_parts(split, forward, inputs()), at_once(whole, forward, inputs()), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(named_gradients(split), named_gradients(whole), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("hooked", ["a.weight", "a.bias"])
def test_what_hooks_on_parameters_make_of_gradients_counts_once(hooked: str) -> None:
    whole, split = Case(), Case()
    for module in (whole, split):
        module.get_parameter(hooked).register_hook(lambda grad: 0.5 * grad)
    at_once(whole, used_twice_in_a_row, inputs())
    in_two_parts(split, used_twice_in_a_row, inputs())
    torch.testing.assert_close(named_gradients(split), named_gradients(whole), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_both_parts_compute_no_more_than_the_whole(num_layers: int) -> None:
    """Of five layers, some are the same one."""

    def run(layers: nn.Sequential, *, split: bool) -> list[int]:
        received = torch.randn(2, 8, requires_grad=True)
        output = layers(received)
        flops: list[int] = []
        with FlopCounterMode(display=False) as counter:
            if split:
                _, deferred = differentiate_inputs([output], [output.detach()], [received], list(layers.parameters()))
                flops.append(counter.get_total_flops())
                deferred.accumulate()
            else:
                output.backward(output.detach())
            flops.append(counter.get_total_flops())
        return flops

    linear = [nn.Linear(8, 8) for _ in range(num_layers)]
    layers = nn.Sequential(*(part for i in range(5) for part in (linear[i % num_layers], nn.Tanh())))
    (whole,) = run(layers, split=False)
    assert run(layers, split=True) == [whole / 2, whole]


def test_function_written_in_python_runs_once() -> None:
    """It makes all its gradients whichever are asked for."""
    calls: list[int] = []

    class Counted(Scaled):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(len(calls))
            return Scaled.backward(ctx, *grads)

    module = Case()
    received = inputs()[0]
    output: Any = Counted.apply(received, module.scale)
    _, deferred = differentiate_inputs([output], [torch.ones_like(output)], [received], [module.scale])
    assert module.scale.grad is None
    deferred.accumulate()
    assert (module.scale.grad is not None, calls) == (True, [0])


def test_sums_can_start_at_each_parameter_and_microbatches_add_up() -> None:
    module = Case()
    final: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: final.append(name))
    later: list[Any] = []
    for _ in range(2):
        received = inputs()
        outputs = chain(module, *received)
        later.append(
            differentiate_inputs(outputs, [torch.ones_like(outputs[0])], received, list(module.parameters()))[1]
        )
    assert final == []
    later[0].accumulate()
    assert [name.partition(".")[0] for name in final] == ["c", "c", "norm", "norm", "b", "b", "a", "a"]
    once = {name: grad.clone() for name, grad in named_gradients(module).items() if grad is not None}
    later[1].accumulate()
    for name, grad in once.items():
        torch.testing.assert_close(module.get_parameter(name).grad, 2 * grad)


def test_without_inputs_all_is_left_for_the_second_part() -> None:
    module = Case()
    loss = module.a(module.table(torch.arange(4))).sum()
    gradients, deferred = differentiate_inputs([loss], [None], [], list(module.parameters()))
    assert gradients == ()
    assert module.a.weight.grad is None
    deferred.accumulate()
    assert module.a.weight.grad is not None
    assert module.table.weight.grad is not None


@pytest.mark.parametrize("frozen", [False, True])
def test_graph_is_free_where_the_second_part_needs_nothing_of_it(frozen: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()).double().requires_grad_(not frozen)
    received = inputs()[:1]
    inner = layers[:2](received[0])
    output = layers[2](inner)
    parameters = [parameter for parameter in layers.parameters() if parameter.requires_grad]
    _, deferred = differentiate_inputs([output], [output.detach()], received, parameters)
    kept = StorageWeakRef(inner.untyped_storage())
    del inner, output
    assert kept.expired() == frozen
    assert (not deferred.waiting) == frozen


def test_nothing_to_differentiate() -> None:
    received = inputs()
    gradients, deferred = differentiate_inputs([], [], received, list(Case().parameters()))
    assert gradients == [None, None]
    deferred.accumulate()
    assert differentiate_inputs([], [], [], [])[0] == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_lower_precision_is_split_too(dtype: torch.dtype | None) -> None:
    split, whole = Case().float(), Case().float()

    def forward(module: Case, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return [module.b(torch.relu(module.a(x.float())))]

    in_two_parts(split, forward, inputs())
    at_once(whole, forward, inputs())
    torch.testing.assert_close(named_gradients(split), named_gradients(whole))
