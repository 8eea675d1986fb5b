"""Names the line of code that an error came from, as it is called on every machine."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_OTHERS = (*_LIBRARIES, str(Path(__file__).resolve().parent.parent))
"""Folders of code that is not the user's: Python's, installed packages, this one."""


def place_of(error: BaseException) -> str:
    """Return file and line of the innermost frame in the user's code or, where there is none, of all."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not file.startswith(_OTHERS)]
    return ":".join(map(str, (own or frames or [("", 0)])[-1]))
