"""Equal entries have equal checksums, others do not."""

from __future__ import annotations

import numpy as np
import torch

from resilient.data.checksums import entry_checksum


def test_different_entries_have_different_checksums() -> None:
    grid = torch.arange(6.0).reshape(2, 3)
    nan, negative = torch.tensor(float("nan")), torch.tensor(-0.0)
    entries = [
        grid, grid.T, grid.reshape(3, 2), grid.double(), grid.to(torch.bfloat16), grid.numpy(), [grid, grid], [grid],
        {"a": grid}, {"b": grid}, torch.zeros(0), torch.zeros(0, 1), nan, negative, -negative, torch.tensor(True),
        1, 1.5, "text", b"text", None, object(), np.float32(1),
    ]  # fmt: skip
    checksums = [entry_checksum(entry) for entry in entries]
    assert len(set(checksums)) == len(entries)


def test_equal_entries_have_equal_checksums_however_they_lie_in_memory() -> None:
    grid = torch.arange(6.0).reshape(2, 3)
    assert entry_checksum(grid.T) == entry_checksum(grid.T.contiguous().requires_grad_())
    assert entry_checksum((grid, 1)) == entry_checksum([grid.clone(), 1])
    assert entry_checksum(object()) == entry_checksum(object())
    assert entry_checksum(torch.from_numpy(np.zeros(0))) == entry_checksum(torch.zeros(0, dtype=torch.float64))


def test_single_values_count_whatever_stride_they_have() -> None:
    negated = torch.tensor([1 - 2j]).conj().imag  # read as it is, it would be another
    assert entry_checksum(negated) == entry_checksum(torch.tensor([2.0]))
    halves = torch.arange(8).bfloat16()
    assert entry_checksum(halves[::8]) == entry_checksum(halves[:1].clone())


def test_arrays_of_objects_count_by_what_they_hold() -> None:
    def texts(end: str) -> np.ndarray:
        return np.array([f"a {end}", {"number": len(end)}], dtype=object)

    assert entry_checksum(texts("text")) == entry_checksum(texts("te" + "xt".lower()))
    assert entry_checksum(texts("text")) != entry_checksum(texts("word"))


def test_conjugates_count_by_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert entry_checksum(values.conj()) == entry_checksum(torch.tensor([1 - 2j, 3 + 1j]))
    assert entry_checksum(values.conj().imag) == entry_checksum(torch.tensor([-2.0, 1.0]))
