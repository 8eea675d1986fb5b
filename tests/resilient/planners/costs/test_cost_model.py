"""Curves, the backward of frozen parts, and how well measured times are predicted."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import COST_MODEL_VERSION, CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.search.partition import plan_templates

MEASURED = {
    "Llama": {
        64: (7.778, 7.428, 7.020),
        128: (12.982, 14.491, 12.504),
        256: (25.741, 28.506, 24.792),
        512: (52.744, 65.512, 44.640),
        1024: (117.064, 158.511, 88.390),
    },
    "SigLIP": {
        64: (7.282, 6.670, 6.721),
        128: (12.557, 12.839, 10.946),
        256: (23.857, 25.971, 20.232),
        512: (49.852, 62.580, 39.572),
        1024: (112.311, 160.168, 76.047),
    },
}
"""Forward, backward for inputs and for weights in ms, by tokens, of a block of transformers 512 wide in fp32 on one
core of a server: what ``benchmarks/cost_model.py --json`` printed."""


def test_fitted_curves_predict_measured_times_in_between() -> None:
    errors = list[float]()
    for times in MEASURED.values():
        for part in range(3):
            measured = [times[tokens][part] for tokens in (64, 256, 1024)]
            curve = Curve.fit((64, 256, 1024), measured, attention=part < 2)
            errors += [abs(curve.call_ms(tokens, tokens**2) / times[tokens][part] - 1) for tokens in (128, 512)]
    assert statistics.mean(errors) <= 0.08


COEFFICIENTS = st.tuples(st.floats(1e-7, 1e-4), st.floats(1e-3, 1.0), st.floats(0, 5))


@settings(deadline=None)
@given(coefficients=COEFFICIENTS, noise=st.lists(st.floats(-0.03, 0.03), min_size=5, max_size=5))
def test_fits_through_noise_are_not_negative_and_near_in_between(
    coefficients: tuple[float, float, float], noise: list[float]
) -> None:
    attention, linear, fixed = coefficients
    true = Curve(attention=attention, linear=linear, fixed=fixed)
    tokens = np.array([64, 256, 1024, 4096, 16384])
    times = true.of(Lengths.of(tokens)) + fixed
    fitted = Curve.fit(tokens, times * (1 + np.array(noise)))
    assert min(fitted.attention, fitted.linear, fitted.fixed) >= 0
    between = np.array([128, 512, 2048, 8192])
    predicted = fitted.of(Lengths.of(between)) + fitted.fixed
    actual = true.of(Lengths.of(between)) + fixed
    assert np.abs(predicted / actual - 1).mean() <= 0.08


def test_curves_without_attention_do_not_take_noise_for_it() -> None:
    tokens, times = [64, 256, 1024], [1.0, 4.0, 17.0]
    noisy, linear = Curve.fit(tokens, times), Curve.fit(tokens, times, attention=False)
    assert noisy.attention > 0
    assert linear.attention == 0
    assert linear.call_ms(16384, 16384**2) == pytest.approx(16384 / 64, rel=0.05)


@settings(deadline=None)
@given(coefficients=COEFFICIENTS, factor=st.floats(1, 16))
def test_calls_beyond_the_longest_are_predicted_by_the_same_curve(
    coefficients: tuple[float, float, float], factor: float
) -> None:
    attention, linear, fixed = coefficients
    true = Curve(attention=attention, linear=linear, fixed=fixed)
    fitted = Curve.fit([64, 256, 1024], [true.call_ms(x, x * x) for x in (64, 256, 1024)])
    longer = 1024 * factor
    assert fitted.call_ms(longer, longer**2) == pytest.approx(true.call_ms(longer, longer**2), rel=1e-4)


def test_calls_on_several_sequences_tell_attention_by_their_squares() -> None:
    true = Curve(attention=0.5, linear=3.0, fixed=7.0)
    calls = [[8], [2] * 8, [4, 9, 1], [1], [5, 5, 5, 5]]
    tokens, squares = [sum(each) for each in calls], [sum(x * x for x in each) for each in calls]
    times = [true.call_ms(*sums) for sums in zip(tokens, squares, strict=True)]
    fitted = Curve.fit(tokens, times, squares=squares)
    assert (fitted.attention, fitted.linear, fitted.fixed) == pytest.approx((0.5, 3.0, 7.0))


def test_errors_of_differences_are_relative_to_what_they_are_differences_of() -> None:
    tokens, whole = [1, 2, 4, 8], np.array([10.0, 20.0, 40.0, 80.0])
    times = whole / 2
    times[0] = -1e-9  # noise is as large as what was measured
    fitted = Curve.fit(tokens, times, relative_to=whole)
    assert fitted.call_ms(8, 64) == pytest.approx(40, rel=0.2)


def test_attention_stays_within_sequences() -> None:
    curve = Curve(attention=2.0, linear=3.0, fixed=5.0)
    packed = Lengths.of([[4, 6]])
    assert curve.of(packed).tolist() == [2 * (16 + 36) + 3 * 10]
    assert curve.call_ms(10, 52) == 2 * 52 + 30 + 5
    assert curve.call_ms(0, 0) == 0.0


def unit(name: str, *layers: str) -> UnitCosts:
    curves = LayerCurves(
        forward=Curve(linear=1.0), backward_input=Curve(linear=10.0), backward_weight=Curve(linear=100.0)
    )
    made = (UnitLayer(name=layer, curves=(curves,), parameter_bytes=2, optimizer_bytes=12, gradient_bytes=4)
            for layer in layers)  # fmt: skip
    return UnitCosts(name=name, layers=tuple(made))


VERSION = f'"version":{COST_MODEL_VERSION},'.encode()
MODEL = CostModel(units=(unit("vision", "embed", "block", "projector"), unit("llm", "embed", "block", "head")))


@pytest.mark.parametrize(
    ("frozen", "vision", "llm"),
    [
        ((), [100, 110, 110], [110, 110, 110]),
        (("vision",), [0, 0, 100], [110, 110, 110]),
        (("vision", "llm"), [0, 0, 100], [10, 10, 10]),
        (("vision", "vision.projector"), [0, 0, 0], [100, 110, 110]),
        (("vision", "vision.projector", "llm"), [0, 0, 0], [0, 0, 0]),
        (("vision", "vision.projector", "llm.embed"), [0, 0, 0], [0, 100, 110]),
        (("vision.embed", "llm"), [0, 100, 110], [10, 10, 10]),
        (("encoder", "llm"), [0, 0, 100], [10, 10, 10]),
        (("encoder", "projector"), [0, 0, 0], [100, 110, 110]),
    ],
)
def test_only_the_backward_that_something_needs_is_run(
    frozen: tuple[str, ...], vision: list[float], llm: list[float]
) -> None:
    costs = MODEL.frozen(frozen)
    assert [layer.backward(0).linear for layer in costs.units[0].layers] == vision
    assert [layer.backward(0).linear for layer in costs.units[1].layers] == llm
    bytes_ = [layer.optimizer_bytes + layer.gradient_bytes for each in costs.units for layer in each.layers]
    assert bytes_ == [16 * layer.trainable for each in costs.units for layer in each.layers]


def test_encoders_do_not_wait_for_each_other() -> None:
    costs = CostModel(units=(unit("vision", "block"), unit("audio", "block"), unit("llm", "block"))).frozen(())
    assert [layer.input_gradient for each in costs.units for layer in each.layers] == [False, False, True]


def test_what_is_wrong_is_named() -> None:
    message = (
        "frozen must name units (vision, llm, encoder, projector) or layers (such as vision.embed), got '', 'sound'; "
        "see their spelling"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MODEL.frozen(("sound", "llm", ""))
    message = "frozen must name units (llm) or layers (such as llm.head), got 'encoder'; see their spelling"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CostModel(units=(unit("llm", "head"),)).frozen(("encoder",))
    message = "(tp, cp) of 'llm' must be one of ((1, 1),), got (2, 1); profile it, or choose another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MODEL.units[1].work(2, 1)


@pytest.mark.parametrize("attention", [-1.0, float("nan"), float("inf")])
def test_coefficients_are_numbers_from_0_on(attention: float) -> None:
    message = (
        f"coefficients must be >= 0 and finite, got Curve(attention={attention}, linear=0.0, fixed=0.0); fit the curve "
        f"again"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Curve(attention=attention)


@pytest.mark.parametrize(
    ("tokens", "times"),
    [([1, 2], [1.0, 2.0]), ([1, 2, 3], [1.0, 2.0]), ([1, 2, 2], [1.0, 2.0, 2.0]), ([0, 1, 2], [1.0, 2.0, 3.0])]
    + [([1, 2, 3], [1.0, 2.0, time]) for time in (0.0, float("nan"), float("inf"))],
)
def test_curves_need_three_lengths_with_times(tokens: list[int], times: list[float]) -> None:
    message = (
        f"a curve must be fitted to three lengths or more with times > 0, got {[float(each) for each in tokens]} and "
        f"{times}; measure them again"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Curve.fit(tokens, times)


def test_curves_are_not_fitted_to_what_is_no_number() -> None:
    with pytest.raises(ValueError, match=r"^a curve must be fitted to three lengths or more with times > 0, got "):
        Curve.fit([1, 2, 3], [1.0, float("nan"), 2.0], relative_to=[1.0, 2.0, 3.0])


def test_cost_models_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    MODEL.save(path)
    assert CostModel.load(path) == MODEL
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]
    elsewhere = replace(MODEL, source="measured on another day")
    elsewhere.save(path)
    assert CostModel.load(path).source == "measured on another day"
    assert elsewhere.digest == MODEL.digest != MODEL.frozen(("llm",)).digest


OTHER, AGAIN = "a cost model must be what was written as one, got other data", "derive or profile it again"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (VERSION, b'"version":1,', f"a cost model must be of version {COST_MODEL_VERSION}, got 1; {AGAIN}"),
        (VERSION, b"", f"{OTHER} (Object missing required field `version`); {AGAIN}"),
        (b'"units":', b'"unit":', f"{OTHER} (Object missing required field `units` - at `$.costs`); {AGAIN}"),
        (b'"linear":1.0', b'"linear":null', f"{OTHER} (Expected `float`, got `null` - at "
         f"`$.costs.units[0].layers[0].curves[0].forward.linear`); {AGAIN}"),
        (b'"linear":1.0', b'"linear":-1.0', f"{OTHER} (coefficients must be >= 0 and finite, got Curve(attention=0.0, "
         "linear=-1.0, fixed=0.0); fit the curve again - at `$.costs.units[0].layers[0].curves[0].forward`); "
         f"{AGAIN}"),
        (MODEL.to_json()[99:], b"", f"{OTHER} (Input data was truncated); {AGAIN}"),
    ],
)  # fmt: skip
def test_other_files_are_no_cost_models(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(MODEL.to_json().replace(old, new, 1))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}$"):
        CostModel.load(path)


def published(name: str, num_layers: int, forward_ms: float, input_ms: float, weight_ms: float) -> UnitCosts:
    """Equal layers and what is at the end, by the times of one call on 1000 tokens."""

    def layer(name: str, count: int, *times_ms: float) -> UnitLayer:
        forward, backward_input, backward_weight = (Curve(linear=time / count / 1000) for time in times_ms)
        curves = LayerCurves(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
        return UnitLayer(name=name, curves=(curves,))

    blocks = [layer(f"block.{each}", num_layers, forward_ms, input_ms, weight_ms) for each in range(num_layers)]
    last = layer("projector", 1, 0.1, 0.5, 0.5) if name == "vision" else layer("head", 1, 0.1, 0.1, 0.1)
    return UnitCosts(name=name, layers=(*blocks, last))


# Cornstarch's table: forward and backward of encoder and language model, 44/121 and 140/376 ms with all trained, 44/0.5
# and 138/285 ms with the projector alone. Of the language model's backward 285 ms are for its inputs, then.
PUBLISHED = CostModel(units=(published("vision", 32, 44, 60, 61), published("llm", 32, 140, 285, 91)))


@pytest.mark.parametrize(
    ("frozen", "vision", "llm"), [((), (44, 121), (140, 376)), (("encoder", "llm"), (44, 0.5), (138, 285))]
)
def test_backwards_with_frozen_parts_are_those_that_were_published(
    frozen: tuple[str, ...], vision: tuple[float, float], llm: tuple[float, float]
) -> None:
    for each, expected in zip(PUBLISHED.frozen(frozen).units, (vision, llm), strict=True):
        times = [float(times_ms.sum()) for times_ms in each.layer_ms(1000, 0)]
        assert times == pytest.approx(expected, rel=0.02)


def stages(costs: CostModel) -> list[tuple[int, int]]:
    """Return the layers of each stage that the template planner makes of one node of eight devices."""
    layers: list[LayerProfile] = []
    for each in costs.units:
        for layer in each.layers:
            curves = layer.curves[0]
            times = (curves.forward, curves.backward_input, curves.backward_weight)
            forward, backward_input, backward_weight = (curve.call_ms(1000, 0) for curve in times)
            cost = LayerCost(forward_ms=forward, backward_input_ms=backward_input, backward_weight_ms=backward_weight)
            layers.append(
                LayerProfile(
                    name=f"{each.name}.{layer.name}",
                    costs=(cost,),
                    trainable=layer.trainable,
                    input_gradient=layer.input_gradient,
                )
            )
    problem = PlanningProblem(
        profile=ModelProfile(layers=tuple(layers)),
        num_microbatches=16,
        cluster=Cluster(devices_per_node=8),
        max_failures=0,
        min_pipeline_nodes=1,
    )
    ((template,),) = plan_templates(problem, 1).layouts
    return [(stage.first_layer, stage.end_layer) for stage in template.stages]


def test_the_template_planner_cuts_by_what_frozen_parts_run() -> None:
    frozen = PUBLISHED.frozen(("encoder", "llm"))
    times_ms = np.concatenate([sum(each.layer_ms(1000, 0)) for each in frozen.units])
    aware, unaware = (
        [times_ms[first:end].sum() for first, end in stages(costs)] for costs in (frozen, PUBLISHED.frozen(()))
    )
    # Seven devices for the 32 blocks; as if everything were trained the encoder, which needs one, has two of the eight.
    block_ms = (140 + 285) / 32
    assert (max(aware), max(unaware)) == (pytest.approx(5 * block_ms), pytest.approx(6 * block_ms))
