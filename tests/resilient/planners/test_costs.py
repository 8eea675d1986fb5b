"""Curves, the backward of frozen parts, and how well measured times are predicted."""

from __future__ import annotations

import re
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.planners.costs import CostModel, Curve, LayerCurves, UnitCosts, UnitLayer
from resilient.planners.samples import Lengths

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
            curve = Curve.fit((64, 256, 1024), [times[tokens][part] for tokens in (64, 256, 1024)])
            errors += [abs(curve.call_ms(tokens, tokens**2) / times[tokens][part] - 1) for tokens in (128, 512)]
    assert statistics.mean(errors) <= 0.08


COEFFICIENTS = st.tuples(st.floats(1e-7, 1e-4), st.floats(1e-3, 1.0), st.floats(0, 5))


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
        "frozen must name units or layers, got ['sound']; known: ['llm', 'llm.block', 'llm.embed', 'llm.head', "
        "'vision', 'vision.block', 'vision.embed', 'vision.projector']"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MODEL.frozen(("sound",))
    message = "(tp, cp) of 'llm' must be one of ((1, 1),), got (2, 1); profile it, or choose another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MODEL.units[1].work(2, 1)
    message = "coefficients must be >= 0, got Curve(attention=-1.0, linear=0.0, fixed=0.0); fit the curve again"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Curve(attention=-1.0)
    message = "a curve needs three points or more with times > 0, got [1.0, 2.0] and [1.0, 2.0]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Curve.fit([1, 2], [1.0, 2.0])
