"""Counts what an allocator gives and takes back while something runs, by the hooks that allocators have for that."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import torch
from torch.autograd.profiler import profile


def most_allocated(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that were in use at a time while something ran, beyond those in use before.

    It runs twice. On the CPU it counts what this thread allocates; 0 where the caller's own profiler does so: there can
    be but one.

    Args:
        run: It.
        device: Whose allocator counts.
    """
    run()  # what takes memory once takes it for all that comes
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it tells of every start and stop on stderr
    with profile(profile_memory=True) as profiler, _uncollected():
        run()
    results: Any = cast(Any, profiler).kineto_results  # its type is not declared
    events = [event for event in results.events() if event.name() == "[memory]"]
    given = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    ]  # what comes back: negative
    return max(accumulate(given), default=0)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Put off garbage collection: it would give back what was counted before, and is not to be missing now."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
