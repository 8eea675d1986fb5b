"""Times and recoveries read the same wherever they are printed."""

from __future__ import annotations

import pytest

from resilient.observability.wording import duration, lost_work, recovery_parts, three_digits

RECOVERY = {"detect_ms": 3.14, "agree_ms": None, "regroup_ms": 61.2, "copy_ms": 0.0, "redo_ms": 1320.0, "lost_steps": 1}


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [
        (0.0, "0 ms"),
        (0.1254, "0.125 ms"),
        (2.444, "2.44 ms"),
        (87.44, "87.4 ms"),
        (999.4, "999 ms"),
        (999.6, "1 s"),
        (1324.0, "1.32 s"),
        (39640.4, "39.6 s"),
        (1_234_567.0, "1235 s"),
    ],
)
def test_durations_have_three_digits(value_ms: float, text: str) -> None:
    assert duration(value_ms) == text


@pytest.mark.parametrize(("value", "text"), [(0.1254, "0.125"), (28.53, "28.5"), (999.7, "1000"), (39640.4, "39640")])
def test_numbers_in_columns_have_as_many(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_parts_that_are_not_known_are_left_out() -> None:
    assert recovery_parts(RECOVERY) == "detect 3.14 ms, regroup 61.2 ms, copy 0 ms, redo 1.32 s"


def test_steps_that_were_redone_are_counted() -> None:
    assert lost_work(RECOVERY) == "1 step redone"
    assert lost_work({"lost_steps": 0}) == "no work lost"
