"""Sets how this process's memory is allocated."""

from __future__ import annotations

import ctypes
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
