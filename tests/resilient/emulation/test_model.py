"""Layers wait for what their curves say, in forwards, backwards and both parts of split ones, and train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import resilient as rs
from resilient.data.dataset import Sample
from resilient.emulation import model as emulated
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.pipeline.backward_split import differentiate_inputs
from resilient.profiling import profiler
from resilient.testing import train_here
from tests.resilient.emulation.clocks import FakeClock
from tests.resilient.small import CPU, assemble, make_job

INPUT, WEIGHT = 2.0, 3.0
"""Both parts of a backward, in forwards."""


def units(*, frozen: bool = False) -> list[EmulatedUnit]:
    vision = CostCurve(fixed_ms=1.0, token_ms=0.01, backward_input=INPUT, backward_weight=WEIGHT)
    language = CostCurve(fixed_ms=2.0, square_ms=0.001, backward_input=INPUT, backward_weight=WEIGHT)
    return [
        EmulatedUnit(name="vision", num_layers=2, cost=vision, frozen=frozen),
        EmulatedUnit(name="llm", num_layers=2, cost=language, width=4, num_parameters=12),
    ]


def samples(*indices: int) -> list[Sample]:
    dataset = EmulatedDataset(units())
    return [dataset[index] for index in indices]


def forward_ms(unit: EmulatedUnit, of: list[Sample]) -> float:
    return unit.cost.forward_ms([length for sample in of for length in sample[f"{unit.name}_lengths"].tolist()])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Time of the devices of this process: computing takes none of it."""
    clock = FakeClock()
    monkeypatch.setattr(emulated, "DEVICE", clock.device())
    return clock


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_and_backward_take_what_the_curves_say(frozen: bool, clock: FakeClock) -> None:
    parts, of = units(frozen=frozen), samples(0, 1, 2)
    vision, language = (forward_ms(part, of) for part in parts)
    assert min(vision, language) > 0
    model = assemble(EmulatedModel(parts), seed=0, dtype=torch.float64)
    loss = model.loss(EmulatedDataset(parts).collate(of))
    assert clock.time_s == pytest.approx(100 + (2 * vision + 2 * language) / 1e3)
    clock.time_s = 100.0
    loss.backward()
    # nothing that wants a gradient reaches the first layer, and none the language model's behind a frozen encoder
    inputs = language if frozen else vision + 2 * language
    weights = 2 * language if frozen else 2 * vision + 2 * language
    assert clock.time_s == pytest.approx(100 + (INPUT * inputs + WEIGHT * weights) / 1e3)


def test_parts_of_a_split_backward_take_what_the_curves_say(clock: FakeClock) -> None:
    parts, of = units(), samples(0, 1, 2)
    batch = EmulatedDataset(parts).collate(of)
    model = assemble(EmulatedModel(parts), seed=0, dtype=torch.float64)
    received = model.layer("vision.0")({}, batch)["hidden"].detach().requires_grad_()
    sent = model.layer("llm.0")(model.layer("vision.1")({"hidden": received}, batch), batch)["hidden"]
    work = sum(forward_ms(part, of) for part in parts) / 1e3
    parameters = [model.layer(name).get_parameter("weight") for name in ("vision.1", "llm.0")]
    clock.time_s = 100.0
    (gradient,), rest = differentiate_inputs([sent], [torch.ones_like(sent)], [received], parameters)
    assert gradient is not None
    assert clock.time_s == pytest.approx(100 + INPUT * work)
    assert all(parameter.grad is None for parameter in parameters)
    rest.accumulate()
    assert clock.time_s == pytest.approx(100 + (INPUT + WEIGHT) * work)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in parameters)


def test_computing_is_part_of_what_a_layer_takes(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    tanh = torch.tanh

    def slow_tanh(values: torch.Tensor) -> torch.Tensor:
        def spend(_: object) -> None:
            clock.time_s += 1e-4

        spend(None)
        result = tanh(values)
        result.register_hook(spend)
        return result

    monkeypatch.setattr(torch, "tanh", slow_tanh)
    parts, of = units(), samples(0, 1, 2)
    assemble(EmulatedModel(parts), seed=0).loss(EmulatedDataset(parts).collate(of)).backward()
    vision, language = (forward_ms(part, of) for part in parts)
    expected_ms = (1 + WEIGHT) * 2 * (vision + language) + INPUT * (vision + 2 * language)
    assert clock.time_s == pytest.approx(100 + expected_ms / 1e3)


def test_loss_is_that_of_its_samples_alone(clock: FakeClock) -> None:
    dataset, of = EmulatedDataset(units()), samples(*range(12))
    assert any(len(sample["vision"]) == 0 for sample in of), "one without pictures"
    model = assemble(EmulatedModel(units()), seed=0, dtype=torch.float64)
    together, *alone = (model.loss(dataset.collate(some)).item() for some in (of, *([each] for each in of)))
    assert together == pytest.approx(sum(alone), rel=1e-12)
    assert len(set(alone)) == 12


def test_layers_are_profiled_as_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    device = clock.device()
    monkeypatch.setattr(emulated, "DEVICE", device)
    monkeypatch.setattr(profiler, "DEVICE", device)
    monkeypatch.setattr(profiler.time, "thread_time", lambda: 0.0)
    parts = units()
    job = make_job(model=EmulatedModel(parts), dataset=EmulatedDataset(parts, num_samples=2), global_batch=2)
    assert torch.get_num_threads() == 1
    profile = profiler.measure(job, job.layouts(), profiler.draw_samples(job), on_layer=lambda _: None)
    vision, language = (forward_ms(part, samples(0, 1)) for part in parts)
    costs = [layer.costs[0] for layer in profile.layers]
    assert [cost.forward_ms for cost in costs] == pytest.approx([vision, vision, language, language])
    assert [cost.backward_input_ms for cost in costs] == pytest.approx(
        [0.0, INPUT * vision, INPUT * language, INPUT * language]
    )
    assert [cost.backward_weight_ms for cost in costs] == pytest.approx(
        [WEIGHT * vision, WEIGHT * vision, WEIGHT * language, WEIGHT * language]
    )


def test_model_learns(clock: FakeClock, tmp_path: Path) -> None:
    parts = units()
    trainer = rs.Trainer(
        EmulatedModel(parts),
        EmulatedDataset(parts, num_samples=4),
        optimizer=rs.AdamW(lr=0.05),
        global_batch=4,
        microbatch=2,
        device=CPU,
    )
    _, losses = train_here(trainer, 5, directory=tmp_path)
    assert losses[5] < losses[1]


def test_models_of_other_units_have_other_digests() -> None:
    assert EmulatedModel(units()).digest() == EmulatedModel(units()).digest()
    assert EmulatedModel(units()).digest() != EmulatedModel(units(frozen=True)).digest()


def test_sample_of_other_units_is_named() -> None:
    message = "sample 3: must hold 'vision', got ['target']; train on an EmulatedDataset of the model's units"
    with pytest.raises(rs.SampleError, match=f"^{re.escape(message)}$"):
        EmulatedModel(units()).check({"target": torch.zeros(1)}, "sample 3")
