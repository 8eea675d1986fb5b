"""The user's cache folder: what is kept there from one run to the next, and who makes it.

Nothing in it is needed: whoever uses it goes on without what cannot be written or read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder(kind: str) -> Path:
    """Return the folder of one kind of thing, in ``resilient`` of XDG_CACHE_HOME or of ``~/.cache``."""
    home = os.environ.get("HOME") or tempfile.gettempdir()  # a container's user may have none
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "resilient" / kind


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait until no other process of this machine makes the same file; the kernel lets go for those that die."""
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(file.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s is made without a lock, perhaps by several workers at once: %s", file, error)
        yield
