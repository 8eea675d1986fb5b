"""What layers cost by their lengths, and what units cannot be."""

from __future__ import annotations

import re
from typing import Any

import pytest

import resilient as rs
from resilient.emulation.unit import CostCurve, EmulatedUnit


def test_attention_counts_within_segments() -> None:
    curve = CostCurve(fixed_ms=1.0, token_ms=0.5, square_ms=0.25)
    assert curve.forward_ms([4]) == 1.0 + 2.0 + 4.0
    assert curve.forward_ms([2, 2]) == 1.0 + 2.0 + 2.0


def test_nothing_costs_nothing() -> None:
    assert CostCurve(fixed_ms=1.0).forward_ms([]) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be >= 1, got 0; a layer has parameters, and tokens have numbers"),
        ({"num_parameters": 12}, "num_parameters must be a multiple of width (8), got 12; round it up"),
    ],
)
def test_unit_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.ArgumentError, match=f"^{re.escape(message)}$"):
        EmulatedUnit(**{"name": "llm", "num_layers": 1, "cost": CostCurve(), **changes})


def test_cost_that_cannot_be_is_refused() -> None:
    message = "token_ms must be >= 0, got -1.0; give a time, or a multiple of one"
    with pytest.raises(rs.ArgumentError, match=f"^{re.escape(message)}$"):
        CostCurve(token_ms=-1.0)
