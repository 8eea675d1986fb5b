"""Processes that others have started."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether it has ended: as the child of a container's first process, which may reap nobody, it stays a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
