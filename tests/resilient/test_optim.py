"""Optimizers over flat buffers are torch's own over separate parameters."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from resilient.models.layer import LayerSpec, WholeModel
from resilient.optim import SGD, AdamW, Optimizer, ParameterGroup, WarmupCosine, learning_rate, set_learning_rates
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from tests.resilient.small import TiedModel, assemble, draw, split_decay
from tests.resilient.state.test_layer_state import CPU

Reference = Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes torch's optimizer of trainable parameters by full name."""


def chosen(parameters: dict[str, torch.nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Return torch's groups as a user would write them down for ``GROUPS``, one for every parameter."""
    special = {
        "embed.weight": {"lr": 0.02, "weight_decay": weight_decay},
        "block.1.linear.weight": {"lr": 0.05, "weight_decay": 0.3},
        "block.1.linear.bias": {"lr": 0.05, "weight_decay": 0.3},
        "block.2.linear.bias": {"lr": lr, "weight_decay": 0.4},
        "head.shift": {"lr": 0.03, "weight_decay": 0.0},
    }
    default = {"block.2.linear.weight": {"lr": lr, "weight_decay": weight_decay}}
    return [{"params": [parameter], **(special | default)[name]} for name, parameter in parameters.items()]


GROUPS = (
    ParameterGroup("block.1.*", lr=0.05, weight_decay=0.3),
    ParameterGroup("*.bias", weight_decay=0.4),
    ParameterGroup("embed.*", lr=0.02),
    ParameterGroup("head.*", lr=0.03),
)


@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
         lambda p: torch.optim.AdamW(split_decay(p.values(), 0.1), lr=0.1, betas=(0.8, 0.9), eps=1e-6)),
        (AdamW(lr=0.1, weight_decay=0.1, groups=GROUPS), lambda p: torch.optim.AdamW(chosen(p, 0.1, 0.1))),
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p.values(), lr=0.1)),
        (SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
         lambda p: torch.optim.SGD(split_decay(p.values(), 0.1), lr=0.1, momentum=0.9, nesterov=True)),
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.1, groups=GROUPS),
         lambda p: torch.optim.SGD(chosen(p, 0.1, 0.1), momentum=0.9)),
    ],
    ids=["AdamW", "AdamW with groups", "SGD", "momentum", "momentum with groups"],
)  # fmt: skip
def test_flat_optimizer_equals_torch_on_parameters_when_rebuilt(optimizer: Optimizer, reference: Reference) -> None:
    model = TiedModel(num_blocks=3, frozen=["block.0"])
    states = fresh_states(model, optimizer)
    whole = assemble(model, seed=1, dtype=torch.float64)
    theirs = reference(
        {
            f"{name}.{entry.name}": whole.layer(name).get_parameter(entry.name)
            for name, state in states.items()
            for entry in state.layout.entries
            if entry.trainable
        }
    )
    ours = optimizer.build(states.values(), 0)
    for step in range(1, 7):
        if step in (3, 5):  # another worker takes over what was copied: buffers and version
            before, states = states, fresh_states(model, optimizer)
            for name, state in states.items():
                state.buffer.copy_(before[name].buffer)
            ours = optimizer.build(states.values(), step - 1)
        generator = torch.Generator().manual_seed(step)
        for parameter, window in paired(whole, states):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.clone()
            assert window.grad is not None
            window.grad.copy_(gradient)
        ours.step()
        theirs.step()
    for parameter, window in paired(whole, states):
        torch.testing.assert_close(window, parameter, rtol=1e-13, atol=1e-13)
    frozen = assemble(model, seed=1, dtype=torch.float64).layer("block.0")
    for name, parameter in frozen.named_parameters():
        assert torch.equal(states["block.0"].parameters[name], parameter)


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), SGD(lr=0.1)])
def test_nothing_of_the_compiler_is_imported(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    ours = optimizer.build(fresh_states(TiedModel(num_blocks=1), optimizer).values(), 0)
    for group in ours.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    ours.step()


def fresh_states(model: TiedModel, optimizer: Optimizer) -> dict[str, LayerState]:
    states = {
        spec.name: LayerState(spec, BufferLayout.of(spec, optimizer.rates), optimizer.slots, torch.float64, CPU)
        for spec in model.layers
    }
    for state in states.values():
        state.initialize(1)
    return states


def paired(whole: WholeModel, states: dict[str, LayerState]) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    return [
        (whole.layer(name).get_parameter(entry.name), state.parameters[entry.name])
        for name, state in states.items()
        for entry in state.layout.entries
        if entry.trainable
    ]


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9)])
def test_worker_without_trainable_parameters_has_an_optimizer_too(optimizer: Optimizer) -> None:
    built = optimizer.build([], 4)
    built.step()
    assert [each.numel() for group in built.param_groups for each in group["params"]] == [0]


