"""The clock of an emulated device: waits that take no processor time, and whose errors do not add up."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_DEBT_S = 20e-3
"""A sleeper waits some ms for a core on a busy machine; who waits longer was stopped, and is not to catch up."""


class EmulatedDevice:
    """What a process computes on, by waiting. A wait that ends late makes the next one end earlier.

    Args:
        now: Seconds of a clock that never goes back.
        sleep: Sleeps so many seconds, or a little longer.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.now = now
        self.waited_s = 0.0
        self._sleep = sleep
        self._debt_s = 0.0

    def wait(self, duration_s: float, since: float) -> None:
        """Wait for the rest of something that takes ``duration_s`` and began at ``since``.

        ``waited_s`` grows by that rest, whatever the errors of the waits are.
        """
        rest_s = since + duration_s - self.now()
        self.waited_s += max(0.0, rest_s)
        deadline = since + duration_s - self._debt_s
        if (left_s := deadline - self.now()) > 0:
            self._sleep(left_s)
        self._debt_s = min(max(0.0, self.now() - deadline), _MOST_DEBT_S)


DEVICE = EmulatedDevice()
"""This process's."""
