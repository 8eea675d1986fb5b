"""Memory that was freed is used again, without the kernel; garbage is looked for when there is time."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from resilient.common.memory import Sweeper, keep_freed_memory

STEPS = """
import resource
import numpy as np
from resilient.common.memory import keep_freed_memory

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    for _ in [np.ones(1 << 20, np.uint8) for _ in range(32)]:
        pass

keep_freed_memory()
step()
before = pages()
for _ in range(10):
    step()
print((pages() - before) * resource.getpagesize() / (320 << 20))
"""


def test_memory_of_a_step_is_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: what malloc gives back depends on all that was freed before."""
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)
    ended = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 0.1, "part of what ten steps allocate that the kernel had to hand out again"


def test_what_the_environment_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    keep_freed_memory()
    library.mallopt.assert_called_once_with(-3, 32 << 20)


def test_libraries_without_the_setting_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock(return_value=Mock(spec=[]))
    monkeypatch.setattr(ctypes, "CDLL", library)
    keep_freed_memory()
    library.assert_called_once()
    assert library.return_value.mock_calls == []


class _Ring:
    """What only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def sweeper() -> Iterator[Sweeper]:
    made = Sweeper(60.0)
    yield made
    made.close()
    assert gc.get_freeze_count() == 0


def test_what_there_was_is_not_looked_at_until_it_is_swept(sweeper: Sweeper) -> None:
    kept, garbage = [0], weakref.ref(_Ring())
    sweeper.pass_time(0.0, is_calm=False)
    gc.collect()
    assert garbage() is not None, "a collection has looked at it"
    assert not any(each is kept for each in gc.get_objects())
    sweeper.pass_time(1.0, is_calm=True)
    assert garbage() is None
    assert not any(each is kept for each in gc.get_objects())


def test_new_objects_are_not_looked_at_by_the_hundreds(sweeper: Sweeper) -> None:
    sweeper.pass_time(0.0, is_calm=True)
    garbage = weakref.ref(_Ring())
    kept = [[number] for number in range(20_000)]
    assert garbage() is not None, f"a collection has looked at it, with {len(kept)} new objects"
    kept += [[number] for number in range(200_000)]
    assert garbage() is None, "memory grows without an end in a busy time"


def test_garbage_is_swept_now_and_then_when_there_is_time(sweeper: Sweeper) -> None:
    sweeper.pass_time(0.0, is_calm=True)
    garbage = weakref.ref(_Ring())
    for now, is_calm in ((58.0, False), (59.0, True), (60.0, False), (61.0, False)):
        sweeper.pass_time(now, is_calm=is_calm)
        assert garbage() is not None
    sweeper.pass_time(62.0, is_calm=True)
    assert garbage() is None


def test_new_garbage_goes_as_soon_as_there_is_time(sweeper: Sweeper) -> None:
    sweeper.pass_time(0.0, is_calm=True)
    garbage = weakref.ref(_Ring())
    sweeper.pass_time(1.0, is_calm=True)
    assert garbage() is None
