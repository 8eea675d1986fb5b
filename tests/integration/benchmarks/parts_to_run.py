"""Parts of a benchmark that end in every way there is; without torch, so that their processes start at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.parts.gpu.part import Row, Setting, SkippedError


def good(setting: Setting) -> list[Row]:
    """Print, and measure."""
    print("of the part")  # noqa: T201
    return [Row(what="devices", value=setting.num_devices)]


def wanting(setting: Setting) -> list[Row]:
    """Say what is missing."""
    raise SkippedError("a library is missing")


def failing(setting: Setting) -> list[Row]:
    """Raise."""
    raise ValueError("first line\nsecond line")


def dying(setting: Setting) -> list[Row]:
    """End the process."""
    os._exit(7)


def hanging(setting: Setting) -> Iterator[Row]:
    """Measure, and then never end, nor what it starts."""
    yield Row(what="devices", value=setting.num_devices)
    endless = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    (setting.folder / "pid").write_text(str(endless.pid))
    endless.wait()
