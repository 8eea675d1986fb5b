"""Packed cells on tensor-parallel devices: losses and gradients are those of padded samples on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from transformers import PretrainedConfig

from resilient.data import collate_multimodal
from resilient.models.layer import Activations
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.generator import GeneratorModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.models.summed_loss import loss_behind
from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.optim import SGD
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.templates.common.byte_intervals import ByteIntervals
from tests.resilient.models.tensor_parallel.test_exchanges import on_devices
from tests.resilient.models.test_packing import make_sample, packed
from tests.resilient.pipeline.test_tensor_parallel import ENCODERS, FAMILIES, PLACEHOLDER
from tests.resilient.small import assemble, make_job, make_profile

WORDS: dict[int, int] = {3: PLACEHOLDER, PLACEHOLDER: 3, 19: 5}
"""Tokens of samples -> those of a smaller vocabulary, with another placeholder."""


def samples_of(*pictures: int) -> list[dict[str, Any]]:
    """Return a sample with each number of pictures, of two patches each but the first one's."""
    found = [
        make_sample({"vision": [(1, 1 + place % 2) for place in range(count)]}, 2 + seed, seed)
        for seed, count in enumerate(pictures)
    ]
    for sample in found:
        for entry in ("input_ids", "labels"):
            sample[entry] = torch.tensor([WORDS.get(token, token) for token in sample[entry].tolist()])
    return found


def check(model: MultimodalModule, samples: Sequence[dict[str, Any]], degree: int) -> None:
    job = make_job(model=model, optimizer=SGD(lr=0.1))
    profile, layouts = make_profile(job), job.layouts()
    expected = assemble(model, seed=job.seed, dtype=torch.float64)
    loss = expected.loss(collate_multimodal(samples))
    loss.backward()
    batch = packed(model, samples)
    initial = {spec.name: LayerState(spec, layouts[spec.name], (), job.dtype, job.device) for spec in model.layers}
    for state in initial.values():  # threads would draw from one generator
        state.initialize(job.seed)

    def work(devices: TensorDevices) -> tuple[float, dict[str, LayerState]]:
        states: dict[str, LayerState] = {}
        activations: Activations = {}
        losses: list[torch.Tensor] = []
        for spec, layer in zip(model.layers, profile.layers, strict=True):
            held = layer.part(devices.own(degree).start, degree)
            states[spec.name] = LayerState(spec, layouts[spec.name], (), job.dtype, job.device, held)
            states[spec.name].take(initial[spec.name], held)
            activations = bind(spec, states, job.device, devices)(activations, batch)
            taken, activations = loss_behind(model, len(states) - 1, activations, batch)
            losses += [] if taken is None else [taken]
        own = torch.stack(losses).sum()
        own.backward()
        return float(own.detach()), states

    found = on_devices(degree, work)
    assert sum(own for own, _ in found) == pytest.approx(float(loss.detach()), rel=1e-11)
    for spec in model.layers:
        total = torch.zeros(layouts[spec.name].num_trainable, dtype=torch.float64)
        for _, states in found:
            state = states[spec.name]
            for trained in state.held & state.segments[0]:
                first, end = (bound // total.element_size() for bound in trained)
                total[first:end] += torch.cat(state.gradients(ByteIntervals.of(*trained)))
        for entry in layouts[spec.name].entries:
            gradient = expected.layer(spec.name).get_parameter(entry.name).grad
            assert gradient is not None
            summed = total[entry.offset : entry.offset + entry.numel]
            torch.testing.assert_close(summed, entry.stored(gradient), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS.keys())
def test_encoders_of_packed_pictures(config: PretrainedConfig) -> None:
    encoder = EncoderModule(config, placeholder_id=PLACEHOLDER)
    model = MultimodalModule(encoders={"vision": encoder}, language_model=FAMILIES["llama, tied"], labels="shifted")
    check(model, samples_of(2, 0, 3), 2)


@pytest.mark.parametrize("family", ["mistral, with a window", "qwen3"])
@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_texts_of_packed_cells(family: str, labels: Literal["shifted", "unshifted"]) -> None:
    check(MultimodalModule(encoders={}, language_model=FAMILIES[family], labels=labels), samples_of(0, 0, 0), 2)


def test_cell_of_one_picture_of_one_patch_and_of_text_alone() -> None:
    """Of two devices one has no token of the picture; of the text alone there are no features."""
    encoder = EncoderModule(ENCODERS["siglip"], placeholder_id=PLACEHOLDER)
    model = MultimodalModule(encoders={"vision": encoder}, language_model=FAMILIES["llama"], labels="shifted")
    check(model, samples_of(1, 0), 2)


@pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS.keys())
@pytest.mark.parametrize("pictures", [(2, 0, 3), (1, 0), (0, 0)], ids=["several", "one of one patch", "none"])
def test_generator_of_packed_pictures(config: PretrainedConfig, pictures: tuple[int, ...]) -> None:
    generator = GeneratorModule(config, placeholder_id=PLACEHOLDER)
    model = MultimodalModule(
        encoders={}, language_model=FAMILIES["llama"], generators={"vision": generator}, labels="shifted"
    )
    check(model, samples_of(*pictures), 2)
