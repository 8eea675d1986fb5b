"""How long calls take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Call once, which may compile, then measure."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
