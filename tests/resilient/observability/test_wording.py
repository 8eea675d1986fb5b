"""Times and recoveries read the same wherever they are printed."""

from __future__ import annotations

import pytest

from resilient.observability.wording import duration, exact_ms, lost_work, recovery_parts

RECOVERY = {"detect_ms": 3.14, "agree_ms": None, "regroup_ms": 61.2, "copy_ms": 0.0, "redo_ms": 1320.0, "lost_steps": 1}


@pytest.mark.parametrize(
    ("value_ms", "text"), [(0.0, "0.0 ms"), (2.44, "2.4 ms"), (87.4, "87 ms"), (999.0, "999 ms"), (1320.0, "1.32 s")]
)
def test_durations_are_as_exact_as_they_repeat(value_ms: float, text: str) -> None:
    assert duration(value_ms) == text


@pytest.mark.parametrize(("value_ms", "text"), [(0.125, "0.125"), (28.5, "28.5"), (39640.4, "39640")])
def test_simulated_times_have_four_digits(value_ms: float, text: str) -> None:
    assert exact_ms(value_ms) == text


def test_parts_that_are_not_known_are_left_out() -> None:
    assert recovery_parts(RECOVERY) == "detect 3.1 ms, regroup 61 ms, copy 0.0 ms, redo 1.32 s"


def test_steps_that_were_redone_are_counted() -> None:
    assert lost_work(RECOVERY) == "1 step redone"
    assert lost_work({"lost_steps": 0}) == "no work lost"
