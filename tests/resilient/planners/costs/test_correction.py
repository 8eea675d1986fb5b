"""Predictions that learn from measured times, and when learning stops and goes on."""

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
            replica=replica,
            tokens=tokens,
            predicted_ms=unit_ms * tokens,
            actual_ms=unit_ms * tokens * truth(unit, tokens),
        )
        for unit in ("vision", "llm")
        for replica, tokens in enumerate(draw.integers(100, 5000, 4).tolist())
    ]


def slow_kernel(unit: str, tokens: int) -> float:
    """Long calls of the encoder take a kernel that is half as fast."""
    return 2.0 if unit == "vision" and tokens >= 2048 else 1.0


def exact(unit: str, tokens: int) -> float:
    return 1.0


def after(correction: Correction, truth: Truth, num_steps: int, cost_ms: float = 0.5) -> Correction:
    for seed in range(num_steps):
        if correction.measures(seed):
            correction = correction.observe(step(truth, seed), cost_ms=cost_ms)
    return correction


def test_factors_become_actual_by_predicted() -> None:
    correction = after(UNCORRECTED, slow_kernel, 40)
    assert correction.factor("vision", 1, [3000]).tolist() == pytest.approx([2.0])
    assert correction.factor("vision", 1, [300]).tolist() == pytest.approx([1.0])
    assert correction.factor("llm", 1, [300, 3000]).tolist() == pytest.approx([1.0, 1.0])
    assert correction.factor("vision", 2, [3000]).tolist() == [1.0]
    assert correction.tracking
    assert correction.error < 0.05


def call(tokens: int, actual_ms: float) -> Observation:
    return Observation(unit="llm", tp=1, replica=0, tokens=tokens, predicted_ms=1.0, actual_ms=actual_ms)


def test_factors_are_moving_averages_of_steps() -> None:
    correction = Correction(weight=0.25)
    for actual_ms, average in [(3.0, 3.0), (1.0, 2.0), (5.0, 3.0), (3.0, 3.0), (7.0, 4.0), (0.0001, 3.000025)]:
        correction = correction.observe([call(64, actual_ms)], cost_ms=0.0)
        assert correction.factors["llm", 1, 12].value == pytest.approx(average)
    once = UNCORRECTED.observe([call(64, 1.0), call(70, 3.0)], cost_ms=0.0)
    assert once.factors["llm", 1, 12].value == 2.0
    assert once.factors["llm", 1, 12].num_steps == 1


def test_buckets_without_observations_take_the_nearest() -> None:
    correction = UNCORRECTED.observe([call(64, 2.0), call(1024, 4.0)], cost_ms=0.0)
    assert buckets([64, 256, 1024]).tolist() == [12, 16, 20]
    assert correction.factor("llm", 1, [1, 64, 256, 300, 512, 10**6]).tolist() == [2, 2, 2, 2, 4, 4]


def test_tracking_stops_when_it_brings_less_than_it_takes() -> None:
    never = after(UNCORRECTED, exact, UNCORRECTED.trial_steps - 1)
    assert never.tracking
    stopped = after(UNCORRECTED, exact, UNCORRECTED.trial_steps)
    assert not stopped.tracking
    assert stopped.benefit_ms == pytest.approx(0.0, abs=1e-9)
    assert stopped.cost_ms == pytest.approx(0.5)
    assert [number for number in range(200) if stopped.measures(number)] == [0, 50, 100, 150]
    # The same error is worth measuring when it is cheap, and not when it is dear.
    benefit = after(UNCORRECTED, slow_kernel, 60, cost_ms=1.0).benefit_ms
    assert benefit > 10
    assert after(UNCORRECTED, slow_kernel, 60, cost_ms=0.9 * benefit).tracking
    dear = after(UNCORRECTED, slow_kernel, 60, cost_ms=10 * benefit)
    assert not dear.tracking
    assert dear.factor("vision", 1, [3000])[0] > 1.9  # what was learnt stays


def test_a_common_factor_brings_nothing() -> None:
    """All of a machine half as fast: no assignment is changed by that."""
    correction = after(UNCORRECTED, lambda unit, tokens: 2.0, UNCORRECTED.trial_steps)
    assert correction.benefit_ms == pytest.approx(0.0, abs=1e-9)
    assert not correction.tracking
    assert correction.factor("llm", 1, [500]).tolist() == pytest.approx([2.0])


def test_tracking_goes_on_when_the_error_grows() -> None:
    stopped = after(UNCORRECTED, exact, UNCORRECTED.trial_steps)
    same = after(stopped, exact, 1000)
    assert not same.tracking
    assert same.factors == stopped.factors
    grown = after(stopped, slow_kernel, 51)
    assert grown.tracking
    learnt = after(grown, slow_kernel, 60)
    assert learnt.tracking
    assert learnt.error < 0.05
    assert learnt.factor("vision", 1, [3000])[0] == pytest.approx(2.0, abs=0.1)


def test_one_odd_step_does_not_turn_it_on() -> None:
    stopped = after(UNCORRECTED, exact, UNCORRECTED.trial_steps)
    odd = stopped.observe(step(lambda unit, tokens: 1.05 if unit == "llm" else 1.0), cost_ms=0.5)
    assert not odd.tracking
    assert odd.observe([], cost_ms=0.5) == odd


@given(seed=st.integers(0, 1000), noise=st.floats(0.0, 0.3), num_steps=st.integers(1, 30))
def test_learning_is_a_function_of_what_was_observed(seed: int, noise: float, num_steps: int) -> None:
    def once() -> Correction:
        draw = np.random.default_rng(seed)
        return after(UNCORRECTED, lambda unit, tokens: float(np.exp(draw.normal(0, noise))), num_steps)

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

    correction = after(UNCORRECTED, truth, 60, cost_ms=0.0)
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
        correction=after(UNCORRECTED, slow_kernel, 40),
    )
    np.testing.assert_allclose(corrected.sample_ms("vision", lengths), predicted * [1.0, 2.0])


def test_what_is_wrong_is_named() -> None:
    message = "times of 'llm' must be > 0 ms, got 1.0 predicted and 0.0 measured; leave out calls on nothing"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(64, 0.0)
    message = (
        "weight must be in (0, 1], trial_steps and probe_every >= 1 and growth >= 1, got 0.0, 20, 50 and 1.5; leave "
        "out what you have no reason to change"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Correction(weight=0.0)
