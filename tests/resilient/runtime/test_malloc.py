"""Memory that was freed is used again, without the kernel."""

from __future__ import annotations

import ctypes
import resource
from unittest.mock import Mock

import pytest
import torch

from resilient.runtime.malloc import keep_freed_memory

NUM_BYTES = 8 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_memory_of_a_tensor_is_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)
    keep_freed_memory()
    for _ in range(20):  # an aligned tensor needs some bytes more than the hole it left: the first few find new places
        torch.zeros(NUM_BYTES, dtype=torch.uint8)
    before = faults()
    for _ in range(20):
        torch.zeros(NUM_BYTES, dtype=torch.uint8).add_(1)
    assert faults() - before < 2 * NUM_BYTES // resource.getpagesize()


def test_what_the_environment_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    keep_freed_memory()
    library.mallopt.assert_called_once_with(-3, 32 << 20)


def test_libraries_without_the_setting_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Mock(spec=[]))
    keep_freed_memory()
