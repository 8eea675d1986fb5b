from __future__ import annotations

import math
import random

import pytest

from resilient.templates.common.checkpoint_interval import checkpoint_interval_s, checkpoint_steps


def lost_part(interval_s: float, cost_s: float, risk_s: float) -> float:
    """The part of the time that goes into checkpoints and into what is done again, if losses come by chance.

    Source: Daly (2006), equation 20, without the time of a restart: the mean time that work of a given length takes is
    M (exp((t + C) / M) - 1) for each t of it.
    """
    return 1 - interval_s / (risk_s * math.expm1((interval_s + cost_s) / risk_s))


@pytest.mark.parametrize(("cost_s", "risk_s"), [(1, 1e5), (10, 3600), (60, 3600), (300, 3600), (100, 300), (500, 300)])
def test_no_other_interval_loses_clearly_less(cost_s: float, risk_s: float) -> None:
    intervals = (10 ** (power / 200) for power in range(-200, 1200))
    best = min(lost_part(each, cost_s, risk_s) for each in intervals if each < 100 * risk_s)
    assert lost_part(checkpoint_interval_s(cost_s, risk_s), cost_s, risk_s) <= best + 0.002


def test_cheap_checkpoints_follow_youngs_formula() -> None:
    assert checkpoint_interval_s(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=1e-3)


def test_checkpoints_that_cost_more_than_two_intervals_of_losses_are_as_rare_as_these() -> None:
    assert checkpoint_interval_s(2e3, 1e3) == checkpoint_interval_s(9e9, 1e3) == 1e3


def test_steps_are_whole_and_at_least_one_and_there_are_none_where_nothing_is_lost() -> None:
    assert checkpoint_steps(50.0, 10_000.0, 100.0) == round(checkpoint_interval_s(50.0, 10_000.0) / 100)
    assert checkpoint_steps(0.0, 10_000.0, 100.0) == 1
    assert checkpoint_steps(50.0, math.inf, 100.0) is None


def test_simulated_losses_cost_as_much_as_the_formula_says() -> None:
    draw, cost_s, risk_s = random.Random(1), 20.0, 1000.0
    interval_s = checkpoint_interval_s(cost_s, risk_s)
    time_s = done_s = 0.0
    for _ in range(20_000):
        until_s = draw.expovariate(1 / risk_s)
        done_s += until_s // (interval_s + cost_s) * interval_s
        time_s += until_s
    assert 1 - done_s / time_s == pytest.approx(lost_part(interval_s, cost_s, risk_s), abs=0.005)
