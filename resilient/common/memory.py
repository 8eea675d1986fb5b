"""Sets how this process's memory is allocated, and when garbage is looked for."""

from __future__ import annotations

import ctypes
import gc
import os

_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 512 << 20)}
"""Environment variable -> parameter of mallopt, value."""


def keep_freed_memory() -> None:
    """Have malloc keep what a step frees for the next one, unless the environment says otherwise.

    By default it gives tensors of the usual sizes back to the kernel, which hands them out again page by page: a third
    of the system time of a step of small microbatches. Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for variable, (parameter, value) in _SETTINGS.items():
        if mallopt is not None and variable not in os.environ:
            mallopt(parameter, value)


_MOST_NEW = 100_000
"""Objects: a hundred new connections make a third of that, forty times what Python looks for garbage at."""

_YOUNG = 1


class Sweeper:
    """Has garbage looked for when there is time, and hardly when there is none.

    Python looks at all objects there are whenever enough of them are new: with a thousand connections that takes as
    long as all else that becomes of a lost node. What is frozen it does not look at, and at what is new it looks later:
    most of that has gone by then.

    Args:
        every_s: Least time between two sweeps.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due_at = float("-inf")
        self._thresholds = gc.get_threshold()
        gc.set_threshold(_MOST_NEW, *self._thresholds[1:])

    def pass_time(self, now: float, *, is_calm: bool) -> None:
        """Freeze all there is; in calm times, free before what is garbage of it. Call every now and then.

        That is all garbage if it is time, and else only what has come since the last call: strangers can make much.

        Args:
            now: Seconds.
            is_calm: Nobody would wait for it.
        """
        if is_calm and now >= self._due_at:
            self._due_at = now + self._every_s
            gc.unfreeze()
            gc.collect()
        elif is_calm:
            gc.collect(_YOUNG)
        gc.freeze()

    def close(self) -> None:
        """Leave garbage to Python again."""
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)
