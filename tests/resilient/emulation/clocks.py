"""A clock that only sleeping moves on, for devices that are emulated in tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilient.emulation.device import EmulatedDevice


@dataclass
class FakeClock:
    """A device, and what it slept; each sleep lasts ``late_s`` too long.

    Args:
        late_s: By how much.
        time_s: What the clock shows.
    """

    late_s: float = 0.0
    time_s: float = 100.0
    slept_s: list[float] = field(default_factory=list)

    def device(self) -> EmulatedDevice:
        """Return a device of this clock."""
        return EmulatedDevice(now=lambda: self.time_s, sleep=self._sleep)

    def _sleep(self, duration_s: float) -> None:
        self.slept_s.append(round(duration_s, 9))
        self.time_s += duration_s + self.late_s
