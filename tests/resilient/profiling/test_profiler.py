"""A profile says of each layer what it computes, keeps and sends, in a model that is never there as a whole."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, ViTConfig

from resilient.data import collate_multimodal
from resilient.errors import SampleError
from resilient.models.chain import Chain
from resilient.models.layer import Batch
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.profiling.layer_passes import Run, device_clock
from resilient.profiling.profiler import draw_samples, measure
from resilient.templates.inputs.profile import LayerProfile
from tests.resilient.small import CPU, TiedModel, Tokens, make_job

IN, OUT, MICROBATCH = 6, 10, 2


def flops(run: Run) -> float:
    """Count instead of timing: a matrix product of m x k by k x n is 2 m k n."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def one_ms(run: Run) -> float:
    """A clock by which everything takes as long."""
    run()
    return 1.0


def profile(timed: Callable[[Run], float] = flops, **changes: Any) -> dict[str, LayerProfile]:
    job = make_job(**changes)
    measured = measure(job, job.layouts(), draw_samples(job), on_layer=lambda _: None, timed=timed)
    return {layer.name: layer for layer in measured.layers}


def chain(*frozen: int) -> Chain:
    """Three matrices (with a tanh between) and a parameter that no matrix product needs."""

    def linear(index: int, num_in: int, num_out: int, *others: nn.Module) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(num_in, num_out), *others).requires_grad_(index not in frozen)

    layers = [linear(0, IN, OUT, nn.Tanh()), linear(1, OUT, OUT, nn.Tanh()), linear(2, OUT, 1)]
    return Chain(layers, lambda output, batch: (output - batch["target"]).square().sum())


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.full((IN,), float(index)), "target": torch.zeros(1)}


def times(layer: LayerProfile) -> tuple[float, float, float]:
    (cost,) = layer.costs
    return cost.forward_ms, cost.backward_input_ms, cost.backward_weight_ms


def test_times_are_those_of_forward_and_of_both_backwards() -> None:
    layers = profile(model=chain(), dataset=Points())
    first, middle, last = (2 * MICROBATCH * size for size in (IN * OUT, OUT * OUT, OUT))
    assert times(layers["layer.0"]) == (first, 0, first)
    assert times(layers["layer.1"]) == (middle, middle, middle)
    assert times(layers["layer.2"]) == (last, last, last)


@pytest.mark.parametrize(
    ("frozen", "trainable", "input_gradient"),
    [
        ((), "111", "011"),
        ((0,), "011", "001"),
        ((0, 1), "001", "000"),
        ((1,), "101", "011"),
        ((2,), "110", "011"),
        ((0, 1, 2), "000", "000"),
    ],
)
def test_frozen_layers_pay_what_is_needed_before_and_after_them(
    frozen: tuple[int, ...], trainable: str, input_gradient: str
) -> None:
    layers = list(profile(model=chain(*frozen), dataset=Points()).values())
    assert "".join(str(int(layer.trainable)) for layer in layers) == trainable
    assert "".join(str(int(layer.input_gradient)) for layer in layers) == input_gradient
    for layer, size in zip(layers, (IN * OUT, OUT * OUT, OUT), strict=True):
        forward = 2 * MICROBATCH * size
        assert times(layer) == (forward, forward * layer.input_gradient, forward * layer.trainable)
        assert layer.backward_ms() == forward * (layer.input_gradient + layer.trainable)


def test_bytes_are_those_of_states_carries_and_kept_activations() -> None:
    layers = profile(model=chain(1), dataset=Points(), precision="fp32")
    first, middle, last = layers.values()
    num = IN * OUT + OUT
    assert (first.parameter_bytes, first.optimizer_bytes, first.gradient_bytes) == (4 * num, 8 * num, 4 * num)
    assert (middle.parameter_bytes, middle.optimizer_bytes, middle.gradient_bytes) == (4 * (OUT * OUT + OUT), 0, 0)
    wide = 4 * MICROBATCH * OUT
    assert [layer.input_bytes for layer in layers.values()] == [0, wide, wide]
    # of the first one's matrix the microbatch; what its tanh makes it keeps, and the frozen matrix behind it does not
    costs = [layer.costs[0] for layer in (first, middle)]
    assert [cost.activation_bytes for cost in costs] == [4 * MICROBATCH * IN, 0]
    assert [(cost.entered_bytes, cost.given_bytes) for cost in costs] == [(0, wide), (wide, wide)]
    assert last.costs[0].activation_bytes >= wide
    # a gradient is made beside the one that it is added to
    assert first.costs[0].workspace_bytes >= 4 * IN * OUT
    assert middle.costs[0].workspace_bytes < 4 * OUT * OUT


def test_carries_that_want_no_gradient_travel_too_and_tied_parameters_belong_to_their_owner() -> None:
    layers = profile(model=TiedModel(num_blocks=2))
    tokens = 2 * 5
    assert layers["block.1"].input_bytes == tokens * (6 + 1) * 8
    assert layers["head"].parameter_bytes == 11 * 8
    assert layers["head"].shares == ("embed",)
    assert layers["embed"].shares == ()


