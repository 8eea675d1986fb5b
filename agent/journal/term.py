"""The terms of a run's coordinators: the number of who is in office, in the file ``term`` of the run's folder.

A coordinator claims a term of its own before it reads or writes anything of the run, and is in office until another
one claims the next. Whoever was stopped meanwhile and wakes up finds that out before it writes what it is told, and so
before it acts on it; agents refuse the connections of a lower term than they have seen. The lock is held for moments
only: one that is stopped in such a moment keeps others out, so they say whom to kill. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import ResilientError

if TYPE_CHECKING:
    from typing_extensions import Self

_LOCK_TIMEOUT_S = 10.0
_PAUSE_S = 0.05
_LIFE_S = 3.0
"""Some ticks of a coordinator, each of which shows life."""
_MOST_BYTES = 20
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What file systems say that have none: there the number alone has to do."""


class DeposedError(ResilientError):
    """Another coordinator has taken the job over: do nothing more for it, and leave its processes alone."""


class Term:
    """A coordinator's time in office.

    Args:
        file: Of the number, open for reading and writing.
        number: From 1 on; of two coordinators the later one's is higher.
        path: Of the file, for messages.
    """

    def __init__(self, file: int, number: int, path: Path) -> None:
        self.number = number
        self._file = file
        self._path = path

    @classmethod
    def claim(cls, run_directory: str | Path, *, after: int | None = None, number: int | None = None) -> Self:
        """Begin the next term; whoever was in office is not from now on.

        Args:
            run_directory: Folder of the run.
            after: The term that it must follow, so that of several who claim it only one does; None for any.
            number: What it is to be, higher than all before; None for the next.

        Raises:
            DeposedError: Another one has begun since ``after``, or has this number or a higher one.
            OSError: The file cannot be written.
            ResilientError: Somebody holds the lock, and does not go on.
        """
        path = Path(run_directory) / "term"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock_in_time(file, path)
            before = _read(file)
            number = before + 1 if number is None else number
            if number <= before or after not in (None, before):
                raise DeposedError(f"another coordinator is about to take this job over (term {before} in {path})")
            os.pwrite(file, f"{number}\n".encode(), 0)
            os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        fcntl.flock(file, fcntl.LOCK_UN)
        return cls(file, number, path)

    @contextmanager
    def in_office(self) -> Iterator[None]:
        """Do something that nobody may do who was deposed; no other begins its term meanwhile.

        Raises:
            DeposedError: Another one is in office.
        """
        _lock(self._file, fcntl.LOCK_SH)
        try:
            number = _read(self._file)
            if number != self.number:
                raise DeposedError(
                    f"another coordinator has taken this job over (term {number} in {self._path}, this one's is "
                    f"{self.number}); follow it with: resilient status --run {self._path.parent}"
                )
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def show_life(self) -> None:
        """Let those see that somebody leads the job who see the run's folder, but cannot reach this coordinator."""
        with contextlib.suppress(OSError):  # the disk is full
            os.utime(self._file)

    async def announce(self, address: str) -> None:
        """Tell where this coordinator listens, where else than in the run's folder nodes look for it: nowhere."""

    def close(self) -> None:
        """Do without the file from now on; the number stays. Said again, it does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def newest_term(run_directory: str | Path) -> int:
    """Return the term of who claimed the job last, 0 if nobody did."""
    try:
        return int((Path(run_directory) / "term").read_bytes() or b"0")
    except FileNotFoundError:
        return 0


async def shows_life(run_directory: str | Path) -> bool:
    """Return whether a coordinator is at work somewhere: after some seconds, as it shows that now and then."""
    path = Path(run_directory) / "term"
    before = _last_shown(path)
    await asyncio.sleep(_LIFE_S)
    return _last_shown(path) != before


def _last_shown(path: Path) -> int:
    try:
        with path.open("rb") as file:  # opened anew: network file systems look then
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _read(file: int) -> int:
    return int(os.pread(file, _MOST_BYTES, 0) or b"0")


def _lock(file: int, how: int) -> None:
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _lock_in_time(file: int, path: Path) -> None:
    give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() >= give_up_at:
            raise ResilientError(
                f"{path} must not be locked for long, got a lock held for {_LOCK_TIMEOUT_S:g} s: the coordinator "
                f"before is stopped; kill the process that {path.with_name('job.json')} names"
            )
        time.sleep(_PAUSE_S)
