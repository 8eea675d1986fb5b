"""What a process that was forked does first, dies with its parent, has files of its own; and what processes die of."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat

_PR_SET_PDEATHSIG = 1
_MOST_OPEN = 1 << 16


def signal_name(number: int) -> str:
    """Return the name of a signal; a number where it has none, as those for real-time programs."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, even when it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def allow_open_files() -> int:
    """Have this process open as many files as the system lets it, from now on, up to 65536; return how many.

    Most systems begin with 1024, which is as few as the connections of a worker to a thousand others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_files_anew() -> None:
    """Open the files that this process has open once more, each at the place where it is.

    Of what a fork copies, the place is shared: whoever seeks or reads moves it for the parent and all its children.
    Standard streams and files that are only written stay as they are, and so does what cannot be opened again.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):
                _open_anew(number)


def _open_anew(number: int) -> None:
    flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
    if not stat.S_ISREG(os.fstat(number).st_mode) or flags & os.O_ACCMODE == os.O_WRONLY:
        return
    place, is_inherited = os.lseek(number, 0, os.SEEK_CUR), os.get_inheritable(number)
    anew = os.open(f"/proc/self/fd/{number}", flags)
    os.lseek(anew, place, os.SEEK_SET)
    os.dup2(anew, number, inheritable=is_inherited)
    os.close(anew)
