"""Layers wait for what their curves say, in forwards, backwards and both parts of split ones, and train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import torch

import resilient as rs
from resilient.data.dataset import Sample
from resilient.emulation import model as emulated
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.models.layer import Activations, Batch, WholeModel
from resilient.models.packing import why_padded
from resilient.pipeline.backward_split import differentiate_inputs
from resilient.profiling import layer_passes, profiler
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
    loss = model.loss(EmulatedModel(parts).collate(of))
    assert clock.time_s == pytest.approx(100 + (2 * vision + 2 * language) / 1e3)
    clock.time_s = 100.0
    loss.backward()
    # nothing that wants a gradient reaches the first layer, and none the language model's behind a frozen encoder
    inputs = language if frozen else vision + 2 * language
    weights = 2 * language if frozen else 2 * vision + 2 * language
    assert clock.time_s == pytest.approx(100 + (INPUT * inputs + WEIGHT * weights) / 1e3)


def test_parts_of_a_split_backward_take_what_the_curves_say(clock: FakeClock) -> None:
    parts, of = units(), samples(0, 1, 2)
    batch = EmulatedModel(parts).collate(of)
    model = assemble(EmulatedModel(parts), seed=0, dtype=torch.float64)
    received = model.layer("vision.0")({}, batch)["vision.features"].detach().requires_grad_()
    made = model.layer("vision.1")({"vision.features": received}, batch)
    sent = model.layer("llm.0")(made, batch)["llm.features"]
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
    assemble(EmulatedModel(parts), seed=0).loss(EmulatedModel(parts).collate(of)).backward()
    vision, language = (forward_ms(part, of) for part in parts)
    expected_ms = (1 + WEIGHT) * 2 * (vision + language) + INPUT * (vision + 2 * language)
    assert clock.time_s == pytest.approx(100 + expected_ms / 1e3)


def test_loss_is_that_of_its_samples_alone(clock: FakeClock) -> None:
    model, of = EmulatedModel(units()), samples(*range(12))
    assert any(len(sample["vision"]) == 0 for sample in of), "one without pictures"
    whole = assemble(model, seed=0, dtype=torch.float64)
    together, *alone = (whole.loss(model.collate(some)).item() for some in (of, *([each] for each in of)))
    assert together == pytest.approx(sum(alone), rel=1e-12)
    assert len(set(alone)) == 12


def made_of(whole: WholeModel, unit: str, cell: list[Sample], features: Activations) -> tuple[Activations, Batch]:
    """Return what a unit makes of a cell, given the features of others."""
    model = cast("EmulatedModel", whole.model)
    batch = model.collate_unit(unit, cell, [0] * len(cell))
    for spec in model.layers:
        if spec.unit == unit:
            features = whole.layer(spec.name)(features, batch)
    return features, batch


def test_units_with_cells_of_their_own_train_as_the_chain(clock: FakeClock) -> None:
    audio = EmulatedUnit(name="audio", num_layers=1, cost=CostCurve(token_ms=0.1), width=2)
    vision, language = units()
    parts = [vision, audio, language]
    model, dataset = EmulatedModel(parts), EmulatedDataset(parts, "heavy")
    assert model.units == {"vision": (), "audio": (), "llm": ("vision", "audio")}
    assert why_padded(model, dataset) is None
    whole = assemble(model, seed=0, dtype=torch.float64)
    of = [dataset[index] for index in range(9)]
    together = whole.loss(model.collate(of))
    made: dict[str, list[torch.Tensor]] = {}
    for unit in ("vision", "audio"):
        rows: list[torch.Tensor] = []
        for cell in (of[:4], of[4:], []):
            features, _ = made_of(whole, unit, cell, {})
            rows += features[f"{unit}.features"].split([sum(model.lengths(sample)[unit]) for sample in cell])
        made[f"{unit}.features"] = rows
    apart = torch.zeros((), dtype=torch.float64)
    for cell in ([8, 2, 5], [0, 1, 3, 4], [7, 6]):
        arrived = {name: torch.cat([rows[index] for index in cell]) for name, rows in made.items()}
        sent, batch = made_of(whole, "llm", [of[index] for index in cell], arrived)
        apart = apart + model.loss(sent, batch)
    assert apart.item() == pytest.approx(together.item(), rel=1e-12)
    parameters = list(whole.parameters())
    gradients = (torch.autograd.grad(loss, parameters) for loss in (together, apart))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_padded_microbatches_take_as_long_as_their_longest_segments(clock: FakeClock) -> None:
    parts, of = units(), samples(0, 1, 2)
    packed, padded = EmulatedModel(parts), EmulatedModel(parts, padded=True)
    segments = {
        part.name: [length for each in of for length in each[f"{part.name}_lengths"].tolist()] for part in parts
    }
    assert all(len(set(lengths)) > 1 for lengths in segments.values())
    assert [padded.collate_unit(part.name, of, [0, 0, 0])[f"{part.name}_lengths"].tolist() for part in parts] == list(
        segments.values()
    )
    model = assemble(padded, seed=0, dtype=torch.float64)
    loss = model.loss(padded.collate(of))
    times_ms = [2 * part.cost.forward_ms([max(segments[part.name])] * len(segments[part.name])) for part in parts]
    assert clock.time_s == pytest.approx(100 + sum(times_ms) / 1e3)
    assert loss == assemble(packed, seed=0, dtype=torch.float64).loss(packed.collate(of))
    assert packed.digest() != padded.digest()


def test_padded_microbatch_of_an_encoder_that_has_nothing_to_do(clock: FakeClock) -> None:
    sample = next(each for each in samples(*range(20)) if not len(each["vision_lengths"]))
    assert EmulatedModel(units(), padded=True).collate([sample])["vision_lengths"].tolist() == []


def test_language_cell_without_pictures_needs_no_features(clock: FakeClock) -> None:
    model = EmulatedModel(units())
    whole = assemble(model, seed=0, dtype=torch.float64)
    plain = next(sample for sample in samples(*range(12)) if not len(sample["vision"]))
    sent, batch = made_of(whole, "llm", [plain], {})
    assert model.loss(sent, batch).item() == whole.loss(model.collate([plain])).item()


def test_lengths_are_those_that_the_data_set_says() -> None:
    dataset, model = EmulatedDataset(units(), "heavy"), EmulatedModel(units())
    assert [model.lengths(dataset[index]) for index in range(9)] == [dataset.lengths(index) for index in range(9)]


def test_layers_are_profiled_as_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    device = clock.device()
    monkeypatch.setattr(emulated, "DEVICE", device)
    monkeypatch.setattr(layer_passes, "DEVICE", device)
    monkeypatch.setattr(layer_passes.time, "thread_time", lambda: 0.0)
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
