"""Arguments of the wrong kind are named, with how to write what was probably meant."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from resilient.common.arguments import check_number, described, whole_number


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ("text", "'text'"),
        ([1, 2], "a list"),
        (np.ones(2), "an ndarray"),
        (ValueError(), "a ValueError"),
        (ValueError, "the class ValueError"),
        (torch.ones(2), "a Tensor"),
    ],
)
def test_a_value_is_told_in_a_few_words(value: object, words: str) -> None:
    assert described(value) == words


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_integers_of_all_kinds_are_taken(value: Any) -> None:
    taken = whole_number("x", value, 0, "fix it")
    assert (taken, type(taken)) == (3, int)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "be >= 0, got -1; fix it"),
        (True, "be a whole number >= 0, got True; fix it"),
        (None, "be a whole number >= 0, got None; fix it"),
        (2.0, "be a whole number >= 0, got 2.0; write 2"),
        (2.5, "be a whole number >= 0, got 2.5; fix it"),
        ("2", "be a whole number >= 0, got '2'; write 2"),
        ("two", "be a whole number >= 0, got 'two'; fix it"),
        ("2.5", "be a whole number >= 0, got '2.5'; fix it"),
        ("inf", "be a whole number >= 0, got 'inf'; fix it"),
        (torch.tensor(2.0), "be a whole number >= 0, got a Tensor; fix it"),
        ("-2", "be a whole number >= 0, got '-2'; fix it"),
    ],
)
def test_what_is_no_whole_number_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^x must {re.escape(message)}$"):
        whole_number("x", value, 0, "fix it")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(1)])
def test_numbers_of_all_kinds_are_taken(value: Any) -> None:
    check_number("x", value, "fix it")


@pytest.mark.parametrize(
    ("value", "or_zero", "message"),
    [
        (0, False, "be > 0, got 0; fix it"),
        (-1, True, "be >= 0, got -1; fix it"),
        (float("nan"), True, "be >= 0, got nan; fix it"),
        (float("inf"), False, "be > 0, got inf; fix it"),
        (False, True, "be a number >= 0, got False; fix it"),
        ("1e-3", False, "be a number > 0, got '1e-3'; write 1e-3"),
        ("a lot", False, "be a number > 0, got 'a lot'; fix it"),
        (torch.ones(1), False, "be a number > 0, got a Tensor; fix it"),
    ],
)
def test_what_is_no_number_in_range_is_named(value: Any, or_zero: bool, message: str) -> None:
    with pytest.raises(ValueError, match=f"^x must {re.escape(message)}$"):
        check_number("x", value, "fix it", or_zero=or_zero)
    if or_zero:
        check_number("x", 0, "fix it", or_zero=True)
