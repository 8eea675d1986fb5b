"""What forked processes do first: they die with their parent, and have files of their own. What processes die of."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat
import sys

_PR_SET_PDEATHSIG = 1
_MOST_FILES = 1 << 16
_CALLED = "import os, sys; sys.path[0] = os.path.dirname(sys.executable); from {} import main; sys.exit(main())"


def signal_name(number: int) -> str:
    """Return the name of a signal; a number where it has none, as those for real-time programs."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def command_for(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of a module of ours in a process of its own.

    Modules are looked for where a console script looks for them. ``python -m`` would look in the working folder first,
    into which others may have put something: it may be ``/tmp``.
    """
    return [sys.executable, "-c", _CALLED.format(module), *arguments]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, even when it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def allow_many_files() -> int:
    """Let this process have as many files open as the system lets it, within reason; return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
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