@pytest.mark.parametrize(("frozen", "trainable"), [(["embed", "head"], False), (["head"], True), (["embed"], True)])
def test_tied_parameters_are_trained_where_their_owner_is(frozen: list[str], trainable: bool) -> None:
    assert profile(model=TiedModel(num_blocks=1, frozen=frozen))["head"].trainable is trainable


def two_encoders(**frozen: bool) -> MultimodalModule:
    def encoder(name: str, token: int) -> EncoderModule:
        config = ViTConfig(
            hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8,
            patch_size=4, num_channels=1,
        )  # fmt: skip
        return EncoderModule(
            config, placeholder_id=token, frozen=frozen[name], frozen_projector=frozen[f"{name}_projector"]
        )

    text = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=16, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    encoders = {"near": encoder("near", 3), "far": encoder("far", 4)}
    return MultimodalModule(encoders=encoders, language_model=text, frozen_language_model=frozen["llm"])


class Pairs:
    """One image for each encoder, of sizes that vary."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows = 1 + index % 2
        tokens = torch.tensor([1, *[3] * rows, 4, 7, 8])
        labels = torch.tensor([*[-100] * rows, -100, 7, 8, 2])
        return {
            "input_ids": tokens,
            "labels": labels,
            "near.pixels": torch.ones(1, 4 * rows, 4),
            "far.pixels": torch.ones(1, 4, 4),
        }

    def num_targets(self, index: int) -> int:
        return 3

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return collate_multimodal(samples)


ENCODERS = ["near", "near_projector", "far", "far_projector", "llm"]


def gradients(*frozen: str) -> tuple[set[str], set[str]]:
    """Return the layers whose input wants a gradient, and those that compute one for it."""
    model = two_encoders(**{name: name in frozen for name in ENCODERS})
    layers = profile(model=model, dataset=Pairs(), timed=one_ms).values()
    wanted = {layer.name for layer in layers if layer.input_gradient}
    # a backward takes 1 ms, whatever it is for
    computed = {layer.name for layer in layers if layer.costs[0].backward_input_ms}
    return wanted, computed


LLM = {"llm.embed", "llm.block.0", "llm.head"}
NEAR, FAR = ({f"{name}.block.0", f"{name}.projector"} for name in ("near", "far"))


@pytest.mark.parametrize(
    ("frozen", "wanted", "computed"),
    [
        ([], NEAR | FAR | LLM | {"far.embed"}, NEAR | FAR | LLM),
        (["far", "far_projector"], NEAR | FAR | LLM | {"far.embed"}, NEAR | LLM),
        (["near", "near_projector"], FAR | LLM, FAR | LLM),
        (["near", "far", "llm"], {"far.embed"} | FAR | LLM, LLM),
        (["near", "far", "near_projector", "far_projector"], LLM - {"llm.embed"}, LLM - {"llm.embed"}),
        (ENCODERS, set(), set()),
    ],
)
def test_an_encoder_hands_on_features_and_computes_no_gradient_for_them(
    frozen: list[str], wanted: set[str], computed: set[str]
) -> None:
    assert gradients(*frozen) == (wanted, computed)


def test_every_shape_counts_as_often_as_it_comes() -> None:
    class Lengths(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {name: value[: 2 + index % 3] for name, value in super().__getitem__(index).items()}

    samples = draw_samples(make_job(dataset=Lengths(), microbatch=1, global_batch=8))
    lengths = {sample.batch["tokens"].shape[1]: sample.count for sample in samples}
    assert len(lengths) > 1
    assert sum(lengths.values()) == 4
    block = profile(dataset=Lengths(), microbatch=1, global_batch=8)["block.1"]
    mean = sum(length * num for length, num in lengths.items()) / 4
    assert times(block) == (2 * 6 * 6 * mean,) * 3
    assert block.input_bytes == max(lengths) * (6 + 1) * 8


def test_the_median_of_the_rounds_counts() -> None:
    clock = count()

    def disturbed(run: Run) -> float:
        run()
        return 1000.0 if next(clock) % 5 == 4 else 1.0

    for layer in profile(timed=disturbed, model=TiedModel(num_blocks=1, frozen=["embed", "block.0"])).values():
        assert layer.costs[0].forward_ms == 1.0
        assert layer.backward_ms() in (0.0, 1.0)


def test_slow_layers_are_measured_less_often() -> None:
    num_runs = {}
    for run_ms in (0.1, 5.0, 5000.0):
        calls = count()

        def slow(run: Run, run_ms: float = run_ms, calls: Any = calls) -> float:
            run()
            next(calls)
            return run_ms

        profile(timed=slow, model=chain(0, 1, 2), dataset=Points())
        num_runs[run_ms] = next(calls) / 3
    assert num_runs == {0.1: 20, 5.0: 5, 5000.0: 1}


def test_the_clock_of_the_device_gives_positive_times_and_random_draws_stay_the_scripts() -> None:
    job = make_job(model=TiedModel(dropout=0.5))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    done: list[str] = []
    measured = measure(job, job.layouts(), draw_samples(job), on_layer=done.append)
    assert torch.equal(torch.rand(3), expected)
    assert all(layer.costs[0].forward_ms > 0 for layer in measured.layers)
    assert all(layer.backward_ms() > 0 for layer in measured.layers)
    assert done == [layer.name for layer in measured.layers]
    assert measured.tp_degrees == (1,)


def test_autocast_halves_what_is_sent() -> None:
    layers = {
        precision: profile(model=chain(), dataset=Points(), precision=precision) for precision in ("fp32", "bf16")
    }
    assert layers["bf16"]["layer.1"].input_bytes * 2 == layers["fp32"]["layer.1"].input_bytes


def test_sample_that_cannot_be_trained_on_is_named() -> None:
    job = make_job(dataset=Tokens(bad=7), microbatch=4, global_batch=16)
    with pytest.raises(SampleError, match=r"^sample 7 of Tokens: tokens must be < 11, got "):
        draw_samples(job)


def test_layers_are_there_one_at_a_time() -> None:
    alive: list[int] = []

    class Counted(nn.Linear):
        num = 0

        def __init__(self) -> None:
            super().__init__(IN, IN)
            if self.weight.device == CPU:
                type(self).num += 1
                alive.append(type(self).num)

        def __del__(self) -> None:
            if self.weight.device == CPU:
                type(self).num -= 1

    def loss(output: Tensor, batch: Batch) -> Tensor:
        return output.sum()

    profile(model=Chain([Counted] * 5, loss), dataset=Points())
    assert max(alive) <= 2, "the layer that is measured, and a copy while it gets its initial values"


def test_equal_layers_cost_the_same_however_the_measurement_is_disturbed() -> None:
    clock = count()

    def drifting(run: Run) -> float:
        run()
        return 1.0 + next(clock)

    layers = profile(timed=drifting, model=TiedModel(num_blocks=6, frozen=["block.4"]))
    same = [times(layers[f"block.{i}"]) for i in (0, 1, 2, 3, 5)]
    assert len(set(same)) == 1
    assert len({times(layer) for layer in layers.values()}) == 4, "embed, head and the frozen block are of other kinds"


@pytest.mark.parametrize(("num_threads", "expected_ms"), [(1, 20.0), (2, 3000.0)])
def test_a_single_thread_is_not_charged_for_what_others_do(
    num_threads: int, expected_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(time, "thread_time", iter([1.0, 1.02]).__next__)
    monkeypatch.setattr(time, "perf_counter", iter([5.0, 8.0]).__next__)
    assert device_clock(CPU)(lambda: None) == pytest.approx(expected_ms)


class Broken(nn.Linear):
    """Fails in its backward, as a layer may."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if output.requires_grad:
            output.register_hook(fail)
        return output


