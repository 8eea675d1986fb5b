"""The user's cache folder: what is kept there from one run to the next, and who makes it.

Nothing in it is needed: whoever uses it goes on without what cannot be written or read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder(kind: str) -> Path:
    """Return the folder of one kind of thing, in ``resilient`` of XDG_CACHE_HOME or of ``~/.cache``.

    A container's user may have no home: then it is a folder of the user's own among temporary files.
    """
    home = os.environ.get("HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else _among_temporary_files())
    return Path(cache) / "resilient" / kind


def _among_temporary_files() -> str:
    """Return a folder that nobody else can have put anything into; if somebody else has its name, one that is none."""
    folder = Path(tempfile.gettempdir()) / f"resilient-cache-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return str(folder)
    logger.warning("nothing is kept for later runs: HOME is not set, and %s is not this user's own", folder)
    return os.devnull


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
