"""What layers of units cost, by the lengths of packed samples: curves, bytes, and a mean microbatch's profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, SiglipVisionConfig

from resilient.data import Lazy
from resilient.emulation import model as emulated
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.errors import ArgumentError
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.planners.costs.curves import Curve
from resilient.profiling import layer_passes, unit_costs
from resilient.profiling.cache import job_unit_costs
from resilient.profiling.layer_passes import Run
from resilient.profiling.profiler import draw_samples, measure
from resilient.profiling.unit_cells import draw_lengths
from resilient.profiling.unit_costs import mean_profile, measure_units
from resilient.runtime.job import Job
from resilient.templates.inputs.cluster import Link
from tests.resilient.emulation.clocks import FakeClock
from tests.resilient.models.test_multimodal import TEXT, VISION
from tests.resilient.models.test_packing import make_sample
from tests.resilient.profiling.test_profiler import flops
from tests.resilient.small import make_job

HIDDEN, WIDTH, VOCABULARY, ITEM = VISION["hidden_size"], TEXT["hidden_size"], TEXT["vocab_size"], 8
NO_TIME = Link()
PROJECTOR = HIDDEN * WIDTH + WIDTH * WIDTH
"""Its matrices: the gradient of what enters the second one is always needed."""


class Pictures:
    """Up to two pictures, and some words; every third sample is text alone."""

    def __init__(self) -> None:
        self._loaded = 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = make_sample({"vision": [(1 + index % 3, 1 + index % 2)] * (index % 3)}, 1 + index % 9, seed=index)
        if "vision.pixels" in sample:
            sample["vision.pixels"] = [self._lazy(image) for image in sample["vision.pixels"]]
        return sample

    def num_targets(self, index: int) -> int:
        return 1 + index % 9

    def _lazy(self, image: Tensor) -> Lazy:
        def load() -> Tensor:
            self._loaded += 1
            return image

        return Lazy(load, tuple(image.shape), image.dtype)


def multimodal(language: Any = None, **frozen: bool) -> Job:
    encoder = EncoderModule(SiglipVisionConfig(**VISION), placeholder_id=3, frozen=frozen.get("vision", False))
    model = MultimodalModule(
        encoders={"vision": encoder},
        language_model=language or LlamaConfig(**{**TEXT, "max_position_embeddings": 64}),
        frozen_language_model=frozen.get("llm", False),
        labels="shifted",
    )
    return make_job(model=model, dataset=Pictures())


def measured(job: Job, timed: Callable[[Run], float] | None = flops, link: Link = NO_TIME) -> CostModel:
    return measure_units(job, draw_lengths(job), on_layer=lambda _: None, timed=timed, link=link)


Times = tuple[Curve, Curve, Curve]


def times(unit: UnitCosts) -> dict[str, Times]:
    found = {layer.name: layer.curves[0] for layer in unit.layers}
    return {name: (each.forward, each.backward_input, each.backward_weight) for name, each in found.items()}


def check_curve(curve: Curve, linear: float, attention: float = 0.0, fixed: float = 0.0) -> None:
    near = pytest.approx((linear, attention, fixed), rel=1e-6, abs=1e-6)
    assert (curve.linear, curve.attention, curve.fixed) == near


def test_times_of_packed_cells_become_curves() -> None:
    vision, language = measured(multimodal()).units
    for part in times(vision)["projector"]:
        check_curve(part, 2 * PROJECTOR)
    for part in times(language)["head"]:
        check_curve(part, 2 * WIDTH * VOCABULARY)
    forward, backward_input, backward_weight = times(vision)["embed"]
    check_curve(forward, 2 * 16 * HIDDEN)
    check_curve(backward_weight, 2 * 16 * HIDDEN)
    assert backward_input == Curve()
    assert [layer.name for layer in language.layers] == ["embed", "block.0", "block.1", "head"]
    assert (vision.degrees, vision.padded) == (((1, 1), (2, 1)), False)


def test_each_of_two_devices_takes_its_products_and_exchanges_and_keeps_what_it_needs() -> None:
    byte_ms = 10.0
    link = Link(bytes_per_s=1e3 / byte_ms)
    for unit, slow in zip(*(measured(multimodal(), link=each).units for each in (NO_TIME, link)), strict=True):
        for layer in unit.layers:
            alone, shared = layer.curves
            assert bool(shared.activation_bytes) == bool(alone.activation_bytes)
        block = next(layer for layer in unit.layers if layer.name == "block.0")
        alone, shared = block.curves
        assert 0.5 < shared.activation_bytes / alone.activation_bytes < 0.9, "what it gathers is whole"
        check_curve(shared.forward, alone.forward.linear / 2, alone.forward.attention / 2)
        check_curve(shared.backward_weight, alone.backward_weight.linear / 2)
        (paying,) = (layer.curves[1] for layer in slow.layers if layer.name == "block.0")
        # tokens are gathered and summed, for attention and for what follows it, and the other way round in backwards
        exchanged_ms = 2 * ITEM * (WIDTH if unit.name == "llm" else HIDDEN) * byte_ms
        pairs = ((paying.forward, shared.forward), (paying.backward_input, shared.backward_input))
        for with_exchanges, without in pairs:
            check_curve(with_exchanges, without.linear + exchanged_ms, without.attention)
        assert slow.layers[1].curves[0] == block.curves[0]


def test_planners_get_the_degrees_that_stages_may_have() -> None:
    costs = measured(multimodal())
    assert [unit.degrees for unit in costs.at_degrees([2, 4]).units] == [((2, 1),)] * 2
    assert costs.at_degrees([1, 2]) == costs
    with pytest.raises(ArgumentError, match=r"^degrees of 'vision' must be among \[1, 2\], got \[4\]; profile others$"):
        costs.at_degrees([4])


def test_bytes_are_those_of_layouts_and_of_what_cells_leave_behind() -> None:
    vision, language = measured(multimodal()).units
    assert (vision.boundary_bytes, vision.output_bytes) == (ITEM * HIDDEN, ITEM * WIDTH)
    assert (language.boundary_bytes, language.output_bytes) == (ITEM * WIDTH, 0.0)
    head = language.layers[-1]
    num = WIDTH * VOCABULARY + WIDTH
    assert (head.parameter_bytes, head.optimizer_bytes, head.gradient_bytes) == (ITEM * num, 2 * ITEM * num, ITEM * num)
    # the norm keeps what entered, widened and scaled, the matrix what the norm made, the loss the logits' exponents
    assert ITEM * (2 * WIDTH + VOCABULARY) <= head.curves[0].activation_bytes <= ITEM * (5 * WIDTH + 2 * VOCABULARY)


@pytest.mark.parametrize(
    ("frozen", "trainable", "input_gradient"),
    [
        ((), "1111 1111", "0111 1111"),
        (("vision",), "0001 1111", "0000 1111"),
        (("llm",), "1111 0000", "0111 1111"),
        (("vision", "llm"), "0001 0000", "0000 1111"),
    ],
)
def test_frozen_layers_pay_what_is_needed(frozen: Sequence[str], trainable: str, input_gradient: str) -> None:
    units = measured(multimodal(**dict.fromkeys(frozen, True))).units
    for name, expected in (("trainable", trainable), ("input_gradient", input_gradient)):
        found = ["".join(str(int(getattr(layer, name))) for layer in unit.layers) for unit in units]
        assert " ".join(found) == expected
    for layer in (layer for unit in units for layer in unit.layers):
        for curves in layer.curves:
            assert layer.trainable or (curves.backward_weight, layer.gradient_bytes) == (Curve(), 0)
            assert layer.input_gradient or curves.backward_input == Curve()
            assert layer.has_backward or curves.activation_bytes == 0
    entering = 0 if "vision" in frozen else HIDDEN * WIDTH
    check_curve(units[0].layers[-1].backward(0), 2 * (PROJECTOR + WIDTH * WIDTH + entering))


def drifting() -> Callable[[Run], float]:
    """A clock by which everything takes longer than what came before."""
    clock = count(1)

    def timed(run: Run) -> float:
        run()
        return float(next(clock))

    return timed


def test_equal_layers_are_measured_once_and_others_apart() -> None:
    config = Qwen2Config(
        **{**TEXT, "num_hidden_layers": 4, "max_position_embeddings": 64},
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    done: list[str] = []
    job = multimodal(config)
    vision, language = measure_units(job, draw_lengths(job), on_layer=done.append, timed=drifting()).units
    blocks = [times(language)[f"block.{index}"] for index in range(4)]
    assert blocks[0] == blocks[2] != blocks[1] == blocks[3]
    assert times(vision)["block.0"] == times(vision)["block.1"]
    assert done == [spec.name for spec in job.model.layers]


def test_pictures_are_loaded_once_and_random_draws_stay_the_scripts() -> None:
    job = multimodal()
    drawn = draw_lengths(job)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    assert job.dataset._loaded == 0  # pyright: ignore
    costs = measure_units(job, drawn, on_layer=lambda _: None)
    assert torch.equal(torch.rand(3), expected)
    assert 0 < job.dataset._loaded <= sum(index % 3 for index in range(30))  # pyright: ignore
    assert all(layer.curves[0].forward.call_ms(20, 400) > 0 for unit in costs.units for layer in unit.layers)
    assert costs.source == f"measured on {job.device_name}, fp64"


def emulated_job(monkeypatch: pytest.MonkeyPatch, parts: Sequence[EmulatedUnit]) -> Job:
    """A job on a device whose waits take no time, and whose computing takes none."""
    device = FakeClock().device()
    monkeypatch.setattr(emulated, "DEVICE", device)
    monkeypatch.setattr(layer_passes, "DEVICE", device)
    monkeypatch.setattr(layer_passes.time, "thread_time", lambda: 0.0)
    return make_job(model=EmulatedModel(parts), dataset=EmulatedDataset(parts, "heavy"))


CURVES = {
    "vision": CostCurve(fixed_ms=1.0, token_ms=0.02, backward_input=2.0, backward_weight=3.0),
    "audio": CostCurve(fixed_ms=2.0, square_ms=1e-4, backward_weight=0.5),
    "llm": CostCurve(fixed_ms=1.5, token_ms=0.01, square_ms=2e-5, backward_input=1.2, backward_weight=0.9),
}


def test_curves_of_emulated_units_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [EmulatedUnit(name=name, num_layers=2, cost=cost, width=4) for name, cost in CURVES.items()]
    costs = measured(emulated_job(monkeypatch, parts), timed=None)
    assert [unit.name for unit in costs.units] == ["vision", "audio", "llm"]
    for unit in costs.units:
        cost = CURVES[unit.name]
        for found in times(unit)["1"]:  # the second layer's: the first one's input wants no gradient
            factor = found.fixed / cost.fixed_ms
            check_curve(found, factor * cost.token_ms, factor * cost.square_ms, factor * cost.fixed_ms)
        factors = [found.fixed / cost.fixed_ms for found in times(unit)["1"]]
        assert factors == pytest.approx([1.0, cost.backward_input, cost.backward_weight])
        assert (unit.boundary_bytes, unit.output_bytes) == (ITEM * 4, ITEM * 4 * (unit.name != "llm"))


def test_mean_profile_has_the_times_of_the_mean_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [EmulatedUnit(name=name, num_layers=2, cost=cost, frozen=name == "audio") for name, cost in CURVES.items()]
    job = emulated_job(monkeypatch, parts)
    samples = draw_lengths(job).table
    profile = mean_profile(job, measured(job, timed=None), samples)
    assert [layer.name for layer in profile.layers] == [spec.name for spec in job.model.layers]
    mean_tokens: dict[str, float] = {}
    for layer in profile.layers:
        unit, _, index = layer.name.partition(".")
        cost, lengths = CURVES[unit], samples.units[unit]
        mean_tokens[unit] = tokens = job.microbatch * lengths.tokens.mean()
        forward_ms = cost.fixed_ms + cost.token_ms * tokens
        forward_ms += cost.square_ms * job.microbatch * lengths.squares.mean()
        backward_input = cost.backward_input if unit == "llm" or (unit == "vision" and index == "1") else 0.0
        backward_weight = cost.backward_weight * (unit != "audio")
        (found,) = layer.costs
        assert (found.forward_ms, found.backward_input_ms, found.backward_weight_ms) == pytest.approx(
            (forward_ms, backward_input * forward_ms, backward_weight * forward_ms), rel=1e-6
        )
        if layer.name == "llm.0":
            tokens = mean_tokens["vision"] + mean_tokens["audio"]
        expected_bytes = 0 if layer.name in ("vision.0", "audio.0") else round(ITEM * 8 * tokens)
        assert layer.input_bytes == expected_bytes


def test_mean_profile_holds_the_states_that_the_jobs_profile_holds() -> None:
    job = multimodal(LlamaConfig(**{**TEXT, "max_position_embeddings": 64, "tie_word_embeddings": True}), vision=True)
    found = mean_profile(job, measured(job), draw_lengths(job).table)
    padded = measure(job, job.layouts(), draw_samples(job), on_layer=lambda _: None, timed=flops)
    for one, other in zip(found.layers, padded.layers, strict=True):
        for name in ("name", "parameter_bytes", "optimizer_bytes", "gradient_bytes", "trainable", "shares"):
            assert getattr(one, name) == getattr(other, name)
    assert found.layers[-1].shares == ("llm.embed",)


def test_second_run_measures_no_units(empty_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    job = multimodal()
    first = job_unit_costs(job, draw_lengths(job), told.append)
    with monkeypatch.context() as patch:
        patch.setattr(unit_costs, "measure_units", None)
        assert job_unit_costs(job, draw_lengths(job), told.append) == first
    message = "profiling units vision, llm (first run of this model here)"
    assert told == [message]
    for other in (multimodal(vision=True), make_job(model=job.model, dataset=job.dataset, microbatch=4)):
        job_unit_costs(other, draw_lengths(other), told.append)
    assert told == [message] * 3
