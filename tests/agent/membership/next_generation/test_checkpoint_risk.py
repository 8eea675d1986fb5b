from __future__ import annotations

from resilient.agent.membership.next_generation.checkpoint_risk import CheckpointRisk


def test_before_anything_is_seen_one_in_ten_expected_failures_is_too_much() -> None:
    risk = CheckpointRisk(failure_interval_s=3600.0)
    assert risk.interval_s(0.0, max_failures=1) == 36_000.0
    assert risk.interval_s(0.0, max_failures=0) == 3600.0


def test_what_is_seen_counts_as_much_as_what_was_expected() -> None:
    risk = CheckpointRisk(failure_interval_s=3600.0, since=100.0)
    assert risk.interval_s(3700.0, 1) == 72_000.0, "an hour without any"
    risk.note_failure(goes_back=False)
    assert risk.interval_s(3700.0, 1) == 3600.0 * 11
    risk.note_failure(goes_back=True)
    assert risk.interval_s(3700.0, 1) == 2400.0 * 12 / 2
    assert risk.interval_s(3700.0, 0) == 2400.0