def fail(gradient: Tensor) -> Tensor:
    raise FloatingPointError("gradient is nan")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_layer_that_fails_while_it_is_measured_is_named() -> None:
    model = Chain([nn.Linear(IN, IN), Broken(IN, IN), nn.Linear(IN, 1)], lambda output, batch: output.sum())
    with pytest.raises(FloatingPointError) as raised:
        profile(model=model, dataset=Points())
    assert str(raised.value) == "gradient is nan"
    assert vars(raised.value)["__notes__"] == ["while measuring layer 'layer.1'"]


class Unused(nn.Module):
    """Has a matrix that it does not use, and may cut off what is before it."""

    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(OUT, OUT), nn.Linear(OUT, OUT)
        self.detaches = detaches

    def forward(self, hidden: Tensor) -> Tensor:
        return self.used(hidden.detach() if self.detaches else hidden)


@pytest.mark.parametrize("detaches", [False, True])
def test_what_no_gradient_reaches_is_told(detaches: bool, caplog: pytest.LogCaptureFixture) -> None:
    layers = [lambda: nn.Linear(IN, OUT), lambda: Unused(detaches=detaches), lambda: nn.Linear(OUT, 1)]
    model = Chain(layers, lambda output, batch: (output - batch["target"]).square().sum())
    profile(model=model, dataset=Points())
    unused = (
        "no gradient reaches module.unused.weight, module.unused.bias of layer 'layer.1', which weight decay shrinks "
        "all the same; freeze with requires_grad_(False) what is not to be trained"
    )
    cut = (
        "layer 'layer.1' passes no gradient back, so those before it are not trained; take out detach() or "
        "no_grad(), or freeze them with requires_grad_(False)"
    )
    assert caplog.messages == [unused, *([cut] if detaches else [])]


def test_models_that_are_trained_or_frozen_are_told_nothing_of(caplog: pytest.LogCaptureFixture) -> None:
    for frozen in [(), (0,), (1,), (0, 1), (2,)]:
        profile(model=chain(*frozen), dataset=Points())
    assert caplog.messages == []
