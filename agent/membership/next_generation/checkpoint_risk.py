"""How often a job needs a checkpoint, from the failures there were and those that are expected. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_SURVIVED = 10
"""Before any was seen: of so many failures, one takes more nodes at once than a job can survive."""


@dataclass(kw_only=True)
class CheckpointRisk:
    """Counts failures, and those after which the job went back to a checkpoint.

    Args:
        failure_interval_s: Expected time between two failures.
        since: When training began; None before that.
        failures: Those that were seen.
        fallbacks: Those of them that took the job back.
    """

    failure_interval_s: float
    since: float | None = None
    failures: int = 0
    fallbacks: int = 0

    def note_failure(self, *, goes_back: bool) -> None:
        """Take in a failure."""
        self.failures += 1
        self.fallbacks += goes_back

    def interval_s(self, now: float, max_failures: int) -> float:
        """Return the expected time between two failures that take the job back to a checkpoint.

        What is expected counts as one failure seen in that time, and as one of ten that redundancy was not enough for;
        without redundancy all are.

        Args:
            now: The time.
            max_failures: That the job survives at once.
        """
        observed_s = 0.0 if self.since is None else max(0.0, now - self.since)
        failure_interval_s = (self.failure_interval_s + observed_s) / (1 + self.failures)
        if not max_failures:
            return failure_interval_s
        return failure_interval_s * (_SURVIVED + self.failures) / (1 + self.fallbacks)
