"""Predictions that learn from measured times."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.correction import UNCORRECTED, Correction, Observation, buckets
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import Lengths
from resilient.planners.planner import Setting
from resilient.templates.inputs.devices import cluster_of

Truth = Callable[[str, int], float]
"""What a call of that unit and length takes by what is predicted."""


def step(truth: Truth, seed: int = 0, *, unit_ms: float = 0.1) -> list[Observation]:
    """One call of each unit and replica on lengths of all magnitudes; predicted is so much a token."""
    draw = np.random.default_rng(seed)
    return [
        Observation(
            unit=unit,
            tp=1,
            tokens=tokens,
            predicted_ms=unit_ms * tokens,
            actual_ms=unit_ms * tokens * truth(unit, tokens),
        )
        for unit in ("vision", "llm")
        for tokens in draw.integers(100, 5000, 4).tolist()
    ]


def slow_kernel(unit: str, tokens: int) -> float:
    """Long calls of the encoder take a kernel that is half as fast."""
    return 2.0 if unit == "vision" and tokens >= 2048 else 1.0


def after(truth: Truth, num_steps: int) -> Correction:
    correction = UNCORRECTED
    for seed in range(num_steps):
        correction = correction.observe(step(truth, seed))
    return correction


def test_factors_become_actual_by_predicted() -> None:
    correction = after(slow_kernel, 40)
    assert correction.factor("vision", 1, [3000]).tolist() == pytest.approx([2.0])
    assert correction.factor("vision", 1, [300]).tolist() == pytest.approx([1.0])
    assert correction.factor("llm", 1, [300, 3000]).tolist() == pytest.approx([1.0, 1.0])
    assert correction.factor("vision", 2, [3000]).tolist() == [1.0]


def call(tokens: int, actual_ms: float) -> Observation:
    return Observation(unit="llm", tp=1, tokens=tokens, predicted_ms=1.0, actual_ms=actual_ms)


def test_factors_are_moving_averages_of_steps() -> None:
    correction = UNCORRECTED
    for actual_ms, average in [
        (3.0, 3.0),
        (1.0, 2.0),
        (5.0, 3.0),
        (7.0, 4.0),
        *6 * [(4.0, 4.0)],
        (14.0, 5.0),
        (5.0, 5.0),
    ]:
        correction = correction.observe([call(64, actual_ms)])
        assert correction.factors["llm", 1, 12].value == pytest.approx(average)
    once = UNCORRECTED.observe([call(64, 1.0), call(70, 3.0)])
    assert once.factors["llm", 1, 12].value == 2.0
    assert once.factors["llm", 1, 12].num_steps == 1


def test_buckets_without_observations_take_the_nearest() -> None:
    correction = UNCORRECTED.observe([call(64, 2.0), call(1024, 4.0)])
    assert buckets([64, 256, 1024]).tolist() == [12, 16, 20]
    assert correction.factor("llm", 1, [1, 64, 256, 300, 512, 10**6]).tolist() == [2, 2, 2, 2, 4, 4]


@given(seed=st.integers(0, 1000), noise=st.floats(0.0, 0.3), num_steps=st.integers(1, 30))
def test_learning_is_a_function_of_what_was_observed(seed: int, noise: float, num_steps: int) -> None:
    def once() -> Correction:
        draw = np.random.default_rng(seed)
        return after(lambda unit, tokens: float(np.exp(draw.normal(0, noise))), num_steps)

    correction = once()
    assert correction == once()
    values = [factor.value for factor in correction.factors.values()]
    assert min(values) > 0
    assert all(1 <= factor.num_steps <= num_steps for factor in correction.factors.values())


@settings(max_examples=30)
@given(seed=st.integers(0, 1000))
def test_corrected_predictions_are_nearer_than_fitted_ones(seed: int) -> None:
    draw = np.random.default_rng(seed)
    by_bucket = {(unit, bucket): draw.uniform(0.6, 1.8) for unit in ("vision", "llm") for bucket in range(40)}

    def truth(unit: str, tokens: int) -> float:
        return by_bucket[unit, int(buckets(tokens))] * draw.uniform(0.97, 1.03)

    correction = after(truth, 60)
    fresh = step(truth, 1000 + seed)
    errors = [
        (abs(each.predicted_ms * correction.factor(each.unit, 1, each.tokens) - each.actual_ms), each) for each in fresh
    ]
    assert sum(error for error, _ in errors) <= 0.1 * sum(each.actual_ms for each in fresh)


def test_settings_hand_corrected_times_to_planners() -> None:
    costs = derive_costs("qwen2-vl-7b", "h100")
    plain = Setting(costs=costs, cluster=cluster_of("h100", 8), num_nodes=1, global_batch=8, microbatch=1)
    lengths = Lengths.of(np.array([300, 3000]))
    predicted = plain.sample_ms("vision", lengths)
    np.testing.assert_allclose(predicted, costs.by_name["vision"].work().of(lengths))
    corrected = Setting(
        costs=costs,
        cluster=plain.cluster,
        num_nodes=1,
        global_batch=8,
        microbatch=1,
        correction=after(slow_kernel, 40),
    )
    np.testing.assert_allclose(corrected.sample_ms("vision", lengths), predicted * [1.0, 2.0])


def test_what_is_wrong_is_named() -> None:
    message = "times of 'llm' must be > 0 ms, got 1.0 predicted and 0.0 measured; leave out calls on nothing"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(64, 0.0)