def test_warmup_rises_and_cosine_falls_to_the_floor() -> None:
    optimizer = SGD(lr=2.0, lr_schedule=WarmupCosine(warmup_steps=4, total_steps=12, floor=0.1))
    rates = [learning_rate(optimizer, step) for step in (1, 2, 4, 8, 12, 99)]
    assert rates == pytest.approx([0.5, 1.0, 2.0, 1.1, 0.2, 0.2])
    assert learning_rate(SGD(lr=2.0), 7) == 2.0
    assert WarmupCosine(warmup_steps=0, total_steps=2)(1) == pytest.approx(0.5)


def test_schedule_multiplies_the_rate_of_every_group() -> None:
    schedule = WarmupCosine(warmup_steps=4, total_steps=12)
    optimizer = SGD(lr=2.0, lr_schedule=schedule, groups=[ParameterGroup("head.*", lr=0.4)])
    built = optimizer.build(fresh_states(TiedModel(num_blocks=1), optimizer).values(), 0)
    for step, factor in ((1, 0.25), (8, 0.5), (4, 1.0)):
        set_learning_rates(optimizer, built, step)
        assert sorted(group["lr"] for group in built.param_groups) == pytest.approx([0.4 * factor, 2.0 * factor])


def test_layer_lies_in_one_window_for_each_pair_of_rates() -> None:
    optimizer = AdamW(lr=0.1, weight_decay=0.2)
    spec = LayerSpec(
        name="layer",
        unit="llm",
        build=lambda: torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)),
        initialize=draw,
    )
    layout = BufferLayout.of(spec, optimizer.rates)
    assert [entry.name for entry in layout.entries] == [
        "0.weight", "0.bias", "1.bias", "2.bias", "1.weight", "2.weight"
    ]  # fmt: skip
    assert [(window.rates.weight_decay, window.start, window.stop) for window in layout.windows] == [
        (0.0, 0, 11), (0.2, 11, 23)
    ]  # fmt: skip
    assert len(BufferLayout.of(spec, AdamW(lr=0.1, weight_decay=0.0).rates).windows) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(lr=0.0), "lr must be > 0, got 0.0; pass a positive learning rate"),
        (lambda: SGD(lr=float("nan")), "lr must be > 0, got nan; pass a positive learning rate"),
        (lambda: AdamW(lr=1.0, weight_decay=-0.1), "weight_decay must be >= 0, got -0.1; pass 0.0 for none"),
        (lambda: ParameterGroup("vision.*", lr=-1e-5),
         "lr of ParameterGroup('vision.*') must be > 0, got -1e-05; pass a positive learning rate"),
        (lambda: ParameterGroup("vision.*", weight_decay=-1.0),
         "weight_decay of ParameterGroup('vision.*') must be >= 0, got -1.0; pass 0.0 for none"),
        (lambda: ParameterGroup("vision.*"),
         "lr or weight_decay of ParameterGroup('vision.*') must be given, got neither; write "
         "ParameterGroup('vision.*', lr=1e-5), say"),
        (lambda: SGD(lr=1.0, groups=[{"params": "vision.*"}]),  # pyright: ignore[reportArgumentType]
         "groups must hold ParameterGroups, got a dict; write "
         'groups=[resilient.ParameterGroup("vision.*", lr=1e-5)]'),
        (lambda: SGD(lr=1.0, nesterov=True), "momentum must be > 0 with nesterov, got 0.0; pass e.g. momentum=0.9"),
        (lambda: WarmupCosine(warmup_steps=5, total_steps=5),
         "warmup_steps must be in 0 .. total_steps - 1 = 4, got 5; warm up for fewer steps"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_schedule_of_the_learning_rate_is_refused_under_its_old_name(make: Callable[..., Optimizer]) -> None:
    message = (
        "schedule must be called lr_schedule, got WarmupCosine(warmup_steps=1, total_steps=9, floor=0.0); "
        f"write {make.__name__}(lr_schedule=...), the trainer's schedule is the pipeline's"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(lr=0.1, schedule=WarmupCosine(1, 9))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'shedule'"):
        make(lr=0.1, shedule=None)


def test_description_of_an_optimizer_survives_a_process_boundary() -> None:
    optimizer = AdamW(lr=0.1, lr_schedule=WarmupCosine(1, 9))
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert replace(optimizer, lr=0.2).lr_schedule == optimizer.lr_schedule
