"""Sketches forgive the last bits, and show values that are others."""

from __future__ import annotations

import pytest
import torch

from resilient.state.sketch import NUM_SLICES, is_close, sketch

TYPES = (torch.float32, torch.float64)


def drawn(num_values: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("num_values", [0, 1, NUM_SLICES - 1, NUM_SLICES, NUM_SLICES + 1, 1000, 100 * NUM_SLICES + 7])
def test_every_value_is_summed_once(num_values: int) -> None:
    values = drawn(num_values, torch.float64)
    found = sketch(values)
    assert found.shape == (2, NUM_SLICES)
    expected = torch.stack((values.sum(), values.abs().sum()))
    torch.testing.assert_close(found.sum(1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TYPES)
def test_last_bits_may_differ(dtype: torch.dtype) -> None:
    values = drawn(10_000, dtype)
    integers = torch.int32 if dtype is torch.float32 else torch.int64
    rounded = (values.view(integers) ^ 1).view(dtype)
    assert not torch.equal(rounded, values)
    assert is_close(sketch(values), sketch(rounded), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_value_that_is_another_shows_beside_large_ones(dtype: torch.dtype) -> None:
    """Slots hold much smaller numbers than parameters do."""
    values = torch.cat((drawn(10_000, dtype), 1e-12 * drawn(10_000, dtype)))
    changed = values.clone()
    changed[15_000] *= 4
    assert not is_close(sketch(values), sketch(changed), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_value_that_is_no_number_shows(dtype: torch.dtype, wrong: float) -> None:
    values = drawn(1000, dtype)
    changed = values.clone()
    changed[500] = wrong
    assert not is_close(sketch(values), sketch(changed), dtype)


def test_what_some_devices_take_for_zero_is_close_to_it() -> None:
    tiny = torch.full((1000,), torch.finfo(torch.float32).tiny / 1000)
    assert is_close(sketch(tiny), sketch(torch.zeros(1000)), torch.float32)
